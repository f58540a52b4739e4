"""LuWu's roles as threads of one process on loopback, and single-process Adam beside them."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from baselines import optimizers
from baselines.generations import RECORD
from baselines.luwu import server, switch
from baselines.luwu.files import masters
from baselines.luwu.plan import Plan
from baselines.luwu.port import Port
from baselines.luwu.train import LuWu
from baselines.luwu.wire import SWITCH, Connection, Keys, Listener
from baselines.settings import LuWuSettings
from baselines.strategy import Job
from tests.baselines.cyclic.training import Tied, batch, loss
from tests.baselines.jobs import LEARNING_RATE, alone, job

KEYS = Keys.of("5a" * 32)
#: Smaller than a block of the model: several chunks each.
SMALL = LuWuSettings(chunk_bytes=4096)


@dataclass
class Roles:
    address: str
    running: dict[str, Future[None]]

    def ended(self) -> dict[str, BaseException]:
        """The roles' errors; waits until both have ended."""
        errors = {name: role.exception(60) for name, role in self.running.items()}
        return {name: error for name, error in errors.items() if error is not None}


@contextmanager
def roles(workers: int, folder: Path, patience_s: float = 30.0) -> Iterator[Roles]:
    to_server, to_workers = Listener(KEYS, "127.0.0.1:0"), Listener(KEYS, "127.0.0.1:0")
    connection = Connection(KEYS, to_server.address, SWITCH)
    calls = {
        "server": server.Server(to_server, folder, patience_s).serve,
        "switch": switch.Switch(to_workers, connection, workers, patience_s).serve,
    }
    with ThreadPoolExecutor(len(calls)) as pool:
        running = {name: pool.submit(call) for name, call in calls.items()}
        made = Roles(to_workers.address, running)
        try:
            yield made
        finally:
            made.ended()


def connect(address: str, plan: Plan, rank: int, land: Any, patience_s: float = 30.0) -> Port:
    return Port(plan, rank, KEYS, address, land, patience_s)


_SEEDED = threading.Lock()


def model_of(frozen: bool) -> Tied:
    """The model that all have; ``frozen``: some of its parameters."""
    with _SEEDED:  # threads share one generator
        torch.manual_seed(1)
        model = Tied()
    if frozen:
        for name, param in model.named_parameters():
            param.requires_grad_("into" in name)
    return model


def job_of(model: Tied, rank: int, workers: int, settings: LuWuSettings, dtype: torch.dtype) -> Job:
    own = {"dtype": dtype, "settings": settings, "loss": loss}
    return job(alone(workers, 1, rank), model.blocks, **own)


def trained(
    workers: int,
    steps: int,
    folder: Path,
    *,
    settings: LuWuSettings = SMALL,
    dtype: torch.dtype = torch.float32,
    frozen: bool = False,
    then: Callable[[LuWu], Any] = lambda worker: None,
) -> list[Any]:
    """Train on so many workers, on from the folder; return ``then`` of each worker at the end."""

    def work(rank: int) -> Any:
        torch.set_num_threads(1)  # sums of LayerNorm's backward depend on it
        model = model_of(frozen)
        worker_job = job_of(model, rank, workers, settings, dtype)
        worker = LuWu(model, worker_job, partial(connect, made.address))
        for _ in range(steps):
            worker.step([batch(rank, worker.steps_done)])
        outcome = then(worker)
        worker.settle()
        worker.close()
        return outcome

    with roles(workers, folder) as made, ThreadPoolExecutor(workers) as pool:
        outcomes = [*pool.map(work, range(workers))]
    assert not made.ended()
    return outcomes


def reference(
    workers: int, steps: int, *, dtype: torch.dtype = torch.float32, frozen: bool = False
) -> dict[str, torch.Tensor]:
    """Single-process Adam by the workers' gradients, summed in the order of their ranks.

    In a thread of its own, whose number of threads no other test has set.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_reference, workers, steps, dtype, frozen).result()


def _reference(
    workers: int, steps: int, dtype: torch.dtype, frozen: bool
) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    masters = model_of(frozen)
    params = [param for param in masters.parameters() if param.requires_grad]
    optimizer = optimizers.make(optimizers.AdamW(), params, LEARNING_RATE)
    for step in range(steps):
        totals: Sequence[torch.Tensor] = []
        for rank in range(workers):
            model = model_of(frozen)
            model.load_state_dict(masters.state_dict())
            model.to(dtype)
            loss(model, batch(rank, step)).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if rank:
                totals = [total + grad for total, grad in zip(totals, gradients, strict=True)]
            else:
                totals = [grad.float() for grad in gradients]
        for param, total in zip(params, totals, strict=True):
            param.grad = total.to(dtype).float() / workers
        optimizer.step()
    return {name: p.detach() for name, p in masters.named_parameters() if p.requires_grad}


def plan_of(worker: LuWu) -> Plan:
    return worker._port._plan


def check_masters(
    folder: Path,
    plan: Plan,
    workers: int,
    steps: int,
    *,
    dtype: torch.dtype = torch.float32,
    frozen: bool = False,
) -> None:
    """Compare a server's parameters with those of single-process Adam, bit for bit."""
    mine = masters(folder, plan)
    expected = reference(workers, steps, dtype=dtype, frozen=frozen)
    assert mine.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(mine[name], values), name


def step_in(folder: Path) -> int:
    """The last complete step in a server's folder, which may be in use."""
    record, _, _ = (folder / RECORD).read_text(encoding="utf-8").partition("\n")
    return int(json.loads(record)["step"])
