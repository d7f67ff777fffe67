#!/bin/sh
# step.sh LABEL LOG COMMAND...: runs one slow set-up step quietly. One line says what it is and how long it took (with
# the seconds so far on a terminal); the command's output goes to LOG and is shown only if the command fails.
set -u
label=$1 log=$2
shift 2
mkdir -p "$(dirname "$log")"

start=$(date +%s)
"$@" >"$log" 2>&1 </dev/null &
child=$!
trap 'kill "$child" 2>/dev/null; exit 130' INT TERM

if [ -t 1 ]; then
    while kill -0 "$child" 2>/dev/null; do
        printf '\r  %s ... %ss' "$label" "$(($(date +%s) - start))"
        sleep 1
    done
    printf '\r'
fi

if wait "$child"; then
    printf '  %s: done in %ss\n' "$label" "$(($(date +%s) - start))"
else
    status=$?
    printf '  %s: FAILED; the end of %s:\n' "$label" "$log" >&2
    tail -n 30 "$log" >&2
    exit "$status"
fi
