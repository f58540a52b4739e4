"""Messages of known sizes, which an accelerator codes without making the host wait.

A step on the accelerator of tests is compared by its waits, exchanges and memory too.
"""

import traceback
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import fcdp
from fcdp.delta import message
from fcdp.delta.on_device import Counts, Encoding, count
from tests.fcdp import training
from tests.fcdp.training import Settings
from tests.ranks import Pools

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


def _encoding(new: list[torch.Tensor], base: list[torch.Tensor]) -> Encoding:
    counts = [Counts(*count(*pair).tolist()) for pair in zip(new, base, strict=True)]
    return Encoding.smallest(1, counts, new[0].numel())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 127, 128, 5001])
def test_shards_of_each_dtype_arrive(numel: int, dtype: torch.dtype) -> None:
    forms = set()
    for change in CHANGES.values():
        base = [torch.randn(numel).to(dtype) for _ in range(2)]
        new = [_moved(base[0], change), _moved(base[1], change / 2)]
        encoding = _encoding(new, base)
        forms.add(encoding.form)
        size = encoding.row_bytes(new[0])
        assert size % 8 == 0
        assert size <= new[0].nbytes + 16
        for node in range(2):
            written = encoding.write(new[node], base[node], node)
            assert written.numel() == size
            row = base[node].clone()
            assert not encoding.read(written, row, node)
            assert torch.equal(row.view(torch.uint8), new[node].view(torch.uint8))
    if numel == 5001:
        assert forms == {1, 2, 4, 8, 16}


def test_counts_are_those_of_the_numbers() -> None:
    base = torch.zeros(2000, dtype=torch.int16)
    new = base.clone()
    new[:16] = torch.tensor([1, -1, 2, -2, 7, -7, 8, -8, 127, -127, 128, -128, 129, -129, 300, 0])
    new[1003] = -(2**15)
    counts = Counts(*count(new.view(torch.bfloat16), base.view(torch.bfloat16)).tolist())
    assert counts == Counts(some=3, two=14, four=10, eight=6, wide=5)


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
    assert Encoding.smallest(1, [near, near], 5000).form == 1
    assert Encoding.smallest(1, [near, far], 5000).form == 16


@pytest.mark.parametrize("change", CHANGES.values())
def test_damage_and_another_version_are_detected(change: float) -> None:
    base = torch.randn(5000).bfloat16()
    new = _moved(base, change)
    encoding = _encoding([new], [base])
    written = encoding.write(new, base, 0)
    for place in range(0, written.numel() - 7, 97):
        damaged = written.clone()
        damaged[place] ^= 16
        row = base.clone()
        assert encoding.read(damaged, row, 0) or torch.equal(row, new)
    if encoding.form != 16:
        assert encoding.read(written, _moved(base, 1.0), 0)


@pytest.mark.parametrize("change", CHANGES.values())
def test_a_write_after_counting_is_detected(change: float) -> None:
    base = torch.randn(5000).bfloat16()
    encoding = _encoding([_moved(base, 0.3)], [base])
    later = _moved(base, change)
    row = base.clone()
    wrong = encoding.read(encoding.write(later, base, 0)[: encoding.row_bytes(base)], row, 0)
    assert wrong or torch.equal(row, later)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("change", CHANGES.values())
