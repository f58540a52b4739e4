"""Blocks are found where nobody names them; parts split off them are joined by kind, in order."""

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

import fcdp
from fcdp import grouping
from fcdp.blocks import find_blocks
from fcdp.partition import Split, bucket, fit_in_a_slice, placement, split_off
from tests.fcdp.extended import Packed
from tests.fcdp.test_peft import make_model
from tests.fcdp.training import topology_of
from tests.ranks import on_ranks

TRAINED = (torch.float32, True)
FROZEN = (torch.bfloat16, False)


def split_of(block: nn.Module, modules: list[nn.Module]) -> Split:
    """A split of all that the modules hold themselves and that is trained."""
    params = [param for module in modules for param in module.parameters(recurse=False)]
    trained = dict.fromkeys(p for p in params if p.requires_grad)
    return Split([[block]], modules, trained, key=TRAINED)


def make_splits(widths: list[tuple[int, bool]]) -> tuple[nn.Module, list[Split]]:
    """One split a block; the last belongs to the model itself."""
    model = nn.Module()
    splits = []
    for index, (width, trained) in enumerate(widths):
        block = model if index == len(widths) - 1 else nn.Module()
        linear = nn.Linear(width, 1, bias=False, device="meta")
        params = dict.fromkeys(linear.parameters())
        splits.append(Split([[block]], [linear], params, key=TRAINED if trained else FROZEN))
    return model, splits


@given(st.lists(st.tuples(st.integers(1, 4 * 2**20), st.booleans()), min_size=1, max_size=12))
def test_buckets_hold_everything_once_in_order_by_kind_and_below_the_limit(
    widths: list[tuple[int, bool]],
) -> None:
    model, splits = make_splits(widths)
    joined = bucket(splits, model)
    for key in (TRAINED, FROZEN):
        modules = [module for split in splits if split.key == key for module in split.modules]
        buckets = [split for split in joined if split.key == key]
        assert [module for split in buckets for module in split.modules] == modules
        for split in buckets:
            assert len(split.modules) == 1 or split.nbytes <= grouping.BUCKET_BYTES
    assert joined[-1].blocks != [[model]] or joined[-1].modules == splits[-1].modules
    assert sum(len(split.blocks) for split in joined) == len(splits)


def test_neighbours_are_joined_until_a_bucket_is_full() -> None:
    model, splits = make_splits([(2**20, True)] * 14)  # 4 MiB each; six fit
    assert [len(split.modules) for split in bucket(splits, model)] == [6, 6, 1, 1]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 16))
def test_nothing_is_padded_where_a_dimension_is_even(shape: list[int], world_size: int) -> None:
    param = nn.Parameter(torch.empty(shape, device="meta"))
    cut = placement(param, world_size)
    if cut is None:
        rows, others = shape[0], shape[1:]
        assert rows >= world_size or not any(size % world_size == 0 for size in others)
    else:
        assert shape[0] < world_size
        assert shape[cut.dim] % world_size == 0


class Called(nn.Module):
    """A module that is called, and what it holds itself."""

    def __init__(self, *held: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for index, each in enumerate(held):
            setattr(self, f"held{index}", each)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def of(rows: int, *, trained: bool = True, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, 2, device="meta", dtype=dtype), requires_grad=trained)


def frozen(rows: int) -> nn.Parameter:
    return of(rows, trained=False, dtype=torch.bfloat16)


def test_a_block_keeps_the_kind_that_it_has_most_of() -> None:
    base, first, second = Called(frozen(5), frozen(4)), Called(of(4)), Called(of(4))
    plain = Called(Called(of(9)), Called(of(1)))  # of one kind: nothing is to be split off
    block = Called(first, base, second)
    inner = Called(of(3))
    outer = Called(block, Called(inner, Called(frozen(8))), plain)
    splits = split_off(outer, [[block], [plain]])
    assert splits == [split_of(block, [first, second]), split_of(outer, [inner])]


def test_what_nobody_calls_is_split_off_too() -> None:
    factors, scales = nn.ParameterList([of(1)]), nn.ParameterDict({"default": of(1)})
    block = Called(Called(frozen(9)), factors, scales)
    assert split_off(Called(block), [[block]]) == [split_of(block, [factors, scales])]


def test_trained_biases_are_split_off_their_frozen_weights() -> None:
    mixed = Called(of(1), frozen(3))
    block = Called(Called(frozen(9)), mixed)
    assert split_off(Called(block), [[block]]) == [split_of(block, [mixed])]


def test_a_block_keeps_what_it_holds_itself() -> None:
    bulk, scale = Called(frozen(9)), of(1)
    block = Called(bulk, scale)
    (split,) = split_off(Called(block), [[block]])
    assert [*split.params] == [*bulk.parameters()]


def test_what_cannot_be_split_off_stays_with_a_warning() -> None:
    last, base = Called(of(1)), Called(frozen(9))
    of_two_kinds = Called(of(1), frozen(1), of(1, dtype=torch.half))
    for block in (Called(base, of_two_kinds, last), Called(base, of(1), frozen(1), last)):
        with pytest.warns(UserWarning, match="inside Called cannot have a unit of its own") as seen:
            assert split_off(Called(block), [[block]]) == [split_of(block, [last])]
        assert len(seen) == 1


