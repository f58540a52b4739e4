"""The server's files: what is refused, and what a failed write leaves."""

import errno
from pathlib import Path

import pytest
import torch

from baselines.luwu.files import Files, masters
from baselines.luwu.plan import Plan
from baselines.luwu.wire import Lost
from tests.baselines.luwu.training import SMALL, check_masters, plan_of, step_in, trained


def _plan(folder: Path, steps: int = 1) -> Plan:
    return trained(1, steps, folder, then=plan_of)[0]


def test_files_of_other_layers_are_refused(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    with pytest.raises(ValueError, match=r"about = '\w{8}': must be '\w{8}', that of this model"):
        Files(tmp_path, plan.model_copy(update={"chunk_bytes": 8192}))
    with pytest.raises(ValueError, match="has no complete step"):
        masters(tmp_path / "empty", plan)


@pytest.mark.parametrize("pipeline", ["step", "layer"])
def test_a_full_disk_ends_the_run_and_leaves_the_last_step(
    pipeline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _plan(tmp_path, 2)
    write, left = Files._write, [5]

    def full(self: Files, offset: int, memory: torch.Tensor) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, offset, memory)

    monkeypatch.setattr(Files, "_write", full)
    settings = SMALL.model_copy(update={"pipeline": pipeline})
    with pytest.raises(Lost, match="No space left on device"):
        trained(1, 3, tmp_path, settings=settings)
    monkeypatch.undo()
    assert step_in(tmp_path) == 2
    trained(1, 1, tmp_path)
    check_masters(tmp_path, plan, 1, 3)
