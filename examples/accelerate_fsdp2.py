"""FSDP2 through Hugging Face accelerate, with FCDP turned on by one line after ``prepare``.

    accelerate launch --num_machines 2 --num_processes 16 ... examples/accelerate_fsdp2.py

On CPUs, two nodes of one rank on one host:

    for rank in 0 1; do torchrun --nnodes 2 --node-rank $rank --nproc-per-node 1 \\
        --master-addr 127.0.0.1 --master-port 29500 examples/accelerate_fsdp2.py --cpu & done; wait

accelerate (1.15) itself offers FSDP2 on accelerators only, and DDP on CPUs;
``_allow_fsdp2_on_cpu`` is there to try and to test this without a GPU.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn as nn
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType

import fcdp
from experiments.worker.models import small_llama
from experiments.worker.workloads import corpus, micro_batches


def make_accelerator(cpu: bool, accumulation: int) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(cpu=cpu, fsdp_plugin=plugin, gradient_accumulation_steps=accumulation)
    if cpu:
        _allow_fsdp2_on_cpu(accelerator, plugin)
    return accelerator


def _allow_fsdp2_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Do with a plugin what accelerate itself does on accelerators."""
    for state in (PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def train(arguments: argparse.Namespace) -> tuple[nn.Module, list[float]]:
    """The trained model, and this rank's loss of each step."""
    accelerator = make_accelerator(arguments.cpu, arguments.accumulation)
    torch.manual_seed(0)
    model = small_llama(arguments.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    fcdp.cache_parameters(model, fcdp.Topology.from_env(accelerator.device.type))

    data = micro_batches(
        corpus(), rank=accelerator.process_index, seed=0, sequences=2, sequence_length=64
    )
    losses = []
    for step in range(arguments.steps):
        total = 0.0
        for _ in range(arguments.accumulation):
            with accelerator.accumulate(model):
                tokens = next(data).to(accelerator.device)
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() / arguments.accumulation
        accelerator.print(f"step {step}: loss {total:.4f}")
        losses.append(total)
    return model, losses


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--accumulation", type=int, default=2)
    model, _ = train(parser.parse_args(arguments))
    ledger = fcdp.ledger(model)
    PartialState().print(f"{ledger.hits} gathers from the cache, {ledger.misses} across nodes")


if __name__ == "__main__":
    main(sys.argv[1:])
