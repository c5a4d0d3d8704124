# Sourced, not run. `prepare EXTRA` installs this repository with that extra and sets `python`:
# the interpreter that ZIPFX_PYTHON names, else the one in .venv, which is made where absent.
prepare() {
  python="${ZIPFX_PYTHON:-$PWD/.venv/bin/python}"
  if [[ -z "${ZIPFX_PYTHON:-}" && ! -x "$python" ]]; then
    echo "+ python3 -m venv .venv" >&2
    python3 -m venv .venv
  fi
  echo "+ pip install -e .[$1]" >&2
  "$python" -m pip install --quiet --disable-pip-version-check --editable ".[$1]"
}
