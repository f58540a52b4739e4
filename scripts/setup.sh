#!/usr/bin/env bash
# Makes the virtual environment that everything here runs in, from the exact versions in
# constraints.txt. Used by make and by the Dockerfile; there is no second list.
#
#   scripts/setup.sh           set up; nothing is done where it is done already. Without DeepSpeed,
#                              where it cannot be installed; each call tries it again
#   scripts/setup.sh --pins    the same, and beside it VENV-paper, with the DeepSpeed of the paper;
#                              fails where one of the two is missing
#   scripts/setup.sh --clients the same, and beside it VENV-clients, with other people's trainers
#   scripts/setup.sh --torch VERSION  the same, and beside it VENV-VERSION, with another torch in front:
#                              a release, or nightly; and VENV-clients between, if it is there
#   scripts/setup.sh --check   say what would be done, and fail where a system package is missing
#
#   PYTHON=python3.12          the interpreter (default: python3)
#   VENV=/opt/venv             the virtual environment (default: .venv)
#   TORCH=cpu|cuda             the build of torch (default: auto, that is cuda where there is an NVIDIA GPU)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3} VENV=${VENV:-.venv} TORCH=${TORCH:-auto}
CPU_INDEX=https://download.pytorch.org/whl/cpu
NIGHTLY_INDEX=https://download.pytorch.org/whl/nightly/cpu

say() { echo "setup: $*"; }
die() { printf 'setup: %s\n' "$@" >&2; exit 1; }

# A step keeps its output to itself unless it fails.
step() { # step TEXT COMMAND...
    local started=$SECONDS
    printf 'setup: %s ... ' "$1"
    if "${@:2}" >"$log" 2>&1; then
        echo "$((SECONDS - started)) s"
    else
        echo failed
        tail -n 30 "$log" >&2
        return 1
    fi
}

# ---------------------------------------------------------------- what this machine has

