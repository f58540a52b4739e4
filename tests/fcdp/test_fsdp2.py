"""All that FCDP relies on of FSDP2 stands in one file, and a torch without it is refused.

Stand-ins for modules and groups of FSDP2 show here what that file does to them.
"""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
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
    with pytest.warns(
        UserWarning, match=r"torch 2\.16\.0 is newer .*python -m fcdp\.check"
    ) as caught:
        fsdp2.warn_of_newer("2.16.0")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fsdp2.warn_of_newer("2.15.3+cpu")


def imported_anew(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(fcdp, "fsdp2", fsdp2)  # and put back afterwards
    monkeypatch.delitem(sys.modules, "fcdp.fsdp2")
    return import_module("fcdp.fsdp2")


def test_a_newer_release_is_warned_of_when_the_library_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "9.0.0")
    with pytest.warns(UserWarning, match=r"torch 9\.0\.0 is newer"):
        imported_anew(monkeypatch)


#: Names that are not kept in getters, which a torch has to have all the same, by their classes.
NEEDED = {
    "FSDPModule": "_get_fsdp_state",
    "FSDPState": (
        "_state_ctx _training_state _modules _pre_forward_hook_handle _post_forward_hook_handle "
        "_modules_to_run_forward _lazy_init _states_to_forward_prefetch "
        "_states_to_backward_prefetch _reset_iter_state"
    ),
    "FSDPStateContext": "iter_forward_root",
    "FSDPParam": "_unsharded_param unsharded_accumulated_grad reset_sharded_param",
    "FSDPParamGroup": (
        "unshard post_backward force_sum_reduction_for_comms lazy_init wait_for_unshard reshard "
        "is_unsharded use_training_state _training_state comm_ctx reduce_scatter_max_input_buffers"
    ),
}
#: They came with methods that older torches do not have either.
SINCE_2_13 = ("_reset_iter_state", "reduce_scatter_max_input_buffers")


