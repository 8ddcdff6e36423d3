#!/usr/bin/env bash
# Talk to a run's model, or to any other, in the terminal. One GPU, or all where it does not fit on one, or the CPU.
#
#   bash scripts/chat.sh outputs/tiny/latest                      # the tuned model, final/
#   bash scripts/chat.sh outputs/tiny/latest --base               # the model it was trained from, through the same template
#   bash scripts/chat.sh outputs/tiny/latest --checkpoint 400     # one on the way
#   bash scripts/chat.sh Qwen/Qwen2.5-0.5B-Instruct --system "Answer in French." --temperature 0.7 --max-new-tokens 256
#
# /help names the commands. Ctrl-C stops an answer, Ctrl-D leaves. From a pipe, each line is a turn.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ $# -eq 0 ] || [[ " $* " =~ " -h "|" --help " ]]; then
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}" >&2
  [ $# -gt 0 ] && exit 0 || exit 2
fi
source "$root/scripts/safe_path.sh"
bash "$root/scripts/setup.sh"
export PATH="$root/.venv/bin:$PATH"
exec "$root/.venv/bin/python" -m eval.chat.terminal "$@"
