"""How much memory is left, in control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from fcdp.cache import memory

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
