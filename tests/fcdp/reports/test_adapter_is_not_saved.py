"""A writer that fails is an error on all ranks, and training goes on as if nothing was written."""

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.nn as nn
import transformers
from torch.distributed.fsdp import register_fsdp_forward_method

import fcdp
from fcdp import exporting
from fcdp.agreement import on_all_ranks
from tests.fcdp.training import take_step, topology_of
from tests.fcdp.tuners import adapted
from tests.ranks import on_ranks

TOKENS = torch.arange(1, 9).view(1, 8)


def shard(method: str) -> Any:
    return fcdp.shard(adapted(method), topology_of(2, 1))


def step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    return take_step(loss, optimizer)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)


def broken(*_: object, **__: object) -> None:
    raise OSError("the disk is full")


@on_ranks(2)
def test_an_error_while_peft_writes_reaches_all_ranks_and_training_goes_on(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    model = shard("prompt_tuning")
    optimizer = optimizer_of(model)
    losses = [step(model, optimizer)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.PeftConfig, "save_pretrained", broken)
        with pytest.raises(OSError if rank == 0 else RuntimeError, match="the disk is full"):
            fcdp.save_adapters(model, tmp_path)
    assert not model.peft_config["default"].inference_mode, "peft's own state is as it was"
    losses.append(step(model, optimizer))
    other = shard("prompt_tuning")
    optimizer = optimizer_of(other)
    assert losses == [step(other, optimizer) for _ in range(2)]
    fcdp.save_adapters(model, tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()


class Wordless(Exception):
    def __str__(self) -> str:
        raise TypeError("no words")


class Empty(Exception):
    def __str__(self) -> str:
        return ""

    __repr__ = __str__


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        OSError("caf\udce9"),
        ValueError("\0"),
        Wordless(),
        Empty(),
    ],
    ids=lambda error: type(error).__name__,
)
@on_ranks(2)
def test_whatever_ends_the_writer_is_an_error_on_all_ranks(
    error: BaseException, tmp_path: Path
) -> None:
    """Rank 0 tells the others before it ends; where somebody keeps it from ending, all train on."""

    def end(*_: object, **__: object) -> None:
        raise error

    losses = []
    for wrote in (False, True):
        model = shard("lora")
        optimizer = optimizer_of(model)
        losses.append([step(model, optimizer)])
        with pytest.MonkeyPatch.context() as patch:
            for kind in (peft.PeftModel, transformers.LlamaForCausalLM):
                patch.setattr(kind, "save_pretrained", end)
            for write in (fcdp.save_adapters, fcdp.export) if wrote else ():
                own = torch.distributed.get_rank() == 0
                kind = type(error) if own or isinstance(error, ValueError) else RuntimeError
                with pytest.raises(kind) as raised:
                    write(model, tmp_path)
                assert own or "rank 0: " in str(raised.value)
        losses[-1].append(step(model, optimizer))
    assert losses[0] == losses[1]
    assert not [*tmp_path.iterdir()]


def test_what_ends_a_rank_ends_it_where_the_others_have_gone() -> None:
    def end() -> None:
        raise SystemExit(3)

    gone = ConnectionError("the others have gone")
    group: Any = mock.Mock(torch.distributed.ProcessGroup)
    group.size.return_value = 2
    with (
        mock.patch("fcdp.agreement.any_rank", side_effect=gone),
        mock.patch("torch.distributed.all_gather_object", side_effect=gone),
    ):
        for ranks in (mock.Mock(), group):
            with pytest.raises(SystemExit) as raised:
                on_all_ranks("saving", ranks, end)
            assert raised.value.__context__ is gone


