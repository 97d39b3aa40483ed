#!/usr/bin/env bash
# Installs the system packages that are missing, when it may; says which they are, when it may not.
# A line of a table: the test that is true when nothing is missing | the Debian package | what needs it.
# Usage: tools/system_packages.sh          what everything needs; fails without it
#        tools/system_packages.sh bench    servers that are only measured; goes on without them, the bench says so
set -euo pipefail

has_venv() {
    command -v uv >/dev/null 2>&1 && return 0
    python3 -c 'import ensurepip, venv' >/dev/null 2>&1
}
has_git() { command -v git >/dev/null 2>&1; }
has_dovecot() { command -v dovecot >/dev/null 2>&1 || [ -x /usr/sbin/dovecot ]; }
may_install() { [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; }
# The headless shell takes a third of the CPU time. A full Chromium does where the shell cannot be had.
has_chromium() {
    command -v chromium-headless-shell >/dev/null 2>&1 && return 0
    command -v chromium >/dev/null 2>&1 && ! { may_install && apt-cache show chromium-headless-shell >/dev/null 2>&1; }
}
has_systemd() { command -v systemd-analyze >/dev/null 2>&1; }
has_redis() { command -v redis-server >/dev/null 2>&1; }

case "${1:-}" in
"")
    TABLE=(
        "has_venv|python3-venv|making .venv without uv"
        "has_git|git|the check of tracked files"
        "has_dovecot|dovecot-imapd|the IMAP server that tests start"
        "has_chromium|chromium-headless-shell|the browser that tests drive"
        "has_systemd|systemd|the check of the unit that is shipped"
    )
    without=1
    ;;
bench)
    TABLE=("has_redis|redis-server|measuring Redis beside us")
    without=0
    ;;
*)
    echo "usage: $0 [bench]" >&2
    exit 2
    ;;
esac

missing=()
for row in "${TABLE[@]}"; do
    IFS='|' read -r test package purpose <<<"$row"
    "$test" && continue
    echo "system package missing: $package (for $purpose)" >&2
    missing+=("$package")
done
[ "${#missing[@]}" -eq 0 ] && exit 0

POLICY=/usr/sbin/policy-rc.d

# Debian starts a server when it is installed, unless this file says no. One that is there already is left as it is.
forbid_starting() {
    [ -e "$POLICY" ] && return 0
    trap 'rm -f "$POLICY"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$POLICY"
    chmod 755 "$POLICY"
}

# The bench starts a server of its own. The package's must neither run now nor at the next boot. It was not installed
# before, so nobody relies on it.
keep_stopped() {
    local service
    for service in "$@"; do
        service "$service" stop >/dev/null 2>&1 || true
        update-rc.d "$service" disable >/dev/null 2>&1 || true
        deb-systemd-helper disable "$service.service" >/dev/null 2>&1 || true
    done
}

install_missing() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || echo "the package lists could not be refreshed; trying with those at hand" >&2
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
}

if may_install; then
    echo "installing: ${missing[*]}" >&2
    if [ "$without" -eq 0 ]; then
        forbid_starting
        install_missing || echo "could not be installed: ${missing[*]}; going on without" >&2
        keep_stopped "${missing[@]}"
    else
        install_missing
    fi
else
    echo "not root, or no apt-get here. Install them yourself, for example: sudo apt-get install ${missing[*]}" >&2
    exit "$without"
fi
