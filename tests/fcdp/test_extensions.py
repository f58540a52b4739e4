"""Parameters of classes that gather by FSDP2 extensions: trained as FSDP2 does, kept as they are.

Reductions add up in float64, so that sums of any order are one.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import fcdp
from fcdp.engine import engine_of
from fcdp.extensions import opened
from tests.fcdp import training
from tests.fcdp.checkpoints import errors_of
from tests.fcdp.extended import CLASSES, Coded, Packed, Wrapper
from tests.fcdp.on_streams import OnStreams
from tests.fcdp.training import Result, Settings, make_model, make_optimizer, topology_of
from tests.ranks import Pools, on_ranks

LORA = Settings(extension="packed", adapter_rank=3, reduce_dtype=torch.float64)
#: A write to the shards of a second matrix.
Write = Callable[[Any], None]
#: A NaN with a payload, as packed codes may look.
NAN = 0x7FA5A5A5


def both(settings: Settings) -> tuple[Result, Result]:
    return training.train(settings, "fsdp2"), training.train(settings, "fcdp")


@pytest.mark.parametrize(
    "settings",
    [
        LORA,
        replace(LORA, extension="rounded"),
        replace(LORA, extension="rounded", adapter_rank=0),
        replace(LORA, nodes=3, policy=fcdp.DeviceCache()),
        replace(LORA, extension="rounded", adapter_rank=0, verify=True),
        replace(LORA, checkpointing=True, policy=fcdp.NoCache()),
        replace(LORA, exchanges="flat", poison=True),
    ],
    ids=lambda each: f"{each.extension}-{each.nodes}-{each.adapter_rank}",
)
def test_training_equals_fsdp2_to_the_bit(ranks: Pools, settings: Settings) -> None:
    settings = replace(settings, events={2: "eval", 3: "write"})
    for theirs, ours in ranks.run(settings.world_size, both, settings):
        assert ours.losses == theirs.losses
        for name, value in theirs.params.items():
            assert torch.equal(ours.params[name], value), name


def packed_bytes(settings: Settings) -> tuple[Result, int, int, int]:
    """A run, what its cache takes, and bytes of this rank's parts: frozen ones, trained ones."""
    run = training.train(settings, "fcdp")
    model = training.Run(settings).model
    parts = [0, 0]
    for unit in engine_of(model).units:
        parts[unit.trainable] += unit.shard_bytes
    return run, fcdp.ledger(model).host_cache_bytes, parts[0], parts[1]


def test_packed_weights_cross_once_and_are_kept_in_their_packed_size(ranks: Pools) -> None:
    settings = replace(LORA, nodes=3, steps=5)
    run, cached, frozen, trained = ranks.run(6, packed_bytes, settings)[0]
    plain = ranks.run(6, packed_bytes, replace(settings, extension=None))[0]
    # Per block 12 rows of 13 values: a byte each in place of four, and a scale per row.
    assert plain[2] - frozen == 2 * (12 * 13 * 3 - 12 * 4) // 6
    assert run.ledger is not None
    assert run.ledger["inter_node"]["forward"] == 2 * (frozen + settings.steps * trained)
    # All but the own node's, of three; each of five units begins a page.
    assert 0 <= cached - 2 * (frozen + trained) < 5 * 4096


def with_nan(run: training.Run) -> list[torch.Tensor]:
    """Give each rank's scales other bits of NaNs; list the tensors inside of its matrices."""
    inside = [each for block in run.model.blocks for each in block.down.weight.to_local().inside()]
    for scales in inside[1::2]:
        bits = NAN + run.topology.rank * 2**8 + torch.arange(len(scales), dtype=torch.int32)
        scales.copy_(bits.view(torch.float32)[:, None])
    return inside


def gathered_bits(run: training.Run) -> list[torch.Tensor]:
    """Return what all ranks' matrices hold, as this one gathers them in the next forward."""
    seen: list[torch.Tensor] = []
    unpack = Packed.unpack

    def look(self: Packed, sent: Any, about: None) -> torch.Tensor:
        seen.extend(each.clone().view(torch.uint8) for each in sent)
        return unpack(self, sent, about)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(Packed, "unpack", look)
        run.loss()
    return seen


