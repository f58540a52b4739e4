"""Ranks of programs, forked from a process that has imported what they need.

Importing a client takes longer than training with it, and each rank would import it by itself.

python -m tests.clients.forks MODULE...

Each line of its input is one program, in JSON: ``nodes``, ``per_node``, the ``folder`` that its
ranks start in, and its ``words``, a script and arguments. Once all ranks have ended it prints the
highest of their exit codes; what they print themselves goes where its errors go.
"""

import faulthandler
import gc
import json
import multiprocessing
import os
import runpy
import socket
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import wait
from typing import Any

#: Variables that keep clients from the network, which they read at import.
QUIET = {"GLOO_SOCKET_IFNAME": "lo", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}


def environment(rank: int, nodes: int, per_node: int, port: int = 29500) -> dict[str, str]:
    """A rank's variables as torchrun sets them."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nodes * per_node),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
    }


def _rank(variables: dict[str, str], folder: str, words: list[str]) -> None:
    faulthandler.enable()  # an allocator that finds its memory corrupt says not where
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def _run(nodes: int, per_node: int, folder: str, words: list[str]) -> int:
    start = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        start.Process(target=_rank, args=(environment(rank, nodes, per_node, port), folder, words))
        for rank in range(nodes * per_node)
    ]
    for each in ranks:
        each.start()
    while running := [each.sentinel for each in ranks if each.exitcode is None]:
        wait(running, 0.2)  # what a rank has started may hold its sentinel open
        if any(each.exitcode for each in ranks):  # the others would wait for it
            for each in ranks:
                each.kill()
    return max(abs(each.exitcode or 0) for each in ranks)


def main(modules: list[str]) -> None:
    codes = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, too
    os.environ.update(QUIET)
    import torch

    torch.set_num_threads(1)
    for module in modules:
        import_module(module)
    with suppress(ImportError):
        import_module("deepspeed")  # by accelerate in each rank, wherever it is installed
    # A rank's collector would write to each page of what it has not made, and so copy it.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        program: dict[str, Any] = json.loads(line)
        print(_run(**program), file=codes, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
