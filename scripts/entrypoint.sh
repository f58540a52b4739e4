#!/usr/bin/env bash
# The container's entry: a program is run as it is (torchrun, python, make, bash); anything else is
# a command of `python -m experiments` (run, ...) or `python -m analysis`
# (report, table).
set -euo pipefail

if [[ -n $(type -P -- "$1") ]]; then
    exec "$@"
elif [[ $1 == report || $1 == table ]]; then
    exec python -m analysis "$@"
else
    exec python -m experiments "$@"
fi
