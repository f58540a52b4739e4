"""Fabric and Lightning's Trainer, with FSDP2 and with FCDP, on the ranks of one process group."""

import tempfile
from collections.abc import Callable
from typing import Any

import lightning
import torch
import torch.nn as nn
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as OfFabric
from lightning.pytorch.strategies import ModelParallelStrategy as OfTrainer
from peft import get_peft_model
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.utils.data import DataLoader, Dataset

import fcdp
from fcdp.integrations.lightning import FabricStrategy, TrainerStrategy
from tests.clients import tiny

STEPS = 3


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(1, 17) * (1 + index) % 128


def model_of(adapters: bool) -> nn.Module:
    model = tiny.llama()
    torch.manual_seed(2)
    return get_peft_model(model, tiny.lora()) if adapters else model


def shard_plainly(model: nn.Module, mesh: Any) -> nn.Module:
    for module in [*model.modules()]:
        if type(module).__name__ == "LlamaDecoderLayer":
            fully_shard(module, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def fabric(strategy: Any, nodes: int, per_node: int, adapters: bool, accumulation: int) -> Any:
    run = lightning.Fabric(accelerator="cpu", strategy=strategy, devices=per_node, num_nodes=nodes)
    run.launch()
    model = run.setup_module(model_of(adapters))
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = run.setup_optimizers(torch.optim.AdamW(trained, lr=1e-2))
    losses = []
    rows = iter(run.setup_dataloaders(DataLoader(Rows(), batch_size=2)))
    for _ in range(STEPS):
        for at in range(accumulation):
            batch = next(rows)
            with run.no_backward_sync(model, enabled=at < accumulation - 1):
                loss = model(input_ids=batch, labels=batch).loss / accumulation
                run.backward(loss)
            losses.append(loss.item())
        run.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
    return model.module, losses


class Module(lightning.LightningModule):
    def __init__(self, adapters: bool, plainly: bool) -> None:
        super().__init__()
        self.net = model_of(adapters)
        self.plainly = plainly
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.plainly:
            shard_plainly(self, self.device_mesh)
            register_fsdp_forward_method(self, "training_step")
            register_fsdp_forward_method(self, "validation_step")

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.losses.append(self.net(input_ids=batch, labels=batch).loss.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2)


def trainer(strategy: Any, nodes: int, per_node: int, adapters: bool, accumulation: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        run = lightning.Trainer(
            accelerator="cpu",
            strategy=strategy,
            devices=per_node,
            num_nodes=nodes,
            max_steps=STEPS,
            accumulate_grad_batches=accumulation,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=1,
            val_check_interval=accumulation,
            num_sanity_val_steps=1,
            default_root_dir=folder,
        )
        module = Module(adapters, type(strategy) is OfTrainer)
        rows = DataLoader(Rows(), batch_size=2)
        run.fit(module, rows, DataLoader(Rows(), batch_size=2))
    return module, module.losses


def compared(
    topology: fcdp.Topology, make: Callable[..., Any], adapters: bool = False, accumulation: int = 1
) -> dict[str, Any]:
    nodes, per_node = topology.nodes, topology.ranks_per_node
    arguments = (nodes, per_node, adapters, accumulation)
    if make is fabric:
        plain = OfFabric(shard_plainly, nodes * per_node, 1)
        cached: Any = FabricStrategy(topology)
    else:
        plain, cached = OfTrainer(nodes * per_node, 1), TrainerStrategy(topology)
    theirs, expected = make(plain, *arguments)
    ours, losses = make(cached, *arguments)
    return tiny.beside(tiny.parameters(theirs), expected, ours, losses)


CASES: dict[str, Callable[[fcdp.Topology], dict[str, Any]]] = {
    "fabric": lambda topology: compared(topology, fabric),
    "fabric-lora": lambda topology: compared(topology, fabric, True),
    "fabric-lora-accumulated": lambda topology: compared(topology, fabric, True, 2),
    "trainer": lambda topology: compared(topology, trainer),
    "trainer-lora": lambda topology: compared(topology, trainer, True),
    "trainer-lora-accumulated": lambda topology: compared(topology, trainer, True, 2),
    "alone": tiny.alone,
}
