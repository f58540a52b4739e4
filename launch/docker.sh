#!/usr/bin/env bash
# Machines that ssh reaches without a question, with Docker and this repository's image on each; to
# be called on the first of them:
#
#   launch/docker.sh '10.0.0.1 10.0.0.2' 'preflight' 'run reference --resume'
#
# The commands run in a container here, which by ssh has a container started on the other machines
# for each cell. It has the keys, and so the rights, of the account that calls this.
#
# --network host        ranks on other nodes reach this one, and the interface that is counted is the host's
# --ipc host            NCCL shares memory between processes: more than the 64 MB that a container has
# --ulimit memlock=-1   the cache of gathered parameters is pinned (page-locked) host memory
# A node with InfiniBand needs --device /dev/infiniband as well: FCDP_DOCKER_OPTIONS, and one without
# a GPU FCDP_GPUS=none and FCDP_RANKS_PER_NODE.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

image=${FCDP_IMAGE:-fcdp}
options=(--rm --network host --ipc host --ulimit memlock=-1)
[[ ${FCDP_GPUS:-all} == none ]] || options+=(--gpus "${FCDP_GPUS:-all}")
read -r -a more <<<"${FCDP_DOCKER_OPTIONS:-}"
options+=("${more[@]}")
export FCDP_HOSTS=$1 FCDP_PREFIX="docker run --interactive ${options[*]} $image"
# By name: the values are on no command line.
for name in "${!FCDP_@}" "${!NCCL_@}"; do
    options+=(--env "$name")
done
mkdir -p runs
# As root, who may read the keys of whoever calls.
exec docker run "${options[@]}" --user root --volume "$HOME/.ssh:/root/.ssh:ro" \
    --volume "$PWD/runs:/opt/fcdp/runs" "$image" launch/commands.sh "${@:2}"
