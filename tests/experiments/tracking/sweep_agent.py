"""W&B's own agent, with a file in the place of W&B's server: ``python -m … SWEEP.yaml EVERY``.

Of the sweep's grid every ``EVERY``-th point is asked for. The cells run on the stand-in cluster.
"""

import itertools
import sys
from collections.abc import Iterator
from multiprocessing import Queue
from pathlib import Path
from typing import Any

import wandb
import yaml
from wandb import wandb_agent
from wandb.apis.public import sweeps


def main(file: Path, every: int) -> None:
    text = file.read_text(encoding="utf-8").replace("- experiments\n", f"- {STAND_IN}\n")
    definition = yaml.safe_load(text)
    commands = _commands(definition, every)

    def heartbeat(*_: Any) -> list[dict[str, Any]]:
        return next(commands)

    server: Any = sweeps
    server._sweep_with_runs = lambda *_: {"config": text}
    server._register_agent = lambda *_, **__: {"id": "an-agent"}
    server._agent_heartbeat = heartbeat
    wandb.Api = lambda *_, **__: None  # type: ignore[assignment, misc]
    wandb_agent.Agent.POLL_INTERVAL = 0.1  # type: ignore[assignment]
    wandb_agent.Agent(None, Queue(), sweep_id="a-sweep").run()  # type: ignore[no-untyped-call]


#: What the sweep's command calls in the place of ``experiments``.
STAND_IN = "tests.experiments.stand_in"


def _commands(definition: dict[str, Any], every: int) -> Iterator[list[dict[str, Any]]]:
    """What the server of a grid answers to one heartbeat after another."""
    values = {name: given["values"] for name, given in definition["parameters"].items()}
    grid = list(itertools.product(*values.values()))[::every]
    for number, point in enumerate(grid):
        arguments = {
            name: {"value": value, "desc": None} for name, value in zip(values, point, strict=True)
        }
        yield [{"type": "run", "run_id": f"run{number}", "args": arguments, "program": None}]
        # One at a time, as an agent has them: nothing more until it has ended.
        while not _complete(f"run{number}"):
            yield []
    yield [{"type": "exit"}]


def _complete(run: str) -> bool:
    return any(Path("runs").glob(f"*/wandb/offline-run-*-{run}/complete"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
