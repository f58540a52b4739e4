#!/usr/bin/env bash
# What every node of an allocation runs, whoever starts it: ssh.sh, slurm.sbatch, skypilot.yaml,
# docker run, or a hand at each machine. Node 0 runs the commands, the others its ranks.
#
#   launch/node.sh 'preflight' 'run reference --resume'     one argument a command
#
# Reads, the same on every node:
#   FCDP_HEAD=HOST:PORT       node 0's address on the network between nodes, and a free port
#   FCDP_NODES=N              how many nodes there are
#   FCDP_TOKEN=SECRET         what nodes prove to each other that they know (openssl rand -hex 32)
#   FCDP_RANKS_PER_NODE=L     unless it is the number of GPUs
# and on each node:
#   FCDP_NODE=0…N-1           which one it is
#   FCDP_INTERFACE=NAME       what counts bytes between nodes, unless it is the interface with the
#                             address that FCDP_HEAD is reached from: an InfiniBand adapter, mlx5_0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${VENV:-.venv}/bin/python
[[ -x $python ]] || python=python

if [[ $FCDP_NODE != 0 ]]; then
    exec "$python" -m experiments node
fi

"$python" -m experiments node &
agent=$!
trap 'kill "$agent" 2>/dev/null || true' EXIT
status=0
for command in "$@"; do
    read -r -a words <<<"$command"
    "$python" -m experiments "${words[@]}" --cluster rented || status=$?
    # 1 is a cell that failed; with anything else the next command could not run either.
    [[ $status -le 1 ]] || break
done
exit "$status"
