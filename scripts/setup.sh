#!/usr/bin/env bash
# Make .venv beside this repository and install the pinned stack into it. Costs nothing when that is already done.
#
#   bash scripts/setup.sh
#
# PYTHON=/path/to/python3.12 chooses the interpreter (3.11 or newer).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/safe_path.sh"
venv=$root/.venv
wanted=$(cat "$root/requirements.lock" "$root/pyproject.toml" | sha256sum | cut -d' ' -f1)
if [ "$(cat "$venv/installed" 2>/dev/null)" = "$wanted" ]; then exit 0; fi

fail() { printf '%s\n' "$1" >&2; exit 2; }
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "Python 3.11 or newer is needed, and '$python' is not. Name one: PYTHON=python3.12 bash scripts/setup.sh"
command -v g++ >/dev/null ||
  fail "g++ is needed (DeepSpeed builds its CPU kernels with it) and is not on PATH. On Debian or Ubuntu: apt-get install g++"

# Two jobs that start at once must not install into one folder at the same time.
exec 9>"$root/.setup.lock"
flock 9
if [ "$(cat "$venv/installed" 2>/dev/null)" = "$wanted" ]; then exit 0; fi

echo "Installing the pinned stack into $venv (about two minutes, once)."
# An environment without pip is what is left where Debian's python3-venv was missing at the first try.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv" ||
  fail "Python's venv module is incomplete. On Debian or Ubuntu: apt-get install python3-venv"
rm -f "$venv/installed"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$root/requirements.lock" 9>&-
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e "$root" 9>&-
# Reading the names of lm_eval's 14,000 tasks takes seconds; kept, so that a mistyped task is refused at once.
"$venv/bin/python" -m eval.tasks.suites >/dev/null 9>&-
printf '%s\n' "$wanted" >"$venv/installed"
