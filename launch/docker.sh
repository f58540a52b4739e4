#!/usr/bin/env bash
# One node in a container; to be called on every node, with the variables that node.sh reads:
#
#   FCDP_NODE=0 FCDP_NODES=2 FCDP_HEAD=10.0.0.1:29400 FCDP_TOKEN=… \
#       launch/docker.sh 'preflight' 'run reference --resume'
#
# --network host        ranks on other nodes reach this one, and the interface that is counted is the host's
# --ipc host            NCCL shares memory between processes: more than the 64 MB that a container has
# --ulimit memlock=-1   the cache of gathered parameters is pinned (page-locked) host memory
# --env NAME            with its value from here, so that the token is on no command line
# A node with InfiniBand needs --device /dev/infiniband as well: FCDP_DOCKER_OPTIONS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

options=(--rm --gpus all --network host --ipc host --ulimit memlock=-1)
read -r -a more <<<"${FCDP_DOCKER_OPTIONS:-}"
for name in "${!FCDP_@}" "${!NCCL_@}"; do
    options+=(--env "$name")
done
mkdir -p runs
exec docker run "${options[@]}" "${more[@]}" --volume "$PWD/runs:/opt/fcdp/runs" \
    "${FCDP_IMAGE:-fcdp}" launch/node.sh "$@"
