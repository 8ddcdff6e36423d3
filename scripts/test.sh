#!/usr/bin/env bash
# The gate: format, lint, types and tests. CI runs this same script.
#
#   bash scripts/test.sh          # fast tests: offline, no GPU
#   bash scripts/test.sh --all    # also the slow ones: real multi-process runs on the CPU. CI=true does the same
#   bash scripts/test.sh --extra  # also the slow rows that repeat a law on one more combination: before a release
#   bash scripts/test.sh --gpu    # only the tests that need an NVIDIA GPU; with .venv, or any other environment that is complete, offline
set -euo pipefail
case "$#:${1:-}" in
  0:) tests=$([ "${CI:-}" = true ] && echo all || echo fast) ;;
  1:--all | 1:--extra | 1:--gpu) tests=${1#--} ;;
  *)
    echo "bash scripts/test.sh [--all | --extra | --gpu], got: $*" >&2
    exit 2
    ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH" # ninja, for DeepSpeed's kernels
complete() { python -c 'import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))' "$@" 2>/dev/null; }
# A GPU machine may have its environment already, and no network.
[ "$tests" = gpu ] && complete datasets deepspeed liger_kernel peft pydantic pytest pytest_timeout torch trl || bash scripts/setup.sh
export HF_HUB_OFFLINE=1 WANDB_MODE=offline OMP_NUM_THREADS=1 # spinning OpenMP threads make two jobs on two cores crawl
trap 'status=$?; echo "scripts/test.sh ($tests): $([ $status = 0 ] && echo passed || echo FAILED) in $SECONDS s"; exit $status' EXIT

if [ "$tests" = gpu ]; then
  python -m pytest -q -m gpu tests/gpu
  exit
fi
ruff format --check .
ruff check .
mypy
# Without --quiet, which hides broken links from --strict too.
site=$(NO_MKDOCS_2_WARNING=1 mkdocs build --strict 2>&1) || { echo "$site"; exit 1; }
lint-imports --no-cache >/dev/null || { lint-imports --no-cache; exit 1; }
python -m pytest -q -n auto --maxprocesses 4 --dist loadscope --ignore tests/slow --ignore tests/gpu
# Two at a time: each starts processes of its own, and waits for them. A test that failed beside others runs once more by itself: on a busy
# machine they can exceed a time limit together. Its first failure stays in the output.
slow() {
  mapfile -t files < <(grep -rl "mark\.slow" tests --include "test_*.py") # importing the others costs each process seconds
  python -m pytest -q -m "$1" "${files[@]}" -n 2 --dist worksteal --durations 40 && return
  [ $? = 1 ] || return 1
  echo "What failed, once more and one at a time:"
  python -m pytest -q -m "$1" "${files[@]}" --last-failed --last-failed-no-failures none
}
case $tests in
  all) slow "slow and not gpu and not extra" ;;
  extra) slow "slow and not gpu" ;;
esac
