"""Run cases of one client on ranks that are threads with accelerators, and write their results.

tests/clients/on_streams.py CLIENT OUT CASE...    as a program of ``tests.clients.forks``

Clients keep one state per process. Here each thread has its own, as accelerate has it for TPUs.
"""

import contextlib
import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.clients.forks import environment

# All threads have these variables; only its process group knows a thread's rank.
os.environ.update(environment(0, nodes=2, per_node=1), ACCELERATE_TORCH_DEVICE="taped:0")

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp

import fcdp
from fcdp.integrations.takeover import Takeover
from tests.clients import tiny
from tests.fcdp import accelerator

_local = threading.local()
_for_good = contextlib.ExitStack()
_fully_shard = fsdp.fully_shard


def _owner() -> Any:
    """A holder of this thread's ``fully_shard``, in which a takeover puts its own."""
    if not hasattr(_local, "owner"):
        _local.owner = SimpleNamespace(fully_shard=_fully_shard)
    return _local.owner


class _Takeovers:
    def __getattr__(self, name: str) -> Any:
        if not hasattr(_local, "takeover"):
            _local.takeover = Takeover()
        if name == "of":
            return lambda root, owner, apart=(): _local.takeover.of(root, _owner(), apart)
        return getattr(_local.takeover, name)


def _make_models_on_the_accelerator() -> None:
    made = tiny.llama
    tiny.llama = lambda *args, **kwargs: made(*args, **kwargs).to(accelerator.NAME)


def hugging_face() -> Any:
    """The cases of accelerate, the Trainer and TRL, whose models are made on the accelerator."""
    from accelerate.state import (
        AcceleratorState,
        GradientState,
        PartialState,
        ThreadLocalSharedDict,
    )
    from transformers import PreTrainedModel

    from fcdp.integrations import hugging_face
    from tests.clients import cases_hugging_face as cases

    for state in (PartialState, AcceleratorState, GradientState):
        state._shared_state = ThreadLocalSharedDict()
    hugging_face._takeover = _Takeovers()  # type: ignore[assignment]
    fsdp.fully_shard = lambda *args, **kwargs: _owner().fully_shard(*args, **kwargs)
    _make_models_on_the_accelerator()
    loaded = PreTrainedModel.from_pretrained.__func__
    PreTrainedModel.from_pretrained = classmethod(
        lambda kind, *args, **kwargs: loaded(kind, *args, **kwargs).to(accelerator.NAME)
    )
    # For all threads, and for good: one would end it while another is in it.
    _for_good.enter_context(cases.stock())
    cases.stock = contextlib.nullcontext  # type: ignore[assignment]
    return cases


def lightning() -> Any:
    """The cases of Fabric and the Trainer, which take the accelerator for a CPU."""
    import lightning.fabric.accelerators.cpu as cpu_of_fabric
    import lightning.fabric.strategies.model_parallel as of_fabric
    import lightning.pytorch.accelerators.cpu as cpu_of_trainer
    import lightning.pytorch.strategies.model_parallel as of_trainer
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    from tests.clients import cases_lightning as cases

    TorchElasticEnvironment.node_rank = TorchElasticEnvironment.global_rank = lambda self: (
        dist.get_rank()
    )
    TorchElasticEnvironment.set_global_rank = lambda self, rank: None
    for kind in (cpu_of_fabric.CPUAccelerator, cpu_of_trainer.CPUAccelerator):
        kind.setup_device = lambda self, device: None
    for strategy in (of_fabric.ModelParallelStrategy, of_trainer.ModelParallelStrategy):
        strategy.root_device = property(lambda self: torch.device(accelerator.NAME, 0))
    _make_models_on_the_accelerator()
    return cases


CLIENTS = {"hugging_face": hugging_face, "lightning": lightning}


def main(client: str, out: str, *names: str) -> None:
    cases = CLIENTS[client]().CASES

    def case(name: str) -> Any:
        topology = fcdp.Topology.build(2, 1, accelerator.NAME)
        with torch.device("cpu"):  # clients move what they have made
            return cases[name](topology)

    results = {}
    for name in names:
        (results[name], _), tape = accelerator.run(case, 2, name)
        results[name]["wrong"] = accelerator.check(tape, range(1))
    Path(out).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
