#!/usr/bin/env bash
# Train a recipe, evaluate base and tuned model, write a report. Sets up .venv at the first call.
#
#   bash scripts/sft.sh recipes/tiny.yaml                             train
#   bash scripts/sft.sh recipes/tiny.yaml train.learning_rate=1e-3    change a key
#   bash scripts/sft.sh recipes/tiny.yaml --show 3                    three rows as the model gets them, ledger, findings
#   bash scripts/sft.sh recipes/tiny.yaml --prepare                   prepare the data for a later start, and stop
#   bash scripts/sft.sh recipes/qwen3b.yaml --plan                    print every decision, and stop
#   bash scripts/sft.sh recipes/qwen3b.yaml --plan --on 8x80GB        for a machine that is not here
#   bash scripts/sft.sh recipes/qwen3b.yaml --plan --on 8xH100 --price 2.5    and what it costs at this price per GPU-hour
#   bash scripts/sft.sh recipes/qwen3b.yaml --on 1x24GB --fit         the smallest changes that make it fit
#   bash scripts/sft.sh recipes/qwen3b.yaml --preflight               check all machines and processes, and stop
#   bash scripts/sft.sh outputs/tiny/latest                           resume a run, or train a finished one again
#   NPROC=2 bash scripts/sft.sh recipes/tiny.yaml                     two processes (default, or NPROC=auto: one for each GPU)
#   bash scripts/sft.sh recipes/tiny.yaml --max-restarts 3            restart from the newest checkpoint after a failure
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 bash scripts/sft.sh recipes/qwen3b.yaml    on the first of two machines
#
# On clusters: scripts/slurm/sft.sbatch, scripts/kubernetes/pytorchjob.yaml, scripts/skypilot/sft.yaml. The first process speaks; the
# others write to outputs/RECIPE/RUN/logs/rank-N.log. Whichever fails first is shown, with its rank and machine.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/safe_path.sh"
bash "$root/scripts/setup.sh"
exec "$root/.venv/bin/python" -m sft.cli train "$@"
