"""All that FCDP relies on of FSDP2 stands in one file, and a torch without it is refused."""

import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import fcdp
from fcdp import fsdp2

HOUSE = Path(fcdp.__file__).parent
#: Names that are FSDP2's alone.
NAMES = (
    "_get_fsdp_state|_fsdp_param_groups?|_state_ctx|iter_forward_root|_auto_reshard_after_forward|"
    "fsdp_params|mesh_info|post_forward_mesh_info|_reshard_after_forward|gradient_divide_factor|"
    "_all_gather_comm|_reduce_scatter_comm|_all_gather_result|_all_reduce_hook|post_backward|"
    "reduce_scatter_max_input_buffers|_sharded_param_data|_sharded_local_tensor|_fully_shard|"
    r"_?unsharded_param|unsharded_accumulated_grad|sharded_param|group\.unshard|_pre_forward|"
    r"_post_forward|state\._modules"
)


def test_no_other_file_has_a_private_name_of_fsdp2() -> None:
    name = re.compile(rf"(?<![\w`])({NAMES})\b(?!`)")
    files = {file.name: file.read_text("utf-8") for file in HOUSE.rglob("*.py")}
    assert {match.group() for match in name.finditer(files.pop("fsdp2.py"))} > {"fsdp_params"}
    assert {file: name.findall(text) for file, text in files.items() if name.search(text)} == {}


def test_a_torch_without_a_name_is_refused_in_one_sentence() -> None:
    with pytest.raises(ImportError) as caught:
        fsdp2._of(fsdp2.FSDPParamGroup, "fsdp_params", "_gathered")
    assert str(caught.value) == (
        f"torch {torch.__version__}: FSDP2's FSDPParamGroup has no _gathered; "
        "FCDP relies on it, and is tested with torch 2.11 to 2.15"
    )


def test_a_torch_without_a_class_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_fsdp_param_group, "FSDPParamGroup")
    monkeypatch.delitem(sys.modules, "fcdp.fsdp2")
    with pytest.raises(ImportError, match=r"^torch .*FSDPParamGroup.*; FCDP relies on it, and"):
        __import__("fcdp.fsdp2")


def test_releases_that_are_promised_are_those_that_are_tested() -> None:
    root = HOUSE.parent
    after = f"{fsdp2.NEWEST[0]}.{fsdp2.NEWEST[1] + 1}"
    oldest = "{}.{}".format(*fsdp2.OLDEST)
    assert f'"torch>={oldest},<{after}"' in (root / "pyproject.toml").read_text()


def test_a_newer_release_is_warned_of_with_the_way_to_check_it() -> None:
    with pytest.warns(UserWarning, match=r"torch 2\.16\.0 is newer .*python -m fcdp\.check"):
        fsdp2.warn_of_newer("2.16.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fsdp2.warn_of_newer("2.15.3+cpu")
