#!/usr/bin/env bash
# Create .venv beside this repository and install the pinned stack into it. Does nothing when that is done.
#
#   bash scripts/setup.sh
#   UV_TORCH_BACKEND=cu126 bash scripts/setup.sh      # a torch built for another CUDA than PyPI's wheel
#   PYTHON=/path/to/python3.12 bash scripts/setup.sh  # another interpreter (3.11 or newer)
#
# Uses uv, from PATH or installed into .venv. PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS are honored.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/safe_path.sh"
venv=$root/.venv
wanted=$(cat "$root/requirements.lock" "$root/pyproject.toml" | sha256sum | cut -d' ' -f1)
installed() { [ "$(cat "$venv/installed" 2>/dev/null)" = "$wanted" ]; }
installed && exit 0

fail() { printf '%s\n' "$1" >&2; exit 2; }
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "Python 3.11 or newer is needed, and '$python' is not. Name one: PYTHON=python3.12 bash scripts/setup.sh"
command -v g++ >/dev/null ||
  fail "g++ is needed (DeepSpeed builds its CPU kernels with it) and is not on PATH. On Debian or Ubuntu: apt-get install g++"

# Two jobs that start at once must not install into one folder at the same time.
exec 9>"$root/.setup.lock"
flock 9
installed && exit 0

echo "Installing the pinned stack into $venv (about a minute, once)."
log=$root/.setup.log
quietly() { "$@" >"$log" 2>&1 9>&- || { cat "$log" >&2; fail "Could not install: $*"; }; }
rm -f "$venv/installed"
uv=$(command -v uv || true)
if [ -n "$uv" ]; then
  "$venv/bin/python" -c '' 2>/dev/null || quietly "$uv" venv --clear --python "$python" "$venv"
else
  # An environment without pip is what an interrupted or incomplete `python -m venv` leaves.
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv" ||
    fail "Python's venv module is incomplete. On Debian or Ubuntu: apt-get install python3-venv"
  quietly "$venv/bin/python" -m pip install uv
  uv=$venv/bin/uv
fi
# uv does not read pip's variables. The pins come from one place, so any index may serve any of them.
[ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}
[ -z "${PIP_EXTRA_INDEX_URL:-}" ] || export UV_INDEX=${UV_INDEX:-$PIP_EXTRA_INDEX_URL}
[ -z "${PIP_FIND_LINKS:-}" ] || export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS// /,}}
install() { quietly "$uv" pip install --python "$venv/bin/python" --index-strategy unsafe-best-match "$@"; }
install -r "$root/requirements.lock"
install --no-deps --no-build-isolation -e "$root"
# Reading the names of lm_eval's 14,000 tasks takes seconds; kept, so that a mistyped task is refused at once.
quietly "$venv/bin/python" -m eval.tasks.suites
rm -f "$log"
printf '%s\n' "$wanted" >"$venv/installed"
