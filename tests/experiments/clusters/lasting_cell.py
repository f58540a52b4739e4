"""A cell that saves on a schedule, which launch scripts start on two nodes; and what ends it."""

import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from experiments.clusters.emulated import Network
from experiments.records.record import Measurement
from experiments.records.record import read as read_records
from experiments.worker import PROGRESS
from tests.experiments.clusters.two_nodes import programs_of_ranks
from tests.experiments.stand_in import matrix_file
from tests.experiments.waiting import wait_until, wait_until_ended

EVERY = 20
#: Seconds beside the steps of an interval, at most.
_AT_MOST_S = 120


class LastingCell:
    """A matrix of one cell, in a folder that both nodes see."""

    def __init__(self, folder: Path, network: Network, ends: int) -> None:
        self._network = network
        self._folder = folder / "run"
        folder.mkdir()
        matrix = matrix_file(
            folder,
            # Enough for two intervals before each end.
            steps=2 * EVERY * (ends + 1),
            strategies="fcdp",
            links="unshaped",
            timeout_s=3000,
        )
        #: The words after ``python -m experiments``.
        self.command = (
            f"run {matrix} --set checkpoint_every={EVERY} --no-wandb --resume "
            f"--output {self._folder}"
        )
        #: Variables of the launch scripts.
        self.variables = {
            "FCDP_RANKS_PER_NODE": "1",
            "VENV": str(Path(sys.executable).parent.parent),
        }

    def lines(self) -> list[dict[str, Any]]:
        """The steps that rank 0 has reported since the command was given last."""
        texts = [file.read_text() for file in self._folder.glob(f"cells/*/{PROGRESS}")]
        return [
            json.loads(line) for line in "".join(texts).splitlines(keepends=True) if "\n" in line
        ]

    def wait_for(self, step: int) -> None:
        wait_until(lambda: bool((done := self.lines()) and done[-1]["step"] >= step), 300)

    def check_ends(self, kinds: list[str], acts: Mapping[str, Callable[[], object]]) -> None:
        """End it in each of the ways, and check what that costs."""
        draw = random.Random(0)
        for kind in kinds:
            self.wait_for(
                (self.lines() or [{"step": 0}])[-1]["step"] + draw.randrange(1, 2 * EVERY)
            )
            ranks, begun = self.ranks(), time.monotonic()
            acts[kind]()
            wait_until_ended([rank.pid for rank in ranks])
            ended, done = time.time(), self.lines()[-1]["step"]
            wait_until(lambda ended=ended: self._since(ended) is not None, 2 * _AT_MOST_S)
            seconds, lost = time.monotonic() - begun, done + 1 - (self._since(ended) or 0)
            print(f"{kind}: goes on after {seconds:.1f} s, {lost} steps lost of {done}", flush=True)
            assert seconds <= _AT_MOST_S
            assert 0 <= lost <= EVERY

    def _since(self, moment: float) -> int | None:
        """The first step that ended later than ``moment``."""
        return next((line["step"] for line in self.lines() if line["at"] > moment), None)

    def ranks(self, node: int | None = None) -> list[psutil.Process]:
        """The processes that train, which agents fork: all, or those of one node."""
        processes = [psutil.Process(pid) for pid in programs_of_ranks(self._network, node)]
        return [
            each
            for each in processes
            for parent in processes
            if each.ppid() == parent.pid and each.cmdline() == parent.cmdline()
        ]

    def lose(self, node: int) -> None:
        """Kill all that runs there for the cell."""
        for pid in programs_of_ranks(self._network, node):
            psutil.Process(pid).kill()

    def runner(self) -> psutil.Process:
        words = self.command.split()
        (process,) = [
            each
            for each in psutil.process_iter(["cmdline"])
            if (each.info["cmdline"] or [])[1:3] == ["-m", "experiments"]
            and each.info["cmdline"][3 : 3 + len(words)] == words
        ]
        return process

    def measured(self) -> Measurement:
        """The measurement of its record, once it has ended and none of it runs any more."""
        (record,) = read_records(self._folder / "records.jsonl")
        assert record.measurement is not None, record.error
        assert programs_of_ranks(self._network) == []
        return record.measurement
