"""A process for each test, so that a hang or an illegal access spoils no later test."""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fcdp
from tests.ranks import Pools

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
#: Holders of the gathered parameters of a step; FSDP2 is without this library.
ENGINES = {"fsdp2": None, "none": fcdp.NoCache(), "host": fcdp.HostCache()}


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of ``function`` in a fresh process, without a process group."""
    with contextlib.closing(Pools(_apart)) as pools:
        return pools.run(1, function, *args, timeout_s=100)[0]


def _apart(rank: int, world_size: int, store: Path) -> None:
    """Join nobody."""


def shard(
    model: Any,
    units: Iterable[Any],
    topology: fcdp.Topology,
    engine: str,
    look_ahead: int,
    **codecs: Any,
) -> None:
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    if (policy := ENGINES[engine]) is not None:
        fcdp.shard(
            model,
            topology,
            units=units,
            policy=policy,
            mp_policy=precision,
            cache=fcdp.CacheOptions(look_ahead=look_ahead),
            comm=fcdp.CommOptions(**codecs),
        )
        return
    for module in [*units, model]:
        fully_shard(module, mesh=topology.mesh, mp_policy=precision)
