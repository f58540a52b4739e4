"""Messages of known sizes: what an accelerator tells, by operations that nobody waits for."""

from __future__ import annotations

import pytest
import torch

from fcdp.delta import message
from fcdp.delta.on_device import Counts, Told, count

DTYPES = sorted(message.DTYPES, key=str)
#: Of two nodes, standard deviations of a weight's change in units in the last place.
CHANGES = {"nothing": 0.0, "few": 0.3, "some": 1.0, "many": 3.0, "large": 40.0, "all": 1e5}


def _moved(base: torch.Tensor, change: float) -> torch.Tensor:
    words = base.clone().view(torch.int16).view(-1, base.itemsize // 2)
    steps = (change * torch.randn(base.numel())).round().clamp(-3e4, 3e4)
    if change == 0.3:
        steps *= torch.rand(base.numel()) < 0.05
        steps[::997], steps[5::997] = 300, 3  # no byte holds, and no two bits
    words[:, -1] += steps.to(torch.int16)
    words[:, :-1] += 1  # whatever the update
    return words.view(-1).view(base.dtype)


def _told(new: list[torch.Tensor], base: list[torch.Tensor]) -> Told:
    counts = [Counts(*count(*pair).tolist()) for pair in zip(new, base, strict=True)]
    return Told.smallest(1, counts, new[0].numel())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 127, 128, 5001])
def test_shards_of_each_dtype_arrive(numel: int, dtype: torch.dtype) -> None:
    forms = set()
    for change in CHANGES.values():
        base = [torch.randn(numel).to(dtype) for _ in range(2)]
        new = [_moved(base[0], change), _moved(base[1], change / 2)]
        told = _told(new, base)
        forms.add(told.form)
        size = told.row_bytes(new[0])
        assert size % 8 == 0
        assert size <= new[0].nbytes + 16
        for node in range(2):
            written = told.write(new[node], base[node], node)
            assert written.numel() == size
            row = base[node].clone()
            assert not told.read(written, row, node)
            assert torch.equal(row.view(torch.uint8), new[node].view(torch.uint8))
    if numel == 5001:
        assert forms == {1, 2, 4, 8, 16}


def test_counts_are_those_of_the_numbers() -> None:
    base = torch.zeros(2000, dtype=torch.int16)
    new = base.clone()
    new[:16] = torch.tensor([1, -1, 2, -2, 7, -7, 8, -8, 127, -127, 128, -128, 129, -129, 300, 0])
    new[1003] = -(2**15)
    found = Counts(*count(new.view(torch.bfloat16), base.view(torch.bfloat16)).tolist())
    assert found == Counts(some=3, two=14, four=10, eight=6, wide=5)


@pytest.mark.parametrize(
    ("form", "parts"),
    [
        (1, [256 // 64, 6, 10, 14]),
        (2, [0, 64, 10, 14]),
        (4, [0, 128, 10, 10]),
        (8, [0, 256, 10, 6]),
        (16, [0, 400, 0, 0]),
    ],
)
def test_sizes_follow_from_counts(form: int, parts: list[int]) -> None:
    assert Counts(some=3, two=14, four=10, eight=6, wide=5).parts(form, 200) == parts


def test_the_longest_message_chooses_the_form() -> None:
    base = torch.randn(5000).bfloat16()
    near, far = (Counts(*count(_moved(base, change), base).tolist()) for change in (0.3, 1e5))
    assert Told.smallest(1, [near, near], 5000).form == 1
    assert Told.smallest(1, [near, far], 5000).form == 16


@pytest.mark.parametrize("change", CHANGES.values())
def test_damage_and_another_version_are_told(change: float) -> None:
    base = torch.randn(5000).bfloat16()
    new = _moved(base, change)
    told = _told([new], [base])
    written = told.write(new, base, 0)
    for place in range(0, written.numel() - 7, 97):
        damaged = written.clone()
        damaged[place] ^= 16
        row = base.clone()
        assert told.read(damaged, row, 0) or torch.equal(row, new)
    if told.form != 16:
        assert told.read(written, _moved(base, 1.0), 0)


@pytest.mark.parametrize("change", CHANGES.values())
def test_what_was_written_after_it_was_counted_is_told(change: float) -> None:
    base = torch.randn(5000).bfloat16()
    told = _told([_moved(base, 0.3)], [base])
    later = _moved(base, change)
    row = base.clone()
    wrong = told.read(told.write(later, base, 0)[: told.row_bytes(base)], row, 0)
    assert wrong or torch.equal(row, later)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("change", CHANGES.values())
def test_on_a_gpu_nobody_waits(change: float) -> None:
    base = torch.randn(5001).bfloat16().cuda()
    new = _moved(base.cpu(), change).cuda()
    told = _told([new], [base])
    row = base.clone()
    told.read(told.write(new, base, 0), row.clone(), 0)  # keys of checksums are made once
    torch.cuda.set_sync_debug_mode("error")
    try:
        wrong = told.read(told.write(new, base, 0), row, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not wrong
    assert torch.equal(row, new)
