#!/usr/bin/env bash
# Does this GPU compute what the CPU does, and what do decoding and training cost on it? Eight minutes, one table.
#
#   bash scripts/gpu_check.sh                      # the largest size that the GPU's free memory holds
#   bash scripts/gpu_check.sh --size small --minutes 4 --sections agreement decode
#
# Needs no network, no installation of this checkout and no .venv: any Python that has the packages (PYTHON=...).
# A package that is missing there can lie in any folder on PYTHONPATH.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${HEADSTART_VENV:-.venv}
default=python3
[ -x "$venv/bin/python" ] && default="$venv/bin/python"
python=${PYTHON:-$default}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=offline
# cuBLAS sums in one order only with a fixed workspace: a resumed run equals a straight one to the bit.
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8}
if ! missing=$("$python" scripts/missing_packages.py accelerate datasets jinja2 omegaconf peft rich safetensors torch transformers); then
    echo "error: $python lacks what the check needs:" >&2
    echo "$missing" >&2
    exit 2
fi
if ! missing=$("$python" scripts/missing_packages.py); then
    echo "tests that need these packages will fail:" >&2
    echo "$missing" >&2
fi
exec "$python" scripts/gpu_check.py "$@"
