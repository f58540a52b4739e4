#!/usr/bin/env bash
# The container's entry: a program is run as it is (torchrun, python, make, bash); anything else is
# a command of `python -m analysis` (report, table, audit, check, timeline, draw-plan,
# time-to-quality) or of `python -m experiments` (run, ...).
set -euo pipefail

if [[ -n $(type -P -- "$1") ]]; then
    exec "$@"
fi
case $1 in
report | table | audit | check | timeline | draw-plan | time-to-quality) exec python -m analysis "$@" ;;
*) exec python -m experiments "$@" ;;
esac
