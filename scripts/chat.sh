#!/usr/bin/env bash
# Chat with a run's model, or any other, in the terminal. One GPU, or all if it does not fit on one, or the CPU.
#
#   bash scripts/chat.sh outputs/tiny/latest                      # the tuned model, final/
#   bash scripts/chat.sh outputs/tiny/latest --base               # the model it was trained from, through the same template
#   bash scripts/chat.sh outputs/tiny/latest --checkpoint 400     # one on the way
#   bash scripts/chat.sh Qwen/Qwen2.5-0.5B-Instruct --system "Answer in French." --temperature 0.7 --max-new-tokens 256
#
# /help names the commands. Ctrl-C stops an answer, Ctrl-D exits. From a pipe, each line is a turn.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/safe_path.sh"
bash "$root/scripts/setup.sh"
exec "$root/.venv/bin/python" -m sft.cli chat "$@"
