#!/usr/bin/env bash
# What the first of the rented nodes runs, whoever starts it: ssh.sh, slurm.sbatch, skypilot.yaml,
# docker.sh, or a hand.
#
#   FCDP_HOSTS='10.0.0.1 10.0.0.2' launch/commands.sh 'preflight' 'run reference --resume'
#
# One argument a command; the first that cannot run ends it. One with --resume is given again, up to
# a hundred times, where a node was lost or the command was killed. Each starts its ranks on the
# nodes of FCDP_HOSTS, this one first, by ssh, or where that is not set on Slurm's allocation.
# docs/nodes.md lists the other variables.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${VENV:-.venv}/bin/python
[[ -x $python ]] || python=python

status=0 child='' ending='' again=0
# The first process of a container gets the signals that are meant for the command. Caught from the
# start: one that came before the command is known is passed on below.
trap 'ending=1; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true' INT TERM
run() {
    "$python" -m experiments "$@" --cluster rented &
    child=$! code=0
    [[ -z $ending ]] || kill -TERM "$child" 2>/dev/null || true
    wait "$child" || code=$?
    # A trapped signal ends the waiting, not yet the command.
    while kill -0 "$child" 2>/dev/null; do
        wait "$child" || code=$?
    done
    child=''
}
for command in "$@"; do
    mapfile -d '' -t words < <(xargs -r printf '%s\0' <<<"$command") # quotes as a shell's
    run "${words[@]}"
    # 75: a node is lost; 137: the command was killed, and the nodes end what it had started.
    while [[ -z $ending && " $command " == *' --resume '* && $code =~ ^(75|137)$ ]] &&
        ((again++ < 100)); do
        echo "$command: ended with status $code, and is given again in ten seconds" >&2
        for _ in {1..10}; do [[ -n $ending ]] || sleep 1; done
        [[ -n $ending ]] || run "${words[@]}"
    done
    # 1 is a cell that failed; with anything else the next command could not run either.
    [[ $code -eq 0 ]] || status=$code
    [[ $code -le 1 ]] || break
done
exit "$status"