@on_ranks(4)
def test_bits_survive_the_cache_a_checkpoint_and_a_publication(tmp_path: Path) -> None:
    """Bits of NaNs, which a copy by way of numbers may change."""
    run = training.Run(LORA)
    inside = with_nan(run)
    before = [each.clone() for each in inside]
    received = gathered_bits(run)
    assert {torch.equal(*pair) for pair in zip(received, gathered_bits(run), strict=True)} == {True}
    ledger = fcdp.ledger(run.model)
    assert ledger.hits >= 2
    bits = received[1].view(torch.int32).view(4, -1)
    assert bits.tolist() == [
        [NAN + rank * 2**8 + row for row in range(bits.shape[1])] for rank in range(4)
    ]

    fcdp.save(run.model, run.optimizer, tmp_path / "saved").result()
    fcdp.publish(run.model, tmp_path / "published", dtype=torch.bfloat16)  # of no packed parts
    for each in inside:
        each.zero_()
    fcdp.load(run.model, run.optimizer, tmp_path / "saved")
    for each, expected in zip(inside, before, strict=True):
        assert torch.equal(each.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(gathered_bits(run)[1], received[1])  # the load was seen

    reader = fcdp.Subscriber(tmp_path / "published")
    reader.update()
    published = reader.state["blocks.0.down.weight:1"]
    assert published.view(torch.int32).tolist() == bits.flatten().tolist()


def saved(settings: Settings, directory: Path) -> dict[str, torch.Tensor]:
    run = training.Run(settings)
    run.step()
    fcdp.save(run.model, run.optimizer, directory).result()
    return training.params_of(run.model)


def loaded(settings: Settings, directory: Path) -> dict[str, torch.Tensor]:
    run = training.Run(settings)
    with torch.no_grad():
        for param in run.model.parameters():
            param.to_local().mul_(0.5)  # type: ignore[attr-defined]
    fcdp.load(run.model, run.optimizer, directory)
    return training.params_of(run.model)


@pytest.mark.parametrize(("kind", "into"), [("packed", "packed"), ("rounded", None)])
def test_other_ranks_load_a_checkpoint(
    ranks: Pools, tmp_path: Path, kind: str, into: str | None
) -> None:
    """Parameters in full precision are saved as such, and plain ones take them."""
    settings = replace(LORA, extension=kind)
    before = ranks.run(4, saved, settings, tmp_path)[0]
    after = ranks.run(2, loaded, replace(settings, ranks_per_node=1, extension=into), tmp_path)[0]
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def exported(settings: Settings, directory: Path) -> dict[str, torch.Tensor] | str:
    from safetensors.torch import load_file

    model = training.Run(settings).model
    if settings.extension != "rounded":
        return errors_of(fcdp.export, model, directory)
    fcdp.export(model, directory)
    return load_file(directory / "model.safetensors")


def test_an_export_has_full_precision_or_is_refused(ranks: Pools, tmp_path: Path) -> None:
    plain = make_model(LORA.__class__()).state_dict()
    written = ranks.run(4, exported, Settings(extension="rounded"), tmp_path)[0]
    for name, value in plain.items():
        assert name == "head.weight" or torch.equal(written[name], value), name
    for kind in ("Packed", "Coded"):
        refused = ranks.run(4, exported, replace(LORA, extension=kind.lower()), tmp_path)
        assert {*refused} == {
            f"ValueError: blocks.0.down.weight: is packed in a {kind}, which safetensors files "
            "have no form for; write the adapters by fcdp.save_adapters, or all by fcdp.save"
        }


class Flat(Coded):
    """Rows of three values in one line of bytes."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (len(codes) // 3, 3))


@on_ranks(2)
def test_unequal_parts_in_tensors_of_other_shapes_are_refused() -> None:
    """One tensor inside, too: no rank knows where another's part of the line begins."""
    mesh = topology_of(2, 1).mesh
    rows = 2 - mesh.get_rank()
    local = Flat(torch.zeros(3 * rows, dtype=torch.uint8))
    uneven = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((3, 3)), stride=(3, 1))
    assert errors_of(opened, "weight", uneven) == (
        "ValueError: weight: is packed in a Flat of shape (3, 3); must divide evenly by 2 ranks "
        "to be written"
    )


@on_ranks(2)
def test_plain_parameters_beside_packed_ones_may_be_cast() -> None:
    """The extension still sends what it did at set-up."""
    run = training.Run(Settings(2, 1, extension="packed", adapter_rank=3))
    block: Any = run.model.blocks[0]
    whole = block.up.weight.full_tensor()
    run.model.double()
    for _ in range(2):
        block.unshard()
        assert torch.equal(block.up.weight, whole.double())
        block.reshard()


