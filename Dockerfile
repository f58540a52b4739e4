# One image for every node, rented or not: the same set-up script and the same pins as `make`.
#
#   docker build -t fcdp .                                                  NVIDIA GPUs
#   docker build -t fcdp --build-arg BASE=debian:bookworm-slim --build-arg TORCH=cpu .
#
#   docker run --gpus all --ipc=host --network=host --ulimit memlock=-1 fcdp run quickstart
#   docker run --gpus all --ipc=host --network=host --ulimit memlock=-1 fcdp torchrun --nnodes ...
#
#   --ipc=host            NCCL and torch's data loaders share memory between processes: more than
#                         the 64 MB that a container has by default
#   --network=host        ranks on other nodes reach this one; no address translation on the slow link
#   --ulimit memlock=-1   the cache of gathered parameters is pinned (page-locked) host memory
#   -v "$PWD/runs:/opt/fcdp/runs"     keeps what was measured (a directory that user 10001 may write to)
#
# The emulated cluster makes network namespaces and shapes their links. For it, instead:
#
#   docker run --user root --cap-add SYS_ADMIN --cap-add NET_ADMIN --security-opt apparmor=unconfined \
#       fcdp run quickstart

# The base brings nvcc, with which DeepSpeed compiles its GPU operators when they are first used. Its
# CUDA must be the one that torch is built with: 13.0 for PyPI's torch 2.13. Any Debian or Ubuntu
# with Python 3.10 or newer will do.
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE}

# What scripts/setup.sh would ask for, git for the commit that each record names, libaio for
# DeepSpeed's offload to NVMe, and ssh to start ranks on other nodes. Debian and Ubuntu keep one
# version of each, so there is none to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ git libaio-dev make openssh-client python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Root may use the repository too (for the emulated cluster), and git is to trust its owner.
RUN useradd --create-home --uid 10001 fcdp \
    && install --directory --owner fcdp --group fcdp /opt/fcdp /opt/venv /opt/venv-paper \
    && git config --system safe.directory /opt/fcdp
USER 10001
WORKDIR /opt/fcdp

# The environment comes before the code, so that a change of code does not install it again. The
# editable install needs to find the library; where it is is all that it keeps of it. Compiled
# here, or every container would compile again; a few files of packages are templates, not Python.
# DeepSpeed compiles operators for the machine that it runs on, whichever account that is as.
ARG TORCH=cuda
ENV TORCH=${TORCH} VENV=/opt/venv TORCH_EXTENSIONS_DIR=/opt/venv/operators
COPY --chown=fcdp:fcdp LICENSE constraints.txt constraints-paper.txt pyproject.toml ./
COPY --chown=fcdp:fcdp scripts/setup.sh scripts/
RUN mkdir fcdp && touch fcdp/__init__.py \
    && PIP_NO_CACHE_DIR=1 scripts/setup.sh --pins \
    && install --directory --mode 1777 "$TORCH_EXTENSIONS_DIR" "$VENV-paper/operators" \
    && { "$VENV/bin/python" -m compileall -q -j 0 "$VENV/lib" "$VENV-paper/lib" || true; }

COPY --chown=fcdp:fcdp . .
ENV PATH=/opt/venv/bin:${PATH}
ENTRYPOINT ["scripts/entrypoint.sh"]
CMD ["--help"]
