"""The tier that each policy chooses, by arithmetic alone, and how much memory is left.

Policies by name are parsed here too.
"""

import pickle
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fcdp
from fcdp.cache import memory
from fcdp.cache.memory import Usage
from fcdp.cache.named import parse
from tests.fcdp.stand_ins import Place, StandInUnit

PLACE: Any = Place(2, 0)


def place(policy: fcdp.CachePolicy, units: list[Any]) -> Any:
    return policy.place(units, PLACE)


def usage(used: int, total: int = 100) -> Usage:
    return Usage(used, used, total)


SHOWN = {
    "NoCache()": fcdp.NoCache(),
    "DeviceCache()": fcdp.DeviceCache(),
    "HostCache()": fcdp.HostCache(),
    "Threshold(tau=0.8)": fcdp.Threshold(0.8),
    "Auto(reserve=0.1, measured_gathers=4)": fcdp.Auto(),
    "Budget(device=1 GiB, disk=1536 GiB, directory='/tmp')": fcdp.Budget(
        device=2**30, disk=3 * 2**39, directory=Path("/tmp")
    ),
}


def test_policies_are_values_that_travel_and_are_shown_as_they_are_made() -> None:
    for text, policy in SHOWN.items():
        assert repr(policy) == text
        assert pickle.loads(pickle.dumps(policy)) == policy
    assert fcdp.DiskCache("/tmp") == fcdp.DiskCache(Path("/tmp"))  # type: ignore[arg-type]


def test_below_the_threshold_the_device_takes_a_unit_at_it_the_host() -> None:
    unit: Any = StandInUnit("unit", 10)
    placement = place(fcdp.Threshold(0.5), [unit])
    assert placement.preferences[unit] == ("device", "host")
    assert placement.admits(unit, usage(49))
    assert not placement.admits(unit, usage(50))


@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 2)), min_size=1, max_size=10),
    device=st.integers(0, 60),
    host=st.integers(0, 60),
    disk=st.integers(0, 60),
)
def test_a_budget_holds_and_goes_to_the_best_uses_first(
    sizes: list[tuple[int, int]], device: int, host: int, disk: int
) -> None:
    units: Any = [StandInUnit(str(i), size, reuses) for i, (size, reuses) in enumerate(sizes)]
    policy = fcdp.Budget(device=device, host=host, disk=disk, directory=Path("/tmp"))
    preferences = place(policy, units).preferences
    for tier, budget in (("device", device), ("host", host), ("disk", disk)):
        taken = [unit for unit in units if preferences[unit][:1] == (tier,)]
        assert sum(unit.shard_bytes for unit in taken) <= budget
        assert all(unit.reuses for unit in taken)
        # What is in no tier fits in none.
        left = budget - sum(unit.shard_bytes for unit in taken)
        assert all(
            unit.shard_bytes > left for unit in units if unit.reuses and not preferences[unit]
        )


def test_of_equal_units_the_last_ones_are_nearest() -> None:
    units: Any = [StandInUnit(name, 10) for name in "abcd"]
    preferences = place(fcdp.Budget(device=10, host=20), units).preferences
    assert [preferences[unit] for unit in units] == [(), ("host",), ("host",), ("device", "host")]


def test_frozen_units_come_before_trainable_ones() -> None:
    frozen, trained, gathered = (
        StandInUnit("frozen", 10, 2),
        StandInUnit("trained", 10, 1),
        StandInUnit("gathered", 10, 0),
    )
    preferences = place(fcdp.Budget(host=20), [frozen, trained, gathered]).preferences
    assert preferences[frozen] == preferences[trained] == ("host",)  # type: ignore[index]
    assert preferences[gathered] == ()  # type: ignore[index]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fcdp.Threshold(1.1), "tau = 1.1"),
        (lambda: fcdp.Threshold("0.8"), "^tau = '0.8': must be between 0 and 1"),
        (lambda: fcdp.Budget(host=-1), "host = -1"),
        (lambda: fcdp.Budget(host="16 GiB"), "^host = '16 GiB': must be bytes, a whole number"),
        (lambda: fcdp.Budget(device=1.5 * 2**30), "^device = 1610612736.0: must be bytes, a whole"),
        (lambda: fcdp.Budget(disk=1), "needs a directory"),
        (lambda: fcdp.Auto(reserve=1.0), "reserve = 1.0"),
        (lambda: fcdp.Auto(measured_gathers=-1), "^measured_gathers = -1: must be a count"),
        (lambda: fcdp.DiskCache(None), "^directory = None: must be a path"),
    ],
)
def test_bad_values_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_auto_measures_fills_the_headroom_and_backs_off() -> None:
    units: Any = [StandInUnit(name, 10) for name in "abcd"]
    placement = place(fcdp.Auto(reserve=0.1, measured_gathers=2), units)
    for _ in range(2):
        assert not any(placement.admits(unit, usage(65)) for unit in units)
    # 90 may be used, 65 were: two of ten each fit, the last of the forward pass.
    assert [placement.admits(unit, usage(65)) for unit in units] == [False, False, True, True]
    # Somebody else took memory: the unit at hand leaves, and does not come back.
    assert not placement.admits(units[3], usage(95))
    assert [placement.admits(unit, usage(65)) for unit in units] == [False, False, True, False]