@on_ranks(2)
def test_a_model_that_is_gathered_is_cached() -> None:
    """An extension is asked for what shards send."""
    settings = Settings(2, 1, extension="packed", adapter_rank=3, reshard_after_forward=False)
    run = training.Run(settings, "fsdp2")
    tokens = next(run.data)
    loss = training.loss_of(run.model, tokens)
    fcdp.cache_parameters(run.model, run.topology)
    for _ in range(2):
        assert training.loss_of(run.model, tokens) == loss


#: Writes to what is inside, of the first rank alone; the parameter's own counter shows one.
WRITES: dict[str, Write] = {
    "codes": lambda local: local.codes.bitwise_xor_(1),
    "scales": lambda local: local.scales.mul_(2),
    "all": lambda local: local.copy_(Packed(local.codes ^ 1, local.scales)),
}


def losses_around(settings: Settings, write: str, gradients: bool, whole: bool) -> list[float]:
    """Losses before and after a write on rank 0; ``whole``: of parameters gathered anew."""
    run = training.Run(settings)
    tokens = next(run.data)
    losses = []
    for at in range(3):
        if at == 1 and run.topology.rank == 0:
            with torch.no_grad():
                WRITES[write](run.model.blocks[0].down.weight.to_local())  # type: ignore[union-attr]
        if at and whole:
            fcdp.invalidate(run.model)
        with torch.set_grad_enabled(gradients):
            losses.append(training.loss_of(run.model, tokens).detach())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_write_to_what_is_inside_is_seen(ranks: Pools, write: str, gradients: bool) -> None:
    """Without ``detect_writes`` too: autograd counts writes to the tensors inside."""
    expected = ranks.run(4, losses_around, LORA, write, gradients, True)[0]
    assert expected[0] != expected[1]
    for settings in (LORA, replace(LORA, detect_writes=False)):
        assert ranks.run(4, losses_around, settings, write, gradients, False)[0] == expected


def passes(
    settings: Settings, write: bool, gradients: bool, count: int = 4
) -> tuple[list[float], int, str]:
    """Losses of equal tokens, gathers across nodes but for the first pass's, and what was raised.

    ``write``: rank 0 writes to its codes after the first pass.
    """
    run = training.Run(settings)
    tokens = next(run.data)
    losses, misses, refusal = [], 0, ""
    try:
        for at in range(count):
            with torch.set_grad_enabled(gradients):
                losses.append(training.loss_of(run.model, tokens).detach())
            if at == 0:
                misses = fcdp.ledger(run.model).misses
                if write and run.topology.rank == 0:
                    WRITES["codes"](run.model.blocks[0].down.weight.to_local())  # type: ignore[union-attr]
    except RuntimeError as error:
        refusal = str(error)
    return [loss.item() for loss in losses], fcdp.ledger(run.model).misses - misses, refusal


@pytest.mark.parametrize(("kind", "adapter_rank"), [("packed", 3), ("rounded", 0)])
def test_on_accelerators_a_pass_without_gradients_looks_at_what_is_inside(
    streams: OnStreams, kind: str, adapter_rank: int
) -> None:
    """Trained or frozen, nothing is gathered again that was not written."""
    settings = replace(LORA, extension=kind, adapter_rank=adapter_rank)
    losses, misses, _ = streams.run(4, passes, settings, False, False)[0]
    assert len({*losses}) == 1
    assert misses == 0
    if kind == "packed":
        losses, misses, _ = streams.run(4, passes, settings, True, False)[0]
        assert losses[0] != losses[1] == losses[2] == losses[3]
        assert misses == 1


def test_on_accelerators_a_pass_with_gradients_refuses_soon_after(streams: OnStreams) -> None:
    for _, misses, refusal in streams.run(4, passes, LORA, True, True, 6):
        assert misses == 0
        assert refusal.startswith("blocks.0: parameters were written where nothing shows it")


@on_ranks(2)
def test_other_sizes_than_at_set_up_are_refused() -> None:
    """FSDP2's buffers would be too small; the first gather is that of set-up."""
    run = training.Run(Settings(2, 1, extension="growing", adapter_rank=3))
    run.loss()
    before = engine_of(run.model).units[1].shard_bytes
    assert errors_of(run.loss) == (
        f"RuntimeError: blocks.0: its gather extensions return {before + 6} bytes per rank, and "
        f"returned {before} at set-up; fsdp_pre_all_gather must return tensors of the same sizes "
        "at each gather"
    )