@on_ranks(2)
def test_too_little_host_memory_on_rank_0_reaches_all_ranks(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    model = shard("lora")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(
                torch.Tensor, "cpu", lambda self: (_ for _ in ()).throw(MemoryError("no room"))
            )
        with pytest.raises(MemoryError if rank == 0 else RuntimeError, match="no room"):
            fcdp.save_adapters(model, tmp_path)
    fcdp.save_adapters(model, tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()


@on_ranks(2)
def test_a_tied_parameter_after_one_that_rank_0_has_no_memory_for(tmp_path: Path) -> None:
    """The other ranks gather it once, so rank 0 must not gather it again."""
    rank = torch.distributed.get_rank()
    config = transformers.GPT2Config(vocab_size=31, n_embd=12, n_layer=1, n_head=2)
    model = fcdp.shard(transformers.AutoModelForCausalLM.from_config(config), topology_of(2, 1))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(torch.Tensor, "cpu", mock.Mock(side_effect=MemoryError("no room")))
        with pytest.raises(MemoryError if rank == 0 else RuntimeError, match="no room"):
            fcdp.export(model, tmp_path)
    fcdp.export(model, tmp_path)
    assert (tmp_path / "model.safetensors").exists()


class Curious(nn.Module):
    """A model whose own writer reads parameters, calls itself, and changes what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("seen", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def save_pretrained(self, directory: Path, state_dict: dict[str, torch.Tensor]) -> None:
        assert re.fullmatch("Curious", type(self).__name__)
        assert not fcdp.is_cached(self), "nothing in it communicates"
        for name, value in self.state_dict().items():
            assert type(value) is torch.Tensor
            assert torch.equal(value, state_dict[name])
        out = self(torch.ones(1, 8))
        assert torch.equal(out, copy.deepcopy(self)(torch.ones(1, 8)))
        self.half().requires_grad_(False)
        state_dict["seen"].zero_()
        next(self.buffers()).zero_()
        (Path(directory) / "a" / "b").mkdir(parents=True)
        torch.save(out, Path(directory) / "a" / "b" / "out.pt")


@on_ranks(2)
def test_a_writer_of_ones_own_may_use_the_model_as_if_it_were_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Curious()
    expected = plain(torch.ones(1, 8)).detach()
    model = fcdp.shard(plain, topology_of(2, 1))
    model(torch.ones(1, 8)).sum().backward()
    with mock.patch.object(exporting, "flush") as flushed:
        fcdp.export(model, tmp_path)
    model(torch.ones(1, 8)).sum().backward()
    assert next(model.buffers()).sum() == 3
    assert all(param.requires_grad and param.dtype == torch.float32 for param in model.parameters())
    if torch.distributed.get_rank() == 0:
        torch.testing.assert_close(torch.load(tmp_path / "a" / "b" / "out.pt"), expected)
        last = [call.args[0] for call in flushed.call_args_list[-3:]]
        assert {*last} == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}


class Holding(Curious):
    """A model whose writer calls an attribute."""

    held: Callable[[Any], object]

    def save_pretrained(self, directory: Path, state_dict: dict[str, torch.Tensor]) -> None:
        (Path(directory) / "begun").touch()
        self.held(self)


def by_bound_method(model: Any) -> Callable[[Any], object]:
    forward = model.forward
    return lambda plain: forward(INPUT)


def by_parent(model: Any) -> Callable[[Any], object]:
    vars(model.blocks[0])["parent"] = model
    return lambda plain: plain.blocks[0].parent(INPUT)


def by_list(model: Any) -> Callable[[Any], object]:
    blocks = [*model.blocks]
    return lambda plain: blocks[1](INPUT)


def by_list_of_gathered(model: Any) -> Callable[[Any], object]:
    blocks = [*model.blocks]
    return lambda plain: blocks[1].unshard()


def by_parameters(model: Any) -> Callable[[Any], object]:
    params = [*model.parameters()]
    return lambda plain: [param.full_tensor() for param in params]


def by_registered_method(model: Any) -> Callable[[Any], object]:
    register_fsdp_forward_method(model, "generate")
    return lambda plain: plain.generate(INPUT)


INPUT = torch.ones(1, 8)
#: How a writer reaches the sharded model, as a function of it.
REACHES: dict[str, Callable[[Any], Callable[[Any], object]]] = {
    "bound method": by_bound_method,
    "partial": lambda model: functools.partial(lambda m, plain: m(INPUT), model),
    "list": by_list,
    "list, by hand": by_list_of_gathered,
    "parent": by_parent,
    "registered method": by_registered_method,
    "parameters": by_parameters,
    "a collective of its own": lambda model: lambda plain: torch.distributed.barrier(),
}


def lossy(wrote: bool, reach: str, directory: Path) -> list[float]:
    """Losses of a training in which writers fail."""
    torch.manual_seed(0)
    plain = Holding()
    Holding.generate = Curious.forward  # type: ignore[attr-defined]
    model: Any = fcdp.shard(plain, topology_of(2, 1))
    held = REACHES[reach](model)
    optimizer, losses = optimizer_of(model), []
    for step in range(4):
        if wrote and step in (1, 2):
            model.held = held
            with pytest.raises(RuntimeError, match="runs on rank 0 alone"):
                fcdp.export(model, directory)
            assert not [*directory.iterdir()]
        losses.append(take_step(model(INPUT * step).square().mean(), optimizer))
        with torch.no_grad():
            losses.append(float(model(INPUT).sum()))
    model.held = lambda plain: plain(INPUT)
    fcdp.export(model, directory)
    assert [path.name for path in directory.iterdir()] == ["begun"]
    return losses


@pytest.mark.parametrize("reach", REACHES)
@on_ranks(2)
def test_a_writer_that_reaches_the_sharded_model_is_an_error_on_all_ranks(
    reach: str, tmp_path: Path
) -> None:
    """At once, and training goes on as if nothing had been written."""
    losses = [lossy(wrote, reach, tmp_path / str(wrote)) for wrote in (False, True)]
    assert losses[0] == losses[1]
    assert len({*losses[0]}) == len(losses[0])
