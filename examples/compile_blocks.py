"""torch.compile of each block before ``fcdp.shard``, as for plain FSDP2.

    torchrun --nproc-per-node 4 examples/compile_blocks.py --nodes 2 [--backend aot_eager]

``block.compile()`` changes the block in place, so that parameters and units keep their names.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

import fcdp
from experiments.worker.models import small_llama
from experiments.worker.workloads import corpus, micro_batches


def train(
    topology: fcdp.Topology, backend: str | None, layers: int, steps: int
) -> tuple[nn.Module, list[float]]:
    """The trained model and this rank's losses; ``backend=None`` compiles nothing."""
    torch.manual_seed(0)
    model = small_llama(layers)
    model.to(topology.mesh.device_type)
    if backend is not None:
        for block in model.model.layers:
            block.compile(backend=backend)
    fcdp.shard(model, topology, units=model.model.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = micro_batches(corpus(), rank=topology.rank, seed=0, sequences=2, sequence_length=64)
    losses = []
    for step in range(steps):
        tokens = next(data).to(topology.mesh.device_type)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if topology.rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    return model, losses


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=2, help="emulate so many on this host")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(arguments)
    ranks_per_node = int(os.environ["WORLD_SIZE"]) // options.nodes
    topology = fcdp.Topology.build(options.nodes, ranks_per_node)
    model, _ = train(topology, options.backend, options.layers, options.steps)
    if topology.rank == 0:
        ledger = fcdp.ledger(model)
        print(f"{ledger.hits} gathers from the cache, {ledger.misses} across nodes")


if __name__ == "__main__":
    main(sys.argv[1:])
    dist.destroy_process_group()