@on_ranks(2)
def test_a_warning_names_the_file_that_calls_shard() -> None:
    block = Called(Called(frozen(9)), of(1), frozen(1), Called(of(1)))
    with pytest.warns(UserWarning, match="cannot have a unit of its own") as seen:
        fcdp.shard(Called(block), topology_of(2, 1), units=[block])
    assert [each.filename for each in seen] == [__file__]


def test_what_is_tied_to_what_stays_stays() -> None:
    tied = of(1)
    block = Called(Called(frozen(9)), Called(tied, of(1)), tied, frozen(1))
    with pytest.warns(UserWarning, match="cannot have a unit of its own"):
        (split,) = split_off(Called(block), [[block]])
    assert tied not in split.params


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((2,), None), ((2, 6), None), ((4, 4), None), ((2, 4), 1), ((3, 5, 8), 2), ((3, 8, 8), 1)],
)
def test_a_factor_with_few_rows_is_cut_where_it_divides_by_four(
    shape: tuple[int, ...], dim: int | None
) -> None:
    cut = placement(nn.Parameter(torch.empty(shape, device="meta")), 4)
    assert (cut and cut.dim) == dim
    assert placement(nn.Parameter(torch.empty((), device="meta")), 4) is None


def test_a_bucket_is_full_at_its_size_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grouping.BUCKET_BYTES == 25 * 2**20  # as DDP's
    monkeypatch.setattr(grouping, "BUCKET_BYTES", 8)
    model, splits = make_splits([(1, True)] * 4)
    assert [len(split.modules) for split in bucket(splits, model)] == [2, 1, 1]


def test_adapters_stay_gathered_up_to_a_slice_of_the_largest_block() -> None:
    blocks = [[Called(of(40))], [Called(of(60)), Called(of(20))], [Called(of(20))]]
    splits = [split_of(block[0], [Called(of(10))]) for block in blocks[:2]]
    assert [fit_in_a_slice(splits, blocks, ranks) for ranks in (1, 4, 5)] == [True, True, False]
    assert [fit_in_a_slice(candidates, [], 1) for candidates in ([], splits)] == [True, False]


def test_a_packed_block_is_as_large_as_what_holds_it() -> None:
    weight = nn.Parameter(Packed.of(torch.ones(8, 10)), requires_grad=False)  # of 112 bytes
    splits = [split_of(Called(weight), [Called(of(10))])]
    assert [fit_in_a_slice(splits, [[Called(weight)]], ranks) for ranks in (1, 2)] == [True, False]


class Block(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(experts))


class Other(Block):
    pass


@pytest.mark.parametrize("kind", ["full", "lora", "dora", "prefix", "head"])
def test_blocks_are_found_inside_of_pefts_wrapper(kind: str) -> None:
    model, blocks = make_model(kind)
    assert find_blocks(model) == blocks


class Named(nn.ModuleDict):
    _no_split_modules = ("Block", "Other")


def stack(*parts: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(parts)


#: Models, and the lists in them that hold their blocks.
MODELS: dict[str, tuple[dict[str, nn.Module], tuple[str, ...]]] = {
    "the list that holds most and is in no other": (
        {
            "heads": stack(nn.Linear(2, 2), nn.Linear(2, 2)),
            "layers": stack(Block(9), Block(9), Block(9)),
            "drops": stack(*(nn.Dropout() for _ in range(5))),
        },
        ("layers",),
    ),
    "sequential": ({"layers": nn.Sequential(Block(2), Block(2))}, ("layers",)),
    # As torchtitan numbers them.
    "numbered": ({"layers": nn.ModuleDict({"0": Block(2), "1": Block(2)})}, ("layers",)),
    "of which one is pruned": ({"layers": stack(Block(2), nn.Identity(), Block(2))}, ("layers",)),
    "of two classes": ({"layers": stack(Block(2), Other(2), Block(2))}, ("layers",)),
    "encoder and decoder together": (
        {"encoder": stack(Block(2)), "decoder": stack(Block(3), Block(3))},
        ("encoder", "decoder"),
    ),
    "classes that are not to be split": (
        {"base": Named({"vision": stack(Other(2)), "text": stack(Block(2))})},
        ("base.vision", "base.text"),
    ),
}


@pytest.mark.parametrize(("parts", "lists"), MODELS.values(), ids=MODELS)
def test_blocks_are_found_where_nobody_names_them(
    parts: dict[str, nn.Module], lists: tuple[str, ...]
) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(9, 2), **parts})
    members = [block for name in lists for block in model.get_submodule(name).children()]
    assert find_blocks(model) == [block for block in members if [*block.parameters()]]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            nn.ModuleDict({"seen": stack(Other(2)), "read": stack(Block(2))}),
            "seen (1 × Other), read (1 × Block); pass the modules to gather one at a time, such as "
            "units=model.seen",
        ),
        (
            nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 9)),
            "Sequential has no list of blocks (nn.ModuleList); pass the modules to gather one at a "
            "time. Its largest parts are 2 (Linear, 36 parameters), 0 (Linear, 9 parameters)",
        ),
        (nn.Linear(2, 2), "its own parameters alone"),
    ],
    ids=["two lists", "no list", "no part"],
)
def test_an_error_lists_candidates(model: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=r"^units: ") as raised:
        find_blocks(model)
    assert words in str(raised.value)
