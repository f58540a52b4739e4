#!/usr/bin/env bash
# What the first of the rented nodes runs, whoever starts it: ssh.sh, slurm.sbatch, skypilot.yaml,
# docker.sh, or a hand.
#
#   FCDP_HOSTS='10.0.0.1 10.0.0.2' launch/commands.sh 'preflight' 'run reference --resume'
#
# One argument a command; the first that cannot run ends it. Each starts its ranks on the nodes of
# FCDP_HOSTS, this one first, by ssh, or where that is not set on those of Slurm's allocation.
# docs/nodes.md lists the other variables.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${VENV:-.venv}/bin/python
[[ -x $python ]] || python=python

status=0 child='' ending=''
# The first process of a container gets the signals that are meant for the command. Caught from the
# start: one that came before the command is known is passed on below.
trap 'ending=1; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true' INT TERM
for command in "$@"; do
    read -r -a words <<<"$command"
    child=''
    "$python" -m experiments "${words[@]}" --cluster rented &
    child=$!
    [[ -z $ending ]] || kill -TERM "$child" 2>/dev/null || true
    wait "$child" || status=$?
    # A trapped signal ends the waiting, not yet the command.
    while kill -0 "$child" 2>/dev/null; do
        wait "$child" || status=$?
    done
    # 1 is a cell that failed; with anything else the next command could not run either.
    [[ $status -le 1 ]] || break
done
exit "$status"
