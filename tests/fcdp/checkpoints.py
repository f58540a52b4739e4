"""A training run that tests of checkpoints save and resume."""

import os
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

import fcdp
from fcdp.checkpoint import files
from tests.fcdp import training
from tests.fcdp.training import Settings, params_of

PLAIN = Settings(2, 1)


class Run(training.Run):
    def __init__(self, settings: Settings = PLAIN, seed: int = 0) -> None:
        """With other parameters than those of seed 0, if one is given."""
        super().__init__(settings)
        if seed:
            torch.manual_seed(seed)
            with torch.no_grad():
                for param in self.model.parameters():
                    param.to_local().normal_()  # type: ignore[attr-defined]
        self.position = 0

    def train(self, steps: int) -> list[float]:
        self.position += steps
        return [self.step() for _ in range(steps)]

    def save(self, directory: Path, **options: Any) -> Any:
        extra = {"position": self.position}
        return fcdp.save(self.model, self.optimizer, directory, extra=extra, **options)

    def load(self, directory: Path) -> None:
        extra = fcdp.load(self.model, self.optimizer, directory)
        while self.position < extra["position"]:
            next(self.data)
            self.position += 1

    def params(self) -> dict[str, torch.Tensor]:
        return {name: param.clone() for name, param in params_of(self.model).items()}


def trained(directory: Path) -> Run:
    """A run and its checkpoint, of some length before the run went on."""
    run = Run()
    run.train(1)
    run.save(directory)
    run.train(1)
    return run


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def contents(run: Run) -> dict[str, torch.Tensor]:
    """Copies of all values of model and optimizer."""
    moments = {
        f"{name}.{key}": value.full_tensor() if key != "step" else value.clone()
        for name, param in run.model.named_parameters()
        for key, value in run.optimizer.state[param].items()
    }
    return {**run.params(), **moments}


def errors_of(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises((ValueError, RuntimeError)) as error:
        call(*args, **options)
    return f"{type(error.value).__name__}: {error.value}"


#: Events that the interpreter announces before it changes files.
_CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


def on_each_change(
    directory: Path, call: Callable[[], object], events: Collection[str] = _CHANGES
) -> None:
    """Call ``call`` before each step of this rank that changes files in ``directory``.

    For the rest of the process, as far as the interpreter's own events are concerned.
    """

    def follow(event: str, args: tuple[Any, ...]) -> None:
        if event in events and str(directory) in str(args[0]):
            call()

    sys.addaudithook(follow)
    write = files._SummedFile.write

    def write_half(self: files._SummedFile, data: Any) -> int:
        call()
        half = len(data) // 2
        write(self, data[:half])
        self.flush()  # to disk, where a killed process leaves it
        call()
        return half + write(self, data[half:])

    files._SummedFile.write = write_half  # type: ignore[method-assign]


def kill_at(directory: Path, number: int, events: Collection[str] = _CHANGES) -> None:
    """Have this rank kill itself before its change of that number."""
    changes: list[None] = []

    def kill() -> None:
        changes.append(None)
        if len(changes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    on_each_change(directory, kill, events)