def lacking(kind: type, missing: str) -> type:
    """A class with the names of another one and of its instances, but for one."""
    made = (vars(kind).get(name) for name in ("__init__", "init"))
    names = {*dir(kind), *getattr(kind, "__annotations__", ())}
    names.update(*(each.__code__.co_names for each in made if each is not None))
    kept = (name for name in names if name != missing and not name.startswith("__"))
    return type(kind.__name__, (), dict.fromkeys(kept))


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in NEEDED.items() for name in names.split()]
)
def test_a_torch_without_a_name_is_refused_when_the_library_is_imported(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    there = getattr(fsdp2, kind)
    if name in SINCE_2_13 and not fsdp2._has(there, name):
        pytest.skip("a torch before 2.13")
    monkeypatch.setattr(sys.modules[there.__module__], kind, lacking(there, name))
    with pytest.raises(ImportError, match=f"FSDP2's {kind} has no {name}; "):
        imported_anew(monkeypatch)


IDLE, FORWARD = fsdp2.TrainingState.IDLE, fsdp2.TrainingState.FORWARD


class State:
    """The state of a module, as FSDP2 has it, which notes what it is called for."""

    def __init__(self, group: Any = None) -> None:
        self._fsdp_param_groups = self._fsdp_param_group = group
        self.module: Any = nn.Identity()
        self.module._get_fsdp_state = lambda: self
        self._modules = (self.module, nn.Identity())
        self._training_state = FORWARD
        self._state_ctx = SimpleNamespace(iter_forward_root=self)
        self._states_to_forward_prefetch: list[Any] = []
        self._states_to_backward_prefetch: list[Any] = []
        self._auto_reshard_after_forward = False
        self.calls: list[Any] = []

    def _pre_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        self.calls.append(("begins", self._training_state, self._state_ctx.iter_forward_root))
        return args, kwargs

    def _post_forward(self, module: Any, args: Any, output: Any) -> Any:
        self.calls.append("ends")
        return output + 1

    def _lazy_init(self) -> None:
        self.calls.append("finds modules")

    def _reset_iter_state(self) -> None:
        self.calls.append("drops a pass")

    def note(self, *_: Any) -> None:
        self.calls.append("then")


@pytest.mark.parametrize("name", ["_fsdp_param_groups", "_fsdp_param_group"])
def test_groups_of_a_module_are_a_list_whatever_torch_calls_them(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kind = lacking(fsdp2.FSDPState, "_fsdp_param_groups")
    setattr(kind, name, None)
    monkeypatch.setattr(sys.modules[fsdp2.FSDPState.__module__], "FSDPState", kind)
    anew = imported_anew(monkeypatch)
    for groups, listed in (([], []), (["a", "b"], ["a", "b"]), (None, []), ("a", ["a"])):
        state = SimpleNamespace(**{name: groups})
        module = SimpleNamespace(_get_fsdp_state=lambda state=state: state)
        assert anew.param_groups(module) == listed


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_forward_is_told_once_be_it_by_an_error(fails: bool) -> None:
    state = State()
    fsdp2.when_forward_ends(state, state.note)
    if fails:
        with pytest.raises(TypeError):
            state.module(1, wrong=1)
        assert state.calls == ["then"]
    state.module(1)
    assert state.calls == ["then"]
    assert not {"_pre_forward", "_post_forward"} & vars(state).keys()


def test_the_end_of_a_registered_method_is_told_once_after_fsdp2s_own() -> None:
    state = State()
    fsdp2.when_forward_ends(state, state.note)
    assert state._post_forward(state.module, (), 1) == 2
    for _ in range(2):
        assert state.calls == ["ends", "then"]
        state.module(1)
    assert not {"_pre_forward", "_post_forward"} & vars(state).keys()


def test_a_method_that_raised_has_ended_when_the_next_one_begins_as_a_root() -> None:
    state = State()
    fsdp2.when_forward_ends(state, state.note)
    assert state._pre_forward(state.module, (1,), {}) == ((1,), {})
    assert state.calls == ["then", ("begins", IDLE, None)]
    assert not {"_pre_forward", "_post_forward"} & vars(state).keys()


@pytest.mark.parametrize("before", [False, True])
def test_forwards_are_refused_before_anybody_has_noted_them(before: bool) -> None:
    state = State()
    state.module.register_forward_pre_hook(state.note)
    if before:
        vars(state)["_pre_forward"] = "another's"

    def refuse(*_: Any) -> None:
        raise RuntimeError("refused")

    with fsdp2.refusing_forwards(state.module, refuse):
        for call in (state.module, lambda x: state._pre_forward(state.module, (x,), {})):
            with pytest.raises(RuntimeError, match="refused"):
                call(1)
    assert state.calls == []
    assert vars(state).get("_pre_forward") == ("another's" if before else None)
    state.module(1)
    assert state.calls == ["then"]


class Mesh(dict[str, str]):
    """A mesh of named dimensions, or of one without a name."""

    def __init__(self, *names: str) -> None:
        super().__init__({name: f"along {name}" for name in names})
        self.mesh_dim_names, self.ndim = names or None, max(1, len(names))


def test_the_mesh_of_shards_is_a_mesh_or_one_dimension_of_it() -> None:
    def shard_mesh(mesh: Any) -> Any:
        info = SimpleNamespace(mesh=mesh, shard_mesh_dim=len(mesh) - 1)
        return fsdp2.shard_mesh(SimpleNamespace(mesh_info=info, post_forward_mesh_info=None))

    for mesh in (Mesh(), Mesh("shard")):
        assert shard_mesh(mesh) is mesh
    assert shard_mesh(Mesh("replicate", "shard")) == "along shard"


class Param:
    """A parameter of a group, as FSDP2 has it, whose part of the gather is ``data``."""

    def __init__(self, data: torch.Tensor, **parts: Any) -> None:
        self._sharded_param_data: Any = data
        self.mp_policy = SimpleNamespace(param_dtype=None, reduce_dtype=None)
        self.unsharded_accumulated_grad: Any = None
        vars(self).update(parts)


class Group:
    """A group of parameters, as FSDP2 has it, which notes its calls."""

    def __init__(self, *params: Any, state: Any = IDLE) -> None:
        self.fsdp_params, self._training_state = params, state
        self.is_unsharded, self._all_gather_result = False, None
        self.calls: list[Any] = []
        self.comm_ctx = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.note(name)

    def pre_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        self.calls.append(("pre_forward",))
        return args, kwargs

    def post_forward(self, module: Any, args: Any, output: Any) -> Any:
        self.calls.append(("post_forward",))
        return output + 1

    @contextmanager
    def use_training_state(self, state: Any) -> Iterator[None]:
        before, self._training_state = self._training_state, state
        self.calls.append(state)
        try:
            yield
        finally:
            self._training_state = before

    def note(self, name: str) -> Callable[..., None]:
        return lambda *args: self.calls.append((name, *args))


@pytest.mark.parametrize(
    ("old", "new", "moved"), [(1, None, False), (1, 1, True), (1, 0, True), (0, 2, False)]
)
def test_a_parameter_is_told_of_that_lies_in_other_memory(
    old: int, new: int | None, moved: bool
) -> None:
    def reset() -> None:
        if new is not None:
            param._sharded_param_data = torch.zeros(new)

    param = Param(torch.zeros(old), reset_sharded_param=reset)
    group = Group(param)
    fsdp2.around_replaced(group, group.note("before"), group.note("after"))
    group.reshard()
    group._training_state = FORWARD
    group.reshard()
    param.reset_sharded_param()
    assert group.calls == [("before",), ("reshard",), ("reshard",), ("after", moved)]


def test_shards_have_the_dtype_that_they_are_gathered_in() -> None:
    to_half = SimpleNamespace(param_dtype=torch.float16)
    plain, numbers = torch.zeros(2), torch.zeros(2, dtype=torch.int8)
    params = [Param(data, mp_policy=to_half) for data in (plain, numbers)] + [Param(plain)]
    group = Group(*params)
    expected = [(plain, torch.float16), (numbers, torch.int8), (plain, torch.float32)]
    for (data, dtype), (same, other) in zip(fsdp2.shards(group), expected, strict=True):
        assert data is same
        assert dtype == other
    assert fsdp2.part_sizes(group) == dict.fromkeys(params, 2)


@pytest.mark.parametrize("unsharded", [False, True])
@pytest.mark.parametrize("extended", [False, True])
def test_extensions_are_asked_of_shards(
    monkeypatch: pytest.MonkeyPatch, extended: bool, unsharded: bool
) -> None:
    inputs = [torch.zeros(2), torch.zeros(3)]
    plain, packed = (
        SimpleNamespace(sharded_param=SimpleNamespace(_local_tensor=each), all_gather_inputs=inputs)
        for each in (False, extended)
    )
    monkeypatch.setattr(fsdp2, "is_extended", bool)
    group = Group(plain, packed)
    group.is_unsharded = unsharded
    assert fsdp2.extension_bytes(group) == ({1: 20} if extended else {})
    assert group.calls == ([("reshard",)] if extended and unsharded else [])


def test_the_dtype_of_a_reduction_is_the_users_or_that_of_gradients_or_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half, brain, wide = torch.float16, torch.bfloat16, torch.float64

    def dtype(*params: tuple[Any, Any, Any], trained: bool = True) -> torch.dtype | None:
        of_params = [
            Param(
                torch.zeros(1),
                mp_policy=SimpleNamespace(reduce_dtype=reduced, param_dtype=gathered),
                sharded_param=SimpleNamespace(
                    grad_dtype=grads, dtype=torch.float32, requires_grad=trained
                ),
            )
            for reduced, grads, gathered in params
        ]
        return fsdp2.reduce_dtype(Group(*of_params))

    for follows in (False, True):
        monkeypatch.setattr(fsdp2, "_FOLLOWS_GRAD_DTYPE", follows)
        assert dtype((half, wide, brain)) == half
        assert dtype((None, wide, brain)) == (wide if follows else brain)
        assert dtype((None, None, brain)) == brain
        assert dtype((None, None, None)) == torch.float32
        assert dtype((half, None, None), (brain, None, None)) == torch.float32
        assert dtype((half, wide, brain), trained=False) is None


def test_two_reductions_may_be_under_way_unless_a_user_chose_or_torch_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for counts, before, calls in ((True, 1, 1), (True, 2, 0), (True, 3, 0), (False, 1, 0)):
        monkeypatch.setattr(fsdp2, "_COUNTS_BUFFERS", counts)
        module = mock.Mock()
        group = SimpleNamespace(reduce_scatter_max_input_buffers=before)
        fsdp2.allow_two_reductions(module, group)
        asked = module.set_reduce_scatter_max_input_buffers.call_args_list
        assert asked == [mock.call(2, recurse=False)] * calls


def test_what_is_set_on_a_group_or_a_state() -> None:
    group, state = Group(), State()
    group._all_gather_result = "a gather"
    fsdp2.forget_gather(group)
    fsdp2.force_sums(group)
    fsdp2.leave_open(state.module)
    assert group._all_gather_result is None
    assert group.force_sum_reduction_for_comms is True
    assert state._auto_reshard_after_forward is True
    assert fsdp2.by_hand(group)
    assert not fsdp2.by_hand(Group(state=FORWARD))


def test_functions_are_called_around_gathers() -> None:
    group = Group()
    names = ("before", "asked_for", "resharded")
    fsdp2.around_gathers(group, **{name: group.note(name) for name in names})
    group.unshard("its", "arguments")
    group.reshard()
    unsharding = [("before",), ("unshard", "its", "arguments"), ("asked_for",)]
    assert group.calls == [*unsharding, ("reshard",), ("resharded",)]


@pytest.mark.parametrize("inference", [False, True])
def test_a_first_gather_makes_ordinary_tensors_under_any_mode(inference: bool) -> None:
    made: list[torch.Tensor] = []
    group: Any = SimpleNamespace(wait_for_unshard=lambda: made.append(torch.zeros(1)))
    fsdp2.make_ordinary_tensors(group)
    with torch.inference_mode(inference):
        group.wait_for_unshard()
    assert [tensor.is_inference() for tensor in made] == [False]


def whole_of(*, grad: bool) -> torch.Tensor:
    tensor = torch.ones(2, requires_grad=True)
    tensor.grad = torch.ones_like(tensor) if grad else None
    return tensor


def test_gradients_are_where_fsdp2_reduces_them_from() -> None:
    new = Param(torch.zeros(1))
    seen, without = (
        Param(torch.zeros(1), _unsharded_param=whole_of(grad=grad)) for grad in (True, False)
    )
    summed = Param(torch.zeros(1), unsharded_accumulated_grad=torch.ones(2))
    group = Group(new, seen, without, summed)
    assert [*map(id, fsdp2.wholes(group))] == [
        id(each._unsharded_param) for each in (seen, without)
    ]
    assert fsdp2.with_gradients(group) == {seen, summed}
    fsdp2.give_zeros(without)
    assert without._unsharded_param.grad.tolist() == [0, 0]
    assert fsdp2.with_gradients(group) == {seen, summed, without}


@pytest.mark.parametrize("own", [False, True])
def test_gradients_and_their_sum_are_dropped(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """Where the sum is a property of ``.grad`` nobody may assign to it."""
    monkeypatch.setattr(fsdp2, "_SUM_APART", own)
    total = torch.ones(2)
    seen = Param(
        torch.zeros(1), _unsharded_param=whole_of(grad=True), unsharded_accumulated_grad=total
    )
    fsdp2.drop_gradients(Group(Param(torch.zeros(1)), seen))
    assert seen._unsharded_param.grad is None
    assert (seen.unsharded_accumulated_grad is total) != own


def test_a_failed_pass_that_is_dropped_is_told_of_where_torch_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for resets, calls in ((True, ["drops a pass", "then"]), (False, ["drops a pass"])):
        monkeypatch.setattr(fsdp2, "_RESETS", resets)
        state = State()
        fsdp2.after_reset(state.module, state.note)
        state._reset_iter_state()
        assert state.calls == calls


def test_functions_are_called_around_reductions_in_the_body_alone() -> None:
    group = Group()
    with fsdp2.around_reductions(group, group.note("before"), group.note("after")):
        group.post_backward()
    group.post_backward()
    assert group.calls == [("before",), ("post_backward",), ("after",), ("post_backward",)]


@pytest.mark.parametrize(
    ("whole", "root", "ahead"),
    [("own", "own", True), ("model", "own", False), ("model", "model", True)],
)
def test_a_part_of_a_model_that_is_called_by_itself_gathers_nothing_ahead(
    whole: str, root: str, ahead: bool
) -> None:
    states = {"own": State(), "model": State(), "next": State()}
    own = states["own"]
    add = fsdp2.prefetching(own.module, states[whole].module)
    assert [*own._states_to_forward_prefetch] == []
    add([states["next"].module])
    own._state_ctx.iter_forward_root = states[root]
    assert [*own._states_to_forward_prefetch] == [states["next"]] * ahead


def test_a_backward_gathers_nothing_ahead_for_as_long_unless_a_user_said_what() -> None:
    state, chosen, lasts = State(), State(), True
    chosen._states_to_backward_prefetch = ["a state"]
    for each in (state, chosen):
        fsdp2.prefetch_nothing(each.module, lambda: lasts)
    nothing = state._states_to_backward_prefetch
    assert (len(nothing), [*nothing]) == (1, [])
    lasts = False
    assert (len(nothing), [*nothing]) == (0, [])
    assert chosen._states_to_backward_prefetch == ["a state"]


def test_the_first_forward_is_told_of_once_before_modules_are_found() -> None:
    state = State()
    fsdp2.before_first_forward(state.module, state.note)
    for _ in range(2):
        state._lazy_init()
    assert state.calls == ["then", "finds modules", "finds modules"]


class Joined:
    """A module whose group is gathered with those of two others, its owners."""

    def __init__(self) -> None:
        self.group, *self.owners = Group(), Group(), Group()
        self.state = State(self.group)
        self.hooks = [mock.Mock(), mock.Mock()]
        self.state._pre_forward_hook_handle, self.state._post_forward_hook_handle = self.hooks
        self.state._modules_to_run_forward = set()
        fsdp2.gather_with(self.state.module, [State(owner).module for owner in self.owners])

    def called(self) -> list[Any]:
        """The calls of the group since this was asked last."""
        calls, self.group.calls = self.group.calls, []
        return calls


def test_a_module_that_is_gathered_with_others_gathers_nothing_when_it_is_called() -> None:
    joined = Joined()
    for hook in joined.hooks:
        hook.remove.assert_called_once_with()
    assert joined.state._pre_forward(None, (1,), {}) == ((1,), {})
    assert joined.state._post_forward(None, (), 1) == 1
    assert joined.state.calls == joined.called() == []


@pytest.mark.parametrize("name", ["lazy_init", "unshard", "wait_for_unshard", "reshard"])
def test_a_group_follows_each_of_its_owners(name: str) -> None:
    joined = Joined()
    for owner in joined.owners:
        owner._training_state = FORWARD
        getattr(owner, name)()
        assert owner.calls == [(name,)]
        assert joined.called() == [FORWARD, (name,)]
        assert joined.group.comm_ctx is owner
        owner._training_state = fsdp2.TrainingState.POST_BACKWARD
        getattr(owner, name)()
        assert joined.called() == []


def test_a_group_stays_gathered_until_the_last_owner_is_resharded() -> None:
    joined = Joined()
    first, second = joined.owners
    for name, value in (("is_unsharded", True), ("_all_gather_result", "a gather")):
        before = getattr(second, name)
        setattr(second, name, value)
        first.reshard()
        assert joined.called() == []
        assert joined.group.post_forward(None, (), 1) == 1
        first.unshard()
        assert joined.called() == [IDLE, ("unshard",)]
        setattr(second, name, before)
    first.reshard()
    assert joined.called() == [IDLE, ("reshard",)]
    assert joined.group.post_forward(None, (), 1) == 2


def test_the_first_of_the_forwards_that_run_begins_that_of_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined = Joined()
    first, second = joined.owners
    for _ in range(2):
        assert first.pre_forward(None, (1,), {}) == ((1,), {})
        assert joined.called() == [("pre_forward",)]
        assert second.pre_forward(None, (1,), {}) == ((1,), {})
        assert joined.called() == []
        for owner in joined.owners:
            joined.group._training_state = FORWARD
            assert owner.post_forward(None, (), 1) == 2
            assert joined.group._training_state == IDLE
    monkeypatch.setattr(fsdp2, "in_backward", lambda: True)
    assert first.pre_forward(None, (1,), {}) == ((1,), {})
    assert joined.called() == []


def test_a_group_is_gathered_for_the_backward_of_each_owner_and_prefetches_nothing() -> None:
    joined = Joined()
    for owner in joined.owners:
        owner.pre_backward(True)
        assert owner.calls == [("pre_backward", True)]
        assert joined.called() == [("pre_backward", False)]