TEMPORARY = Path(tempfile.gettempdir())


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("none", fcdp.NoCache()),
        ("device", fcdp.DeviceCache()),
        ("host", fcdp.HostCache()),
        ("disk", fcdp.DiskCache(TEMPORARY)),
        ("threshold(0.8)", fcdp.Threshold(0.8)),
        ("budget(device=1.5 KiB, host=2GiB)", fcdp.Budget(device=1536, host=2**31)),
        ("budget(disk=7)", fcdp.Budget(disk=7, directory=TEMPORARY)),
        ("auto", fcdp.Auto()),
    ],
)
def test_names_stand_for_policies(text: str, policy: fcdp.CachePolicy) -> None:
    assert parse(text) == policy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ram", "allowed are none, device, host"),
        ("host(1)", "takes no argument"),
        ("threshold", "takes one number"),
        ("threshold(2)", "tau = 2.0"),
        ("budget(gpu=1)", "device, host and disk"),
        ("budget(host=much)", "'much' is not a size"),
        ("budget(host=1, host=2)", "host is given twice"),
        ("threshold(0.1, 0.2)", "is given twice"),
        ("nowhere.at_all:Mine", "cannot be imported: No module named 'nowhere'"),
        ("own_policies:", "allowed are none, device, host"),
        ("own_policies:Nobody", "module 'own_policies' has no attribute 'Nobody'"),
        ("own_policies:NoPolicy", "is no class with a method place"),
        ("own_policies:called", "is no class with a method place"),
        ("own_policies:Mine(size=1, much=2)", "unexpected keyword argument 'much'"),
        ("own_policies:Mine(size=-1)", "size = -1: must be 0 or more; allowed are none, device"),
        ("own_policies:Nowhere", "has no directory, which is None without the disk tier"),
        ("broken_policies:Mine", "cannot be imported: not today"),
    ],
)
@pytest.mark.usefixtures("own")
def test_anything_else_is_refused_with_what_is_allowed(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="policy = ") as error:
        parse(text)
    assert words in str(error.value)
    assert "allowed are none, device, host" in str(error.value)
    assert "package.module:Class" in str(error.value)


OWN = """
from dataclasses import dataclass
from typing import Any, ClassVar

from fcdp.cache.policy import Fixed

@dataclass(frozen=True)
class Mine:
    size: int = 0
    name: str = ""
    share: float = 0.0
    early: bool = True
    directory: ClassVar[None] = None

    def __post_init__(self):
        if self.size < 0:
            raise ValueError(f"size = {self.size}: must be 0 or more")

    def place(self, units, topology):
        return Fixed(dict.fromkeys(units, ("host",)))

class Nowhere:
    def place(self, units, topology):
        return Fixed(dict.fromkeys(units, ()))

class NoPolicy:
    directory = None

def called(*arguments):
    raise SystemExit("a function was called")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Policies in a module outside of the tree."""
    (tmp_path / "own_policies.py").write_text(OWN)
    (tmp_path / "broken_policies.py").write_text("raise SystemExit('not today')")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_policies", None)


@pytest.mark.parametrize(
    ("arguments", "made"),
    [
        ("", (0, "", 0.0, True)),
        ("()", (0, "", 0.0, True)),
        ("(1 GiB)", (2**30, "", 0.0, True)),
        ("(size=512MB, share=0.25)", (512 * 10**6, "", 0.25, True)),
        ("(7, name=first, early=False)", (7, "first", 0.0, False)),
    ],
)
@pytest.mark.usefixtures("own")
def test_a_class_of_another_module_is_a_policy_too(arguments: str, made: tuple[Any, ...]) -> None:
    policy: Any = parse(f"own_policies:Mine{arguments}")
    assert (policy.size, policy.name, policy.share, policy.early) == made
    assert place(policy, [StandInUnit("a", 10)]).preferences


V1 = {
    "memory.limit_in_bytes": "1000\n",
    "memory.usage_in_bytes": "700\n",
    "memory.stat": "cache 300\ntotal_active_file 50\ntotal_inactive_file 150\n",
}
V2 = {
    "memory.max": "1000\n",
    "memory.current": "700\n",
    "memory.stat": "anon 300\nactive_file 50\ninactive_file 150\n",
}


def write(group: Path, files: dict[str, str]) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (group / name).write_text(text)


@pytest.mark.parametrize(
    ("line", "group", "files"),
    [
        ("4:memory:/job/step", "memory/job/step", V1),
        ("4:memory:/job/step", "memory/job", V1),  # a limit of the group around it
        ("4:cpu,memory:/elsewhere", "memory", V1),  # a container's root
        ("0::/job/step", "job/step", V2),
        ("0::/job/step", "job", V2),
        ("0::/", ".", V2),
    ],
)
def test_a_group_leaves_its_limit_less_what_it_cannot_give_up(
    tmp_path: Path, line: str, group: str, files: dict[str, str]
) -> None:
    write(tmp_path / "groups" / group, files)
    (tmp_path / "own").write_text(f"9:name=systemd:/\n{line}\n")
    assert memory._left_to_groups(tmp_path / "groups", tmp_path / "own") == [500]


def test_the_tightest_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = memory.available_host_memory()
    monkeypatch.setattr(memory, "_left_to_groups", lambda: [free // 2, free // 4])
    assert memory.available_host_memory() == free // 4


def test_no_limit_is_none(tmp_path: Path) -> None:
    write(tmp_path / "groups", V2 | {"memory.max": "max\n"})
    (tmp_path / "own").write_text("0::/\n")
    assert memory._left_to_groups(tmp_path / "groups", tmp_path / "own") == []
    assert memory._left_to_groups(tmp_path / "groups", tmp_path / "absent") == []
