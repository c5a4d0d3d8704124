#!/usr/bin/env bash
# Every check of this repository: bash tests/run.sh [pytest arguments]
# ZIPFX_PYTHON=/path/to/python uses that interpreter instead of .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/python.sh
prepare test
check() {
  echo "+ $*" >&2
  "$python" -m "$@"
}
check ruff check .
check ruff format --check .
check mypy --strict zipfx
check pytest --numprocesses 2 -p no:benchmark "$@"  # each test runs on one thread