@on_ranks(2)
def test_other_sizes_on_another_rank_are_refused_on_all() -> None:
    """Unequal messages end a process: gloo aborts it."""
    run = training.Run(Settings(2, 1, extension="uneven", adapter_rank=3), "fsdp2")
    # 6 rows of 13 codes and a scale.
    assert errors_of(fcdp.cache_parameters, run.model, run.topology) == (
        "ValueError: blocks.0: its gather extensions return 102 bytes on rank 1 and 108 on rank 0; "
        "fsdp_pre_all_gather must return tensors of the same sizes on each rank"
    )
    assert not fcdp.is_cached(run.model)


@on_ranks(4)
def test_other_sizes_on_another_rank_of_one_mesh_are_refused_on_all_meshes() -> None:
    """Ranks 0 and 2 share packed experts, and 1 and 3 have their own."""
    pairs = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("efsdp", "ep"))
    uneven = pairs["ep"].get_local_rank() == 0
    model = nn.Sequential(nn.Linear(13, 12, bias=False), nn.Linear(12, 12))
    made = CLASSES["uneven" if uneven else "packed"](model[0].weight.detach())
    model[0].weight = nn.Parameter(made, requires_grad=False)
    fully_shard(model[0], mesh=pairs["efsdp"])
    topology = topology_of(2, 2)
    fully_shard(model, mesh=topology.mesh)
    refusal = errors_of(fcdp.cache_parameters, model, topology)
    other = "" if uneven else "model: rank 0: "
    assert refusal.startswith(
        f"ValueError: {other}0: its gather extensions return 102 bytes on rank 2 and 108"
    )
    assert not fcdp.is_cached(model)


class Unpadded(Packed):
    """It sends what a rank has, where FSDP2 asks for as much as the first rank has."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        return tuple(self.inside()), None


class Failing(Packed):
    """It raises on one rank."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        if mesh.get_local_rank() == 3:
            raise NotImplementedError("no kernel for this GPU")
        return tuple(self.inside()), None


@pytest.mark.parametrize("kind", [Unpadded, Failing])
@on_ranks(4)
def test_what_an_extension_or_fsdp2_refuses_on_some_ranks_is_refused_on_all(kind: Any) -> None:
    """FSDP2 looks at what is sent where there is padding alone: five rows are 2, 2, 1 and none."""
    model = nn.Sequential(nn.Linear(13, 5, bias=False), nn.Linear(5, 4))
    model[0].weight = nn.Parameter(kind.of(model[0].weight.detach()), requires_grad=False)
    for module in (model[0], model):
        fully_shard(module, mesh=topology_of(2, 2).mesh)
    what = "no kernel" if kind is Failing else "When a parameter is unevenly sharded by FSDP"
    theirs = "^model: rank [23]: " if dist.get_rank() < 2 else ""
    with pytest.raises((RuntimeError, AssertionError), match=theirs + what):
        fcdp.cache_parameters(model, topology_of(2, 2))
    assert not fcdp.is_cached(model)


@on_ranks(2)
def test_a_class_that_hides_what_it_holds_is_refused_before_anything_is_sharded() -> None:
    model, topology = make_model(Settings(extension="packed", adapter_rank=3)), topology_of(2, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Wrapper, "__tensor_flatten__")
        refusal = errors_of(fcdp.shard, model, topology)
        assert refusal.startswith("ValueError: blocks.0.down.weight: its tensor class Packed")
        assert "give the class __tensor_flatten__" in refusal
        assert type(model.blocks[0].down.weight) is Packed
        for block in [*model.blocks, model]:
            fully_shard(block, mesh=topology.mesh)
        refusal = errors_of(fcdp.cache_parameters, model, topology)
        assert "blocks.0: parameter of shape (12, 13): its tensor class Packed" in refusal


@on_ranks(2)
def test_codecs_of_gathers_are_refused() -> None:
    for codec in (fcdp.BlockInt8(), fcdp.Delta()):
        refusal = errors_of(training.Run, replace(LORA, ranks_per_node=1, gather_codec=codec))
        assert "blocks.0 gathers packed parameters, by FSDP2 extensions" in refusal
        assert refusal.endswith("leave gather_codec out")


@on_ranks(2)
def test_an_optimizer_steps_what_is_rounded_to_send() -> None:
    """Trained parameters are in full precision: rounding would lose most of so small a step."""
    run = training.Run(Settings(2, 1, extension="rounded"))
    optimizer = make_optimizer(run.model)
    optimizer.param_groups[0]["lr"] = 1e-6
    before = run.model.blocks[0].down.weight.to_local().values.clone()  # type: ignore[union-attr]
    training.take_step(run.loss(), optimizer)
    assert (run.model.blocks[0].down.weight.to_local().values != before).all()  # type: ignore[union-attr]
