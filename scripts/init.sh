#!/usr/bin/env bash
# Inspect a dataset and write a ready-to-run recipe, with a reason for each value. Sets up .venv at the first call.
#
#   bash scripts/init.sh reviews.csv                                    a small open model, this machine
#   bash scripts/init.sh chats.jsonl --model Qwen/Qwen2.5-7B --gpus 8x80GB -o recipes/chats.yaml
#   bash scripts/init.sh faq.csv --columns prompt=Frage,completion=Antwort train.num_train_epochs=1
#
# Beside NAME.yaml, the folder NAME_eval holds the eval split and a task made of it. Nothing is overwritten.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/safe_path.sh"
bash "$root/scripts/setup.sh"
exec "$root/.venv/bin/python" -m sft.cli init "$@"
