"""``examples/train.py`` as a user's own program, which launch scripts start on two nodes."""

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from experiments.records.provenance import ROOT
from tests.examples.test_train import make_model
from tests.experiments.waiting import wait_until
from tests.programs import written

PROGRAM = str(ROOT / "examples/train.py")


class Training:
    """A run of the program that ends only when it is told to, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        make_model(folder / "model")
        (folder / "text.txt").write_bytes(Path(argparse.__file__).read_bytes()[:20_000])
        self._folder = folder
        self.torchrun = folder / "torchrun"
        written(
            self.torchrun,
            f"export PYTHONPATH={ROOT} OMP_NUM_THREADS=1\n"
            f'exec {sys.executable} -m torch.distributed.run "$@"',
        )
        self.log = folder / "log.txt"
        self._steps = folder / "out/log.jsonl"
        #: The program and its options.
        self.words = (
            *(PROGRAM, "--model", f"{folder}/model", "--data", f"{folder}/text.txt"),
            *("--output", f"{folder}/out", "--save-every", "50", "--sequence-length", "32"),
            *("--global-batch", "6", "--steps", "1000000"),
        )

    def lines(self) -> list[dict[str, Any]]:
        text = self._steps.read_text() if self._steps.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def goes_on(self, ranks: int = 2) -> None:
        """Wait for twenty more steps of both nodes, or of one."""
        done = len(self.lines())
        wait_until(
            lambda: (
                len(more := self.lines()[done:]) > 20
                and all(line["ranks"] == ranks for line in more[-20:])
            ),
            300,
        )

    def check_that_it_goes_on(self, kind: str, ranks: int = 2) -> None:
        """Check that no more is lost than an interval and what was done before it was noticed.

        After a notice, one ``kind`` of end, nothing is.
        """
        last, begun = self.lines()[-1]["step"], time.monotonic()
        self.goes_on(ranks)
        lost = last + 1 - self.resumed()[-1]
        print(f"{kind}: twenty steps on after {time.monotonic() - begun:.1f} s, {lost} lost")
        assert lost <= (0 if kind == "notice" else 60)

    def resumed(self) -> list[int]:
        """The step from which the ranks began, each time."""
        return [*map(int, re.findall(r"from step (\d+) of", self.log.read_text()))]


def programs() -> list[psutil.Process]:
    """All ranks and agents of the program that run."""
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if PROGRAM in (each.info["cmdline"] or []) and each.status() != psutil.STATUS_ZOMBIE
    ]


def ranks() -> list[psutil.Process]:
    """The programs that an agent has started; ssh and shells have the same words."""
    running = programs()
    agents = {each.pid for each in running if "torch.distributed.run" in each.cmdline()}
    return [each for each in running if each.ppid() in agents]
