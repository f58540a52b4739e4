#!/usr/bin/env bash
# Machines that ssh reaches without a question, with this repository set up at the same path on each
# (`make setup`). To be called on the first of them:
#
#   launch/ssh.sh 'node0 node1' 'preflight' 'run reference --resume'
#
# The addresses are those of the network between nodes. The same call again goes on where a lost
# node or an interruption ended it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

read -r -a hosts <<<"$1"
shift
token=$(openssl rand -hex 32)
settings="FCDP_HEAD=${FCDP_HEAD:-${hosts[0]}:29400} FCDP_NODES=${#hosts[@]}"
# What the nodes must have alike; no secret, as a command line can be read by everybody.
for name in FCDP_RANKS_PER_NODE FCDP_INTERFACE "${!NCCL_@}"; do
    [[ -z ${!name:-} ]] || settings+=" $name=$(printf %q "${!name}")"
done

agents=()
trap 'kill "${agents[@]}" 2>/dev/null || true' EXIT
for number in "${!hosts[@]}"; do
    # The token goes by standard input; read by bash, it is on no command line.
    command="cd $(printf %q "$PWD") && read -r FCDP_TOKEN && export FCDP_TOKEN && "
    command+="exec env $settings FCDP_NODE=$number launch/node.sh$(printf ' %q' "$@")"
    if [[ $number == 0 ]]; then
        first=$command
    else
        ssh -o BatchMode=yes "${hosts[number]}" "$command" <<<"$token" &
        agents+=("$!")
    fi
done
bash -c "$first" <<<"$token"