missing_packages() {
    local name=python3
    [[ ${PYTHON##*/} =~ ^python3(\.[0-9]+)?$ ]] && name=${PYTHON##*/}
    if ! command -v "$PYTHON" >/dev/null; then
        echo "$name" "$name-venv" "$name-dev"
    else
        "$PYTHON" -c 'import ensurepip, venv' &>/dev/null || echo "$name-venv"
        # DeepSpeed compiles its CPU operators when they are first used.
        "$PYTHON" -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")' &>/dev/null ||
            echo "$name-dev"
    fi
    command -v g++ >/dev/null || echo g++
    command -v make >/dev/null || echo make
}

require_system_packages() { # require_system_packages MAY_INSTALL
    local missing
    mapfile -t missing < <(missing_packages)
    if [[ ${#missing[@]} != 0 && $1 == yes && $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        step "installing ${missing[*]}" apt_install "${missing[@]}" || true
        mapfile -t missing < <(missing_packages)
    fi
    [[ ${#missing[@]} == 0 ]] || die "missing system packages: ${missing[*]}" \
        "on Debian and Ubuntu: sudo apt-get install ${missing[*]}"
}

apt_install() {
    apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
}

torch_build() {
    case $TORCH in
    cpu | cuda) echo "$TORCH" ;;
    auto)
        if [[ -e /proc/driver/nvidia/version ]] || nvidia-smi -L >/dev/null 2>&1; then
            echo cuda
        else
            echo cpu
        fi
        ;;
    *) die "TORCH is '$TORCH'; it can be auto, cpu or cuda" ;;
    esac
}

# ---------------------------------------------------------------- installing

# Container images and users set some of these; none is meant for this environment.
unset PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME PIP_CONSTRAINT PIP_REQUIREMENT PIP_TARGET PIP_PREFIX PIP_REQUIRE_HASHES
export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# Python compiles what it imports; compiling all that is installed would double the time.
pip_install() { "$VENV/bin/python" -m pip install --no-compile --progress-bar off "$@"; }

make_venv() {
    "$PYTHON" -m venv --clear "$VENV" &&
        pip_install --constraint constraints.txt pip setuptools wheel
}

# PyPI's torch is the CUDA build and brings gigabytes of libraries with it. The CPU build is in
# PyTorch's own index, or wherever pip is configured to look. That index is asked for torch alone
# (--no-deps), and briefly: where it cannot be reached pip goes on without it.
install_torch() { # install_torch VERSION
    local version=$1
    if [[ $version == nightly ]]; then
        step "installing tonight's torch" pip_install --no-deps --pre --upgrade \
            --index-url "$NIGHTLY_INDEX" torch
        return
    fi
    if [[ $build == cpu ]]; then
        step "installing torch $version+cpu" pip_install --no-deps --retries 1 --timeout 20 \
            --extra-index-url "$CPU_INDEX" "torch==$version+cpu" && return
        say "the CPU build of torch is neither at $CPU_INDEX nor where pip looks (PIP_FIND_LINKS," \
            "pip config); taking the CUDA build from PyPI instead, which works too but is some 3 GB"
    fi
    step "installing torch $version (CUDA)" pip_install --no-deps "torch==$version"
}

install_project() {
    pip_install --constraint constraints.txt --no-build-isolation \
        --group experiments --group analysis --group tests --group docs --editable '.[differences]'
}

# DeepSpeed is compiled from source, in this environment and not in one of pip's, with none of its
# operators built ahead. With the CPU named as its accelerator the build does not look for nvcc; it
# leaves no trace in what is installed. It comes last, so that all else works if it cannot be had.
install_current() {
    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu \
        pip_install --constraint constraints.txt --no-build-isolation --group baselines
}

# An environment that sees all of another one's packages behind its own: torch and the rest must be
# the same files for a comparison, and are too large to have twice.
make_beside() { # make_beside ENVIRONMENT BEHIND_IT
    "$PYTHON" -m venv --clear --without-pip "$1" &&
        "$1/bin/python" -c 'import pathlib, sys, sysconfig
own = pathlib.Path(sysconfig.get_path("purelib"))
shared = str(pathlib.Path(sys.argv[1]).absolute() / own.relative_to(sys.prefix))
(own / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")' "$2"
}

install_paper() {
    make_beside "$paper" "$VENV" &&
        sed '/^deepspeed==/d' constraints.txt >"$paper/constraints.txt" &&
        cat constraints-paper.txt >>"$paper/constraints.txt" &&
        DS_BUILD_OPS=0 DS_ACCELERATOR=cpu VENV=$paper \
            pip_install --constraint "$paper/constraints.txt" --no-build-isolation deepspeed &&
        "$paper/bin/python" -c 'import deepspeed'
}

# Of a complete list: torchtitan asks for an older datasets than TRL, and needs none.
install_clients() {
    make_beside "$clients" "$VENV" && VENV=$clients pip_install --no-deps --requirement constraints-clients.txt &&
        "$clients/bin/python" -c 'import bitsandbytes, lightning, torchao, torchtitan, trl'
}

# Beside what the first environment has and fits: most of it.
install_needs_of_torch() {
    pip_install torch && "$VENV/bin/python" -c 'import torch'
}

pin_of() { sed -n "s/^$1==\\([^ ;]*\\).*/\\1/p" "$2"; } # pin_of PACKAGE FILE

# ---------------------------------------------------------------- the environments

set_up() {
    [[ ! -L $VENV ]] || die "$VENV is a link, and what it leads to would be emptied: remove the link"
    if [[ -n $(ls -A "$VENV" 2>/dev/null) && ! -e $VENV/pyvenv.cfg ]]; then
        die "$VENV is there and is not a virtual environment: remove it, or name another with VENV="
    fi
    require_system_packages yes
    step "making $VENV with $("$PYTHON" -V)" make_venv || exit
    install_torch "$(pin_of torch constraints.txt)" || exit
    step "installing the rest of constraints.txt and this project" install_project || exit
    step "importing torch" "$VENV/bin/python" -c 'import torch, fcdp' || exit
}

# Its stamp goes with the environment when that is made anew.
set_up_deepspeed() {
    [[ -e $VENV/deepspeed.stamp ]] && return
    step "installing DeepSpeed $(pin_of deepspeed constraints.txt)" install_current || fail \
        "DeepSpeed $(pin_of deepspeed constraints.txt) is missing in $VENV, for the reason above" \
        "all else works there, and cells that need it are skipped; try again: make setup" || return
    touch "$VENV/deepspeed.stamp"
}

set_up_paper() {
    step "installing DeepSpeed $(pin_of deepspeed constraints-paper.txt) in $paper" install_paper || fail \
        "DeepSpeed $(pin_of deepspeed constraints-paper.txt) is missing, for the reason above" \
        "$VENV works without it, and cells that need it are skipped; try again: make baselines"
}

set_up_clients() {
    step "installing constraints-clients.txt in $clients" install_clients || fail \
        "other people's trainers are missing, for the reason above" \
        "$VENV works without them, and their tests are skipped; try again: make clients"
}

set_up_released() {
    local behind=$VENV
    [[ -e $clients/setup.stamp ]] && behind=$clients
    { make_beside "$released" "$behind" && VENV=$released install_torch "$release" &&
        VENV=$released step "installing what it needs" install_needs_of_torch; } || fail \
        "torch $release is missing, for the reason above; $VENV works without it"
}

fail() {
    printf 'setup: %s\n' "$@" >&2
    return 1
}

# What an environment depends on. Its stamp is written last, so an interrupted set-up has none.
key() { # key FILE...
    {
        cat "$@" pyproject.toml scripts/setup.sh
        echo "$PWD" "$VENV" "$build"
        "$PYTHON" -VV
    } | sha256sum
}

is_up_to_date() { # is_up_to_date ENVIRONMENT KEY
    [[ -x $1/bin/python && $(cat "$1/setup.stamp" 2>/dev/null) == "$2" ]] && say "$1 is up to date"
}

bring_up_to_date() { # bring_up_to_date ENVIRONMENT COMMAND FILE...
    local key started=$SECONDS
    key=$(key "${@:3}")
    is_up_to_date "$1" "$key" && return
    "$2" || return
    echo "$key" >"$1/setup.stamp"
    say "$1: done in $((SECONDS - started)) s"
}

# ---------------------------------------------------------------- main

case ${1:-} in
"" | --pins | --clients | --check) ;;
--torch) [[ -n ${2:-} ]] || die "--torch needs a release of torch, or nightly" ;;
*) die "usage: scripts/setup.sh [--pins | --clients | --torch VERSION | --check]" ;;
esac
paper=$VENV-paper clients=$VENV-clients release=${2:-} released=$VENV-${2:-}

log=$(mktemp)
trap 'rm -f "$log"' EXIT

# One set-up at a time in this directory.
exec 9<. && flock 9

may_install=yes
[[ ${1:-} == --check ]] && may_install=no
command -v "$PYTHON" >/dev/null || require_system_packages "$may_install"
# Inside an active .venv, python3 is the one about to be replaced: take what it is based on.
PYTHON=$("$PYTHON" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))')
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$("$PYTHON" -V) is too old: Python 3.10 or newer is needed (make ... PYTHON=python3.12)"
build=$(torch_build)

if [[ $may_install == no ]]; then
    if is_up_to_date "$VENV" "$(key constraints.txt)"; then
        [[ -e $VENV/deepspeed.stamp ]] || say "would install DeepSpeed $(pin_of deepspeed constraints.txt) there"
        exit
    fi
    say "would make $VENV with $PYTHON and torch's $build build"
    require_system_packages no
    exit
fi
bring_up_to_date "$VENV" set_up constraints.txt
status=0
set_up_deepspeed || status=1
if [[ ${1:-} == --pins ]]; then
    bring_up_to_date "$paper" set_up_paper constraints.txt constraints-paper.txt || status=1
    exit "$status"
fi
if [[ ${1:-} == --clients ]]; then
    bring_up_to_date "$clients" set_up_clients constraints.txt constraints-clients.txt || status=1
    exit "$status"
fi
if [[ ${1:-} == --torch ]]; then
    bring_up_to_date "$released" set_up_released constraints.txt
    exit
fi
