#!/usr/bin/env bash
# Hand over what a run has trained: a folder that is complete by itself, for vLLM, for Ollama, or on the hub. docs/export.md
#
#   bash scripts/export.sh outputs/tiny/latest --to merged                        weights, tokenizer, template, card: one folder
#   bash scripts/export.sh outputs/tiny/latest --to vllm --gpus 2                 and serve.sh, with the command for two GPUs
#   bash scripts/export.sh outputs/tiny/latest --to ollama                        and a Modelfile
#   bash scripts/export.sh outputs/tiny/latest --to hub --repo-id me/tiny --dry-run    what would be uploaded, with sizes
#   bash scripts/export.sh outputs/tiny/latest --to hub --repo-id me/tiny --checkpoints all    private; a branch per checkpoint
#
# --checkpoint N takes a checkpoint instead of final/; --output DIR names the folder (default: exports/RECIPE-RUN-TARGET).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/safe_path.sh"
bash "$root/scripts/setup.sh"
exec "$root/.venv/bin/python" -m sft.cli export "$@"
