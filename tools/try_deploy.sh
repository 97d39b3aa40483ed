#!/usr/bin/env bash
# Tries what deploy/ has, as far as this machine can; needs root, to become somebody without rights.
#   tools/try_deploy.sh unit        the command of the unit, as a user without rights or capabilities, until SIGTERM
#   tools/try_deploy.sh container   builds the container file with buildah and runs the image, without a daemon
# PYTHON: the interpreter of the unit, one that every user may run (default: /usr/bin/python3).
# BASE: the image to build on (default: the one of the container file). BUILD_FLAGS: more words for `buildah build`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
chmod 711 "$work"

expect() { # what is expected, what was found, of what
    [ "$1" = "$2" ] || { echo "$3: $2, not $1" >&2; exit 1; }
    echo "$3: $2"
}

try_unit() {
    local home="$work/state" program="$work/opt" somebody pid code command
    "${PYTHON:-/usr/bin/python3}" -m venv "$program"
    "$program/bin/python" -m pip install --quiet --constraint constraints.txt ".[all]"
    install --directory --owner 65534 --group 65534 --mode 0700 "$home"
    sed "s#/var/lib/reefknot#$home#" deploy/reefknot.yaml >"$work/reefknot.yaml"
    chmod 644 "$work/reefknot.yaml"
    sed "s#/opt/reefknot#$program#; s#/etc/reefknot#$work#; s#/var/lib/reefknot#$home#" deploy/reefknot.service >"$work/reefknot.service"
    systemd-analyze verify "$work/reefknot.service"
    systemd-analyze security --offline=true "$work/reefknot.service" | tail -n 1
    command="$(sed -n 's/^ExecStart=//p' "$work/reefknot.service")"
    somebody=(setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all)
    cd "$home"
    # The variables are those that systemd gives a service of that user.
    # shellcheck disable=SC2086 # the words of the command
    "${somebody[@]}" env -i PATH=/usr/local/bin:/usr/bin:/bin HOME="$home" STATE_DIRECTORY="$home" \
        DASHBOARD_TOKEN="$(openssl rand -hex 32)" $command >"$work/log" 2>&1 &
    pid=$!
    for _ in $(seq 300); do
        grep -q worker-1 "$work/log" && break
        sleep 0.1
    done
    "${somebody[@]}" "$program/bin/reefknot" doctor --config "$work/reefknot.yaml"
    expect 65534 "$(stat --format %u "$home/state.db")" "owner of the store"
    expect 600 "$(stat --format %a "$home/state.db")" "rights of the store"
    kill -TERM "$pid"
    code=0
    wait "$pid" || code=$?
    expect 143 "$code" "exit code after SIGTERM"
}

try_container() {
    local tag=localhost/reefknot-try name=reefknot-try shown
    local storage=(--root "$work/images" --runroot "$work/run" --storage-driver vfs)
    if [ -n "${BASE_TAR:-}" ]; then # a root file system, where no registry of images can be reached
        BASE="localhost/base"
        podman "${storage[@]}" import --quiet "$BASE_TAR" "$BASE" >/dev/null
    fi
    # shellcheck disable=SC2086 # words
    buildah "${storage[@]}" build --isolation chroot --format docker ${BASE:+--build-arg BASE="$BASE"} ${BUILD_FLAGS:-} \
        --tag "$tag" --file deploy/Containerfile . >"$work/build" 2>&1 || { tail -n 40 "$work/build" >&2; exit 1; }
    buildah "${storage[@]}" from --quiet --name "$name" "$tag" >/dev/null
    inside() { buildah "${storage[@]}" run --isolation chroot "$name" -- "$@"; }
    expect 10001 "$(inside id -u)" "user"
    expect 700 "$(inside stat --format %a /var/lib/reefknot)" "rights of the state"
    inside reefknot --version
    # What the container's command, its health check and its stop signal do, one after the other.
    shown="$(inside sh -c 'export DASHBOARD_TOKEN="$(head -c 24 /dev/urandom | base64)"
        reefknot up --drain 25 --log-format json >/dev/null 2>&1 & pid=$!
        for _ in $(seq 300); do reefknot router status --json >/dev/null 2>&1 && echo healthy && break; sleep 0.1; done
        kill -TERM $pid; wait $pid; echo "end: $?"')"
    expect "healthy end: 143" "$(tr "\n" " " <<<"$shown" | sed "s/ *$//")" "health check and stop"
    inside reefknot doctor
    expect 69 "$(inside sh -c 'reefknot router status >/dev/null 2>&1; echo $?')" "health check when nothing runs"
    buildah "${storage[@]}" rm "$name" >/dev/null
}

case "${1:-}" in
unit) try_unit ;;
container) try_container ;;
*)
    echo "usage: $0 unit | container" >&2
    exit 2
    ;;
esac
