#!/usr/bin/env bash
# Train a recipe, evaluate base and tuned model, write a report. Sets up .venv at the first call.
#
#   bash scripts/sft.sh recipes/tiny.yaml                             train
#   bash scripts/sft.sh recipes/tiny.yaml train.learning_rate=1e-3    change a key
#   bash scripts/sft.sh recipes/tiny.yaml --show 3                    three rows as the model gets them, ledger, findings
#   bash scripts/sft.sh recipes/tiny.yaml --prepare                   prepare the data for a later start, and stop
#   bash scripts/sft.sh recipes/qwen3b.yaml --plan                    print every decision, and stop
#   bash scripts/sft.sh recipes/qwen3b.yaml --plan --on 8x80GB        for a machine that is not here
#   bash scripts/sft.sh recipes/qwen3b.yaml --preflight               check all machines and processes, and stop
#   NPROC=2 bash scripts/sft.sh recipes/tiny.yaml                     two processes (default: one for each GPU)
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 bash scripts/sft.sh recipes/qwen3b.yaml    on the first of two machines
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/scripts/setup.sh"
# DeepSpeed finds ninja, and a user torchrun, by PATH.
export PATH="$root/.venv/bin:$PATH"
exec "$root/.venv/bin/python" -m sft.launch "$@"
