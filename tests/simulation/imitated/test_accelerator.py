"""The imitated accelerator counts what is alive, where it is alive."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from simulation.imitated.accelerator import NAME, imitated
from tests.ranks import Pools
from tests.simulation.imitated.small import leave_group


def life_of_tensors() -> dict[str, int]:
    """Device bytes after each of some events, by their names; and the host's."""
    leave_group()
    seen: dict[str, int] = {}
    with imitated(10**9) as allocations:
        device = torch.device(NAME)

        def note(event: str) -> None:
            seen[event] = allocations.current[NAME]

        first = torch.empty(1024, device=device)
        note("4096 bytes")
        view = first.view(32, 32)[1]
        note("a view")
        second = first + 1
        note("a second")
        second.add_(first)
        note("in place")
        second.untyped_storage().resize_(0)
        note("freed by resize")
        second.untyped_storage().resize_(4096)
        note("back")
        del first
        note("still viewed")
        del view
        note("no more")
        small = torch.empty(1, dtype=torch.uint8, device=device)
        note("a byte")
        host = small.cpu()
        note("copied to the host")
        seen["host"] = allocations.current["cpu"]
        del host, small, second
        note("nothing")
        seen["peak"] = allocations.peak[NAME]
        allocations.reset_peak()
        seen["peak after"] = allocations.peak[NAME]
    return seen


def test_bytes_follow_the_life_of_storages(apart: Pools) -> None:
    assert apart.run(1, life_of_tensors)[0] == {
        "4096 bytes": 4096,
        "a view": 4096,
        "a second": 8192,
        "in place": 8192,
        "freed by resize": 4096,
        "back": 8192,
        "still viewed": 8192,
        "no more": 4096,
        "a byte": 4096 + 512,  # a block of the allocator
        "copied to the host": 4096 + 512,
        "host": 512,
        "nothing": 0,
        "peak": 8192,
        "peak after": 0,
    }


def attention() -> tuple[int, Any]:
    """Device bytes that one attention and its backward take at most, beside its inputs."""
    leave_group()
    with imitated(10**9) as allocations:
        shape = (2, 4, 512, 64)
        query, key, value = (
            torch.empty(shape, dtype=torch.bfloat16, device=NAME, requires_grad=True)
            for _ in range(3)
        )
        before = allocations.current[NAME]
        output = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output.sum().backward()
        return allocations.peak[NAME] - before, query.grad.shape


def test_attention_takes_no_matrix_of_scores(apart: Pools) -> None:
    extra, shape = apart.run(1, attention)[0]
    assert tuple(shape) == (2, 4, 512, 64)
    one = 2 * 4 * 512 * 64 * 2
    scores = 2 * 4 * 512 * 512 * 2
    assert 4 * one <= extra < scores + 4 * one
