#!/usr/bin/env bash
# Lint, format, types, import contract, fast and slow tests. Installs what it needs on the first run.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
source "${HEADSTART_VENV:-.venv}/bin/activate"
# Two cores: one thread for each test process, and no spinning that would starve the other one.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=offline
ruff check .
ruff format --check .
pyright
lint-imports
pytest -q
pytest -q --dist loadscope -m slow
