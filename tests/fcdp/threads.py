"""Ranks as threads of this process, whose messages are gloo's own: no process has to start."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from tests.fcdp.stand_ins import NoFailures

#: Longer than a busy machine takes, and short where a rank waits for one that has failed.
_TIMEOUT = timedelta(seconds=20)


def on_threads(nodes: int, ranks_per_node: int, act: Callable[[Any], Any]) -> list[Any]:
    """Call ``act`` with each rank's topology, at the same time; return what each returned."""
    store = dist.HashStore()

    def group(name: str, rank: int, size: int) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]  # type: ignore[attr-defined]
        options._timeout, options._threads = _TIMEOUT, 1
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)  # type: ignore[call-arg]

    def call(rank: int) -> Any:
        node, local_rank = divmod(rank, ranks_per_node)
        groups = {}
        for kind in ("", "reduce_", "control_"):
            groups[f"{kind}intra"] = group(f"{kind}intra {node}", local_rank, ranks_per_node)
            groups[f"{kind}inter"] = group(f"{kind}inter {local_rank}", node, nodes)
        return act(
            SimpleNamespace(
                nodes=nodes,
                ranks_per_node=ranks_per_node,
                world_size=nodes * ranks_per_node,
                node=node,
                local_rank=local_rank,
                rank=rank,
                failures=NoFailures(),
                **groups,
            )
        )

    with ThreadPoolExecutor(nodes * ranks_per_node) as pool:
        return [*pool.map(call, range(nodes * ranks_per_node))]
