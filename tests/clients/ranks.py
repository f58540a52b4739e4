"""Run cases of one client on a rank, of which the first writes their results.

tests/clients/ranks.py CLIENT OUT CASE...    as a program of ``tests.clients.forks``
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import torch.distributed as dist

import fcdp


def main(client: str, out: str, *cases: str) -> None:
    dist.init_process_group("gloo")
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    topology = fcdp.Topology.build(dist.get_world_size() // per_node, per_node, "cpu")
    module = import_module(f"tests.clients.cases_{client}")
    results = {case: module.CASES[case](topology) for case in cases}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