def test_on_a_gpu_nobody_waits(change: float) -> None:
    base = torch.randn(5001).bfloat16().cuda()
    new = _moved(base.cpu(), change).cuda()
    encoding = _encoding([new], [base])
    row = base.clone()
    encoding.read(encoding.write(new, base, 0), row.clone(), 0)  # keys of checksums are made once
    torch.cuda.set_sync_debug_mode("error")
    try:
        wrong = encoding.read(encoding.write(new, base, 0), row, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not wrong
    assert torch.equal(row.view(torch.int16), new.view(torch.int16))  # a NaN equals nothing


RAW = Settings(steps=5, param_dtype=torch.bfloat16, detect_writes=False)


class Step(NamedTuple):
    #: The functions of the library in which the host waited for the device.
    waits: list[str]
    sent: int
    reserved: int
    params: dict[str, torch.Tensor]


def run_steps(codec: fcdp.Delta | None) -> list[Step]:
    from tests.fcdp.accelerator import here

    run = training.Run(replace(RAW, gather_codec=codec))
    model, device = run.model, here()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps = []
    for _ in range(RAW.steps):
        batch = next(run.data)
        fcdp.ledger(model).reset()
        waits: list[str] = []
        wait_for = device.host.wait_for

        def noted(clock: Any) -> None:
            who = traceback.extract_stack()[-2]
            if who.name == "synchronize":  # else the tape's own, or for another host
                waits.append(traceback.extract_stack()[-3].name)  # noqa: B023
            wait_for(clock)  # noqa: B023

        with mock.patch.object(device.host, "wait_for", noted):
            # A part of the model before the others, which then need no sizes any more.
            with torch.no_grad():
                model.blocks[0](torch.ones(1, 12)) if steps else model(batch)
            training.update(training.loss_of(model, batch), optimizer)
        sent = fcdp.ledger(model).bytes["inter_node"]["forward"]
        params = {
            name: param.to_local().detach().cpu().clone()  # type: ignore[attr-defined]
            for name, param in model.named_parameters()
        }
        steps.append(Step(waits, sent, device.reserved_bytes, params))
    return steps


def both(codec: fcdp.Delta) -> tuple[list[list[Step]], list[list[Step]], int, str | None]:
    from tests.fcdp import accelerator

    plain, before = accelerator.run(run_steps, 4, None)
    coded, after = accelerator.run(run_steps, 4, codec)
    gathers = [
        sum(
            each.what.startswith("all-gather") and not each.what.endswith("send")
            for each in tape.operations
        )
        for tape in (after, before)
    ]
    return plain, coded, gathers[0] - gathers[1], accelerator.check(after, range(4))


def test_a_step_is_bit_for_bit_as_without_and_waits_once(apart: Pools) -> None:
    ((plain, coded, more, wrong),) = apart.run(1, both, fcdp.Delta())
    assert wrong is None, wrong
    assert more == 4 * (RAW.steps - 1)  # of all sizes
    for mine, theirs in zip(coded, plain, strict=True):
        for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            for name, param in other.params.items():
                assert torch.equal(one.params[name], param), (number, name)
            assert (one.sent < other.sent) == (number > 0)
            assert other.waits == []
            assert one.waits == ["_learn"] * (number > 0)
        assert mine[-1].reserved == mine[-2].reserved  # nothing is taken as time goes on


def after_damage() -> list[str]:
    """Return a rank's errors, by step, about a message that was damaged at the second step."""
    run, errors = training.Run(replace(RAW, gather_codec=fcdp.Delta())), []
    optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-3)
    for step in range(4):
        try:
            run.loss().backward()
        except RuntimeError as error:
            errors.append(f"step {step}: {error}")
        optimizer.step()
        optimizer.zero_grad()
    return errors


def damaged() -> list[list[str]]:
    from tests.fcdp import accelerator

    write, written = Encoding.write, []

    def once(self: Encoding, new: torch.Tensor, base: torch.Tensor, node: int) -> torch.Tensor:
        message = write(self, new, base, node)
        if node == 0 and accelerator.here().rank not in written:
            written.append(accelerator.here().rank)
            message[0] ^= 1
        return message

    with mock.patch.object(Encoding, "write", once):
        results, _ = accelerator.run(after_damage, 4)
    return list(results)


def test_damage_is_detected_at_the_next_step(apart: Pools) -> None:
    (results,) = apart.run(1, damaged)
    for (error,) in results:
        assert error.startswith("step 2: a difference between versions of a shard led"), error
