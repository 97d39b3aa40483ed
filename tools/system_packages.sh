#!/usr/bin/env bash
# Installs the system packages that are missing, when it may; says which they are, when it may not.
# A line of the table: the test that is true when nothing is missing | the Debian package | what needs it.
set -euo pipefail

has_venv() {
    command -v uv >/dev/null 2>&1 && return 0
    python3 -c 'import ensurepip, venv' >/dev/null 2>&1
}
has_git() { command -v git >/dev/null 2>&1; }

TABLE=(
    "has_venv|python3-venv|making .venv without uv"
    "has_git|git|the check of tracked files"
)

missing=()
for row in "${TABLE[@]}"; do
    IFS='|' read -r test package purpose <<<"$row"
    "$test" && continue
    echo "system package missing: $package (for $purpose)" >&2
    missing+=("$package")
done
[ "${#missing[@]}" -eq 0 ] && exit 0

if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing: ${missing[*]}" >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || echo "the package lists could not be refreshed; trying with those at hand" >&2
    apt-get install -y -qq --no-install-recommends "${missing[@]}"
else
    echo "not root, or no apt-get here. Install them yourself, for example: sudo apt-get install ${missing[*]}" >&2
    exit 1
fi
