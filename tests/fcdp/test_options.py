"""Options: their defaults, what is refused when they are made, and where they are passed."""

import inspect
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

import fcdp
from fcdp.integrations.takeover import check_options

Cache, Comm = fcdp.CacheOptions, fcdp.CommOptions
INT8 = fcdp.BlockInt8()
ALLOCATES = SimpleNamespace(allocate=True)

#: Options with fields that are refused, and how the error begins.
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (Cache, {"look_ahead": 1.5}, "look_ahead = 1.5: must be a count, 0 or more"),
    (Cache, {"look_ahead": True}, "look_ahead = True: must be a count, 0 or more"),
    (Cache, {"look_ahead": -1}, "look_ahead = -1: must be a count, 0 or more"),
    (
        Comm,
        {"gather_codec": "int8"},
        "gather_codec = 'int8': must be a fcdp.Codec, such as fcdp.BlockInt8(), or fcdp.Delta()",
    ),
    (
        Comm,
        {"reduce_codec": 8},
        "reduce_codec = 8: must be a fcdp.Codec, such as fcdp.BlockInt8(), or fcdp.Exact()",
    ),
    (Comm, {"gather_codec": fcdp.Exact()}, "gather_codec = Exact(when='pays'): must be"),
    (Comm, {"reduce_codec": fcdp.Delta()}, "reduce_codec = Delta(when='pays'): must be"),
    (Comm, {"intra_node": "nccl"}, "intra_node = 'nccl': must be an all-gather as FSDP2's"),
    (Comm, {"intra_node": print}, "intra_node = <built-in function print>: must be an all-gather"),
    (Comm, {"intra_node": ALLOCATES}, "intra_node = namespace(allocate=True): must be an all-ga"),
    (Comm, {"error_feedback": True}, "error_feedback = True: needs a reduce_codec that rounds"),
    (
        Comm,
        {"gather_codec": INT8, "error_feedback": True},
        "error_feedback = True: needs a reduce_codec that rounds",
    ),
    (
        Comm,
        {"reduce_codec": fcdp.Exact(), "error_feedback": True},
        "error_feedback = True: needs a reduce_codec that rounds",
    ),
    (Comm, {"exchanges": "ring"}, "exchanges = 'ring': must be one of hierarchical, flat"),
    (
        Comm,
        {"partial_gradients": "disk"},
        "partial_gradients = 'disk': must be one of auto, device, host, each",
    ),
    (
        Comm,
        {"exchanges": "flat", "gather_codec": INT8},
        "gather_codec = BlockInt8(block=256): must be None with exchanges = 'flat'",
    ),
    (
        Comm,
        {"exchanges": "flat", "reduce_codec": INT8},
        "reduce_codec = BlockInt8(block=256): must be None with exchanges = 'flat'",
    ),
    (
        Comm,
        {"exchanges": "flat", "partial_gradients": "host"},
        "partial_gradients = 'host': must be 'auto' or 'device' or 'each' with exchanges = 'flat'",
    ),
]


@pytest.mark.parametrize(("kind", "given", "message"), REFUSED)
def test_fields_that_cannot_be_are_refused_when_options_are_made(
    kind: Callable[..., Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        kind(**given)


def test_fields_at_the_edge_are_allowed() -> None:
    assert Cache(look_ahead=0).look_ahead == 0
    assert isinstance(Comm(intra_node=DefaultAllGather()).intra_node, DefaultAllGather)


def test_options_are_what_the_docs_say() -> None:
    assert vars(Cache()) == {
        "look_ahead": 1,
        "detect_writes": True,
        "verify": False,
        "poison": False,
    }
    assert vars(Comm()) == {
        "gather_codec": None,
        "reduce_codec": None,
        "error_feedback": False,
        "exchanges": "hierarchical",
        "partial_gradients": "auto",
        "intra_node": None,
    }
    assert Comm(reduce_codec=fcdp.BlockInt4(), error_feedback=True).error_feedback
    with pytest.raises(FrozenInstanceError):
        Cache().look_ahead = 2  # type: ignore[misc]


def test_shard_takes_at_most_eight_keywords() -> None:
    for function, most in ((fcdp.shard, 8), (fcdp.cache_parameters, 3)):
        _, _, *keywords = inspect.signature(function).parameters  # after the model and topology
        assert len(keywords) <= most, keywords
        assert keywords[-2:] == ["cache", "comm"]


def test_keywords_that_are_fields_of_options_now_are_refused() -> None:
    for field in (*fields(Cache), *fields(Comm)):
        for function in (fcdp.shard, fcdp.cache_parameters):
            call: Callable[..., Any] = function
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{field.name}'"):
                call(nn.Linear(2, 2), None, **{field.name: field.default})


def test_other_trainers_pass_the_same_two_options() -> None:
    check_options({"cache": Cache(), "comm": Comm()})
    message = "^verify = True: is not known; must be one of cache, comm$"
    with pytest.raises(ValueError, match=message):
        check_options({"verify": True})
    with pytest.raises(ValueError, match="^units = None: follows from the client's own settings;"):
        check_options({"units": None})
