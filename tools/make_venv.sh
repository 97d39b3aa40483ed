#!/usr/bin/env bash
# Makes .venv, or brings it up to date: with uv when it is there, else with venv and pip.
# Versions are those of constraints.txt. Usage: tools/make_venv.sh EXTRA,EXTRA
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras="${1:?which extras?}"
venv=.venv

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.11 python3.12 python3.13 python3.14; do
        if command -v "$candidate" >/dev/null 2>&1 && is_recent "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return 0
        fi
    done
    return 1
}

install_with_uv() {
    if ! is_recent "$venv/bin/python"; then
        # Without a Python of its own the machine gets the one that uv brings.
        uv venv --quiet --clear --python "$(find_python || echo 3.11)" "$venv"
    fi
    VIRTUAL_ENV="$PWD/$venv" uv pip install --quiet --constraint constraints.txt --editable ".[$extras]"
}

install_with_pip() {
    local python
    if ! is_recent "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        python="$(find_python)" || { echo "Python 3.11 or later is needed; none is on the PATH (or set PYTHON)" >&2; exit 1; }
        "$python" -m venv --clear "$venv"
    fi
    # As uv does, without bytecode of everything: Python makes it of what is imported, when it is.
    PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip install --no-compile --quiet --constraint constraints.txt --editable ".[$extras]"
}

if command -v uv >/dev/null 2>&1; then
    echo "environment: uv" >&2
    install_with_uv
else
    echo "environment: venv and pip" >&2
    install_with_pip
fi
