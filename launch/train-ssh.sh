#!/usr/bin/env bash
# A training program of your own on machines that ssh reaches without a question, which outlives
# their loss: one that goes on by itself from its last checkpoint, and saves at SIGTERM, as
# examples/train.py does. To be called on the first of them, in the program's folder, which all have
# at the same path; what the program writes is in a folder that they share.
#
#   launch/train-ssh.sh '10.0.0.1 10.0.0.2' train.py --model llama --data text.txt --output run
#
# The addresses are those of the network between nodes. Where another machine is lost, the rest go
# on, and it takes part again when ssh reaches it. Where the first one was it: the same call again.
# SIGTERM and Ctrl-C have all ranks save. NCCL_* and GLOO_* reach all of them, other variables the
# first machine's alone; rank 0, which logs to W&B, may be on any: `wandb login` on each.
#
# FCDP_RANKS_PER_NODE   ranks per machine (as many as it has GPUs)
# FCDP_PORT             where the machines meet, on the first (29400)
# TORCHRUN              the program of that name (torchrun)
set -uo pipefail

: "${2:?the machines come first, then the program: 'HOST HOST' train.py …}"
read -r -d '' -a hosts <<<"${1//,/ }"
first=${hosts[0]:?the first argument names no machine}
run=fcdp-$(date +%s)-$$
settings=(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1) # pytorch/pytorch#135712
for name in "${!NCCL_@}" "${!GLOO_@}"; do # on command lines: nothing that may be secret
    settings+=("$name=${!name}")
done

# What a shell of the machine $1 is to run. Where that is hung up or ended, ranks save and end too.
there() {
    local is_host=0
    [[ $1 != "$first" ]] || is_host=1
    printf 'cd %q || exit; stty -onlcr 2>/dev/null; setsid ' "$PWD"
    printf '%q ' env "${settings[@]}" "${TORCHRUN:-torchrun}" --nnodes "1:${#hosts[@]}" \
        --nproc-per-node "${FCDP_RANKS_PER_NODE:-gpu}" --max-restarts 100 --rdzv-backend c10d \
        --rdzv-id "$run" --rdzv-endpoint "$first:${FCDP_PORT:-29400}" \
        --rdzv-conf "is_host=$is_host" --local-addr "$1" "${@:2}"
    # shellcheck disable=SC2016 # expanded there
    printf '%s' '& ranks=$! status=0; trap "kill -TERM $ranks" HUP INT TERM; wait $ranks || status=$?
        while kill -0 $ranks 2>/dev/null; do wait $ranks || status=$?; done; exit $status'
}

# Runs it on another machine until it has ended well, again where that was lost meanwhile.
follow() {
    trap 'kill "$!"; exit' TERM
    while kill -0 $$ 2>/dev/null; do # of the call; it may be killed
        ssh -tt -o BatchMode=yes -o ServerAliveInterval=5 -o ServerAliveCountMax=4 -- "$1" "$2" \
            </dev/null &
        wait $! && break
        echo "$1: left, and is asked again in five seconds" >&2
        sleep 5 & wait $!
    done
}

setpriv --pdeathsig TERM bash -c "$(there "$first" "${@:2}")" </dev/null &
main=$!
others=()
for host in "${hosts[@]:1}"; do
    follow "$host" "$(there "$host" "${@:2}")" &
    others+=($!)
done
trap 'kill -TERM "$main" "${others[@]}"' INT TERM
status=0
wait "$main" || status=$?
while kill -0 "$main" 2>/dev/null; do # a trapped signal ended the waiting, not the ranks
    wait "$main" || status=$?
done
# They end with the first; whoever does not is one that was being asked again.
for ((tenths = 0; tenths < 300; tenths++)); do
    [[ -n $(jobs -r) ]] || break
    sleep 0.1
done
kill -TERM "${others[@]}" 2>/dev/null
exit "$status"
