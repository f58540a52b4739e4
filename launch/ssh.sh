#!/usr/bin/env bash
# Machines that ssh reaches without a question, with this repository set up at the same path on each
# (`make setup`). To be called on the first of them:
#
#   launch/ssh.sh '10.0.0.1 10.0.0.2' 'preflight' 'run reference --resume'
#
# The addresses are those of the network between nodes; users, keys and ports belong into
# ~/.ssh/config. The same call again goes on where a lost node or an interruption ended it.
set -euo pipefail

export FCDP_HOSTS=$1
exec "$(dirname "${BASH_SOURCE[0]}")/commands.sh" "${@:2}"
