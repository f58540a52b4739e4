"""FSDP2 through the Trainer of transformers, with FCDP turned on by a callback.

    torchrun --nnodes 2 --nproc-per-node 8 ... examples/trainer_fsdp2.py

The Trainer shards with accelerate before ``on_train_begin``. accelerate (1.15) itself offers FSDP2
on accelerators only; ``--cpu`` works round that, to try and to test this without a GPU:

    for rank in 0 1; do torchrun --nnodes 2 --node-rank $rank --nproc-per-node 1 \\
        --master-addr 127.0.0.1 --master-port 29500 examples/trainer_fsdp2.py --cpu & done; wait
"""

from __future__ import annotations

import argparse
import sys
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from transformers import Trainer, TrainerCallback, TrainingArguments

import fcdp
from experiments.worker.models import small_llama
from experiments.worker.workloads import corpus


class CacheParameters(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        fcdp.cache_parameters(others["model"], fcdp.Topology.from_env(args.device.type))


def _allow_fsdp2_on_cpu(trainer: Any) -> None:
    """Do with FSDP's arguments what accelerate and the Trainer do on accelerators."""
    for state in (PartialState(), trainer.accelerator.state):
        state.distributed_type = DistributedType.FSDP
    plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    trainer.accelerator.state.fsdp_plugin = plugin
    trainer.is_fsdp_enabled = True


def train(arguments: argparse.Namespace, output: str) -> tuple[nn.Module, list[float]]:
    """The trained model, and the loss of each step over all ranks."""
    torch.manual_seed(0)
    settings = TrainingArguments(
        output_dir=output,
        use_cpu=arguments.cpu,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        max_steps=arguments.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    windows = corpus()[: 2**16].view(-1, 64).long()
    data = [{"input_ids": window, "labels": window} for window in windows]
    trainer: Any = Trainer(
        small_llama(arguments.layers), settings, train_dataset=data, callbacks=[CacheParameters()]
    )
    if arguments.cpu:
        _allow_fsdp2_on_cpu(trainer)
    trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return trainer.model, losses


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    with TemporaryDirectory() as output:
        model, _ = train(parser.parse_args(arguments), output)
    ledger = fcdp.ledger(model)
    if dist.get_rank() == 0:
        print(f"{ledger.hits} gathers from the cache, {ledger.misses} across nodes")


if __name__ == "__main__":
    main(sys.argv[1:])
