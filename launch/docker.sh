#!/usr/bin/env bash
# Machines that ssh reaches without a question, with Docker and this repository's image on each; to
# be called on the first of them:
#
#   launch/docker.sh '10.0.0.1 10.0.0.2' 'preflight' 'run reference --resume'
#
# The commands run in a container here, which by ssh has a container started on the other machines
# for each cell. Here it is the account that calls, with its keys: records are written to ./runs,
# where matrix files of one's own are found too ('run runs/mine.yaml --resume').
#
# --network host        ranks on other nodes reach this one, and the interface that is counted is the host's
# --ipc host            NCCL shares memory between processes: more than the 64 MB that a container has
# --ulimit memlock=-1   the cache of gathered parameters is pinned (page-locked) host memory
#
# FCDP_GPUS             which GPUs (all); none on machines without, which need FCDP_RANKS_PER_NODE
# FCDP_IMAGE            the image's name (fcdp)
# FCDP_DOCKER_OPTIONS   more for `docker run`, the last of two counts: --device /dev/infiniband
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

image=${FCDP_IMAGE:-fcdp}
options=(--rm --network host --ipc host --ulimit memlock=-1)
[[ ${FCDP_GPUS:-all} == none ]] || options+=(--gpus "${FCDP_GPUS:-all}")
read -r -a more <<<"${FCDP_DOCKER_OPTIONS:-}"
options+=("${more[@]}")
# What DeepSpeed compiles there outlives the container, or each cell would compile it again.
kept=${image//[^a-zA-Z0-9_.-]/-}-operators
operators="--volume $kept:/opt/venv/operators --volume $kept-paper:/opt/venv-paper/operators"
export FCDP_HOSTS=$1 FCDP_PREFIX="docker run --interactive ${options[*]} $operators $image"
# By name: the values are on no command line.
IFS=', ' read -r -a named <<<"${FCDP_PASS:-}"
for name in "${!FCDP_@}" "${!NCCL_@}" "${!WANDB_@}" "${named[@]}"; do
    options+=(--env "$name")
done

# ssh refuses settings that are another account's, and takes its own name for the user's there.
options+=(--user "$(id -u):$(id -g)" --volume /etc/passwd:/etc/passwd:ro
    --env HOME --tmpfs "$HOME:exec,mode=1777" --volume "$HOME/.ssh:$HOME/.ssh:ro")
[[ ! -S ${SSH_AUTH_SOCK:-} ]] ||
    options+=(--env SSH_AUTH_SOCK --volume "$SSH_AUTH_SOCK:$SSH_AUTH_SOCK")
# Progress is shown, and Ctrl-C arrives.
[[ ! -t 0 || ! -t 1 ]] || options+=(--interactive --tty)
mkdir -p runs
exec docker run "${options[@]}" --volume "$PWD/runs:/opt/fcdp/runs" \
    "$image" launch/commands.sh "${@:2}"
