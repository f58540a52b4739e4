"""A plain training loop: a small Llama on bytes of Python's own sources, with or without LoRA.

torchrun --nproc-per-node 4 examples/plain_loop.py --nodes 2            # emulated nodes
torchrun --nnodes 2 --nproc-per-node 8 ... examples/plain_loop.py       # real ones
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from peft import LoraConfig, get_peft_model
from torch.nn.utils import clip_grad_norm_

import fcdp
from experiments.worker.models import small_llama
from experiments.worker.workloads import corpus, micro_batches


def make_model(layers: int, lora_rank: int) -> tuple[nn.Module, Sequence[nn.Module]]:
    """A model with equal weights on every rank, and its blocks."""
    torch.manual_seed(0)
    model = small_llama(layers)
    blocks: Sequence[nn.Module] = model.model.layers
    if lora_rank:
        lora = LoraConfig(r=lora_rank, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        model = get_peft_model(model, lora)
    return model, blocks


def train(topology: fcdp.Topology, arguments: argparse.Namespace) -> tuple[nn.Module, list[float]]:
    """The trained model, and the loss of each step over all ranks."""
    model, blocks = make_model(arguments.layers, arguments.lora_rank)
    model.to(topology.mesh.device_type)
    fcdp.shard(model, topology, units=blocks)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=arguments.lr)
    data = micro_batches(corpus(), rank=topology.rank, seed=0, sequences=2, sequence_length=64)
    losses = []
    for step in range(arguments.steps):
        total = torch.zeros((), device=topology.mesh.device_type)
        for micro_batch in range(arguments.accumulation):
            tokens = next(data).to(topology.mesh.device_type)
            with fcdp.accumulate(model, last=micro_batch == arguments.accumulation - 1):
                loss = model(input_ids=tokens, labels=tokens).loss / arguments.accumulation
                loss.backward()
            total += loss.detach()
        norm: Any = clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / topology.world_size)
        norm = norm.full_tensor().item()
        if topology.rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}, gradient norm {norm:.3f}", flush=True)
    return model, losses


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, help="emulate so many on this host")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lora-rank", type=int, default=0, help="0: train all parameters")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args(arguments)
    if options.nodes:
        ranks_per_node = int(os.environ["WORLD_SIZE"]) // options.nodes
        topology = fcdp.Topology.build(options.nodes, ranks_per_node)
    else:
        topology = fcdp.Topology.from_env()
    model, _ = train(topology, options)
    ledger = fcdp.ledger(model)
    if topology.rank == 0:
        print(f"{ledger.hits} gathers from the cache, {ledger.misses} across nodes")
        for link, phases in ledger.snapshot().items():
            print(f"{link}: " + ", ".join(f"{phase} {n:,} B" for phase, n in phases.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
    dist.destroy_process_group()
