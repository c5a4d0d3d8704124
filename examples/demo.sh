#!/usr/bin/env bash
# Installs zipfx into .venv and merges two digit classifiers: bash examples/demo.sh
# ZIPFX_PYTHON=/path/to/python uses that interpreter instead of .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/python.sh
prepare examples
"$python" examples/digits.py
