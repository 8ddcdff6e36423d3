#!/usr/bin/env bash
# Evaluate a run's base and tuned model with the same settings and compare them, or evaluate any one model, with lm-evaluation-harness.
#
#   bash scripts/eval.sh outputs/tiny/latest                           # the tasks of the run's recipe
#   bash scripts/eval.sh outputs/tiny/latest tasks=gsm8k limit=100
#   bash scripts/eval.sh Qwen/Qwen2.5-0.5B-Instruct tasks=arc_easy,gsm8k limit=10
#   bash scripts/eval.sh outputs/tiny/latest backend=server server.base_url=http://127.0.0.1:8000/v1 server.base=base server.tuned=tuned
#
# The keys are those of a recipe's `eval` section: tasks, suite, include_path, limit, num_fewshot, batch_size, max_gen_toks,
# apply_chat_template, system_instruction, dtype, seed, confirm_run_unsafe_code, backend, server, gate, contamination and more:
# sft/recipe/eval.py. Paths are from the working directory. Exit status 3: the tuned model does not hold what the gate asks for.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/safe_path.sh"
bash "$root/scripts/setup.sh"
exec "$root/.venv/bin/python" -m sft.cli eval "$@"
