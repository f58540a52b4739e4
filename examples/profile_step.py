"""A profiler trace of one step, in which every gather and reduction carries its unit's name.

    torchrun --nproc-per-node 4 examples/profile_step.py --nodes 2 --trace trace.json

Open the trace in Perfetto or chrome://tracing and look for ``fcdp::``. The table that is printed
sums up the time that this rank's host spent inside each range, which for exchanges that run in the
background is the time to start them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import fcdp
from experiments.worker.models import small_llama
from experiments.worker.workloads import corpus, micro_batches


def trace_one_step(topology: fcdp.Topology, layers: int) -> profile:
    """Profile the second step: the first also sets up buffers and connections."""
    torch.manual_seed(0)
    model = small_llama(layers)
    model.to(topology.mesh.device_type)
    fcdp.shard(model, topology, units=model.model.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = micro_batches(corpus(), rank=topology.rank, seed=0, sequences=2, sequence_length=64)

    def step() -> None:
        tokens = next(data).to(topology.mesh.device_type)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    activities = [ProfilerActivity.CPU]
    if topology.mesh.device_type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)
    with profiler:
        step()
    return profiler


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=2, help="emulate so many on this host")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--trace", default="trace.json", help="where rank 0 writes its trace")
    options = parser.parse_args(arguments)
    ranks_per_node = int(os.environ["WORLD_SIZE"]) // options.nodes
    topology = fcdp.Topology.build(options.nodes, ranks_per_node)
    profiler = trace_one_step(topology, options.layers)
    if topology.rank != 0:
        return
    profiler.export_chrome_trace(options.trace)
    microseconds: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        if event.name.startswith("fcdp::"):
            microseconds[event.name.split()[0]] += event.cpu_time_total
    for name, time in sorted(microseconds.items()):
        print(f"{name:24}{time / 1000:8.2f} ms")
    print(f"trace: {options.trace}")


if __name__ == "__main__":
    main(sys.argv[1:])
    dist.destroy_process_group()
