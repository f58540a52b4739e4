"""Check by training whether the FSDP2 of this torch does what FCDP expects of it.

    python -m fcdp.check

:mod:`fcdp.fsdp2` relies on private names of FSDP2, and a name that is still there may have another
meaning. Two processes, which stand for two nodes, train a model of a few kilobytes by FCDP, and the
same model whole; the two are compared. One line says what does not hold, and the exit status is 1.
"""

import contextlib
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method

import fcdp
from fcdp.engine import engine_of
from fcdp.failure import RankFailed

#: Seconds after which nodes that have not ended are killed.
TIME_LIMIT_S = 150
_WIDTH = 8
_ALL = "FSDP2 does what FCDP expects"


class _Expected(Exception):
    """The error that a forward is told to raise."""


class _Block(nn.Module):
    """A frozen matrix, a trained one, and a factor that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(_WIDTH, _WIDTH).requires_grad_(False)
        self.trained = nn.Linear(_WIDTH, _WIDTH)
        self.factor = nn.Parameter(torch.full((_WIDTH,), 2.0))

    def forward(self, x: torch.Tensor, scaled: bool = True) -> torch.Tensor:
        y: torch.Tensor = self.trained(self.frozen(x).tanh())
        return y * self.factor if scaled else y

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x: torch.Tensor, scaled: bool = True, fails: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scaled)
            if fails:
                raise _Expected
        return x


class _Pair:
    """A model sharded by FCDP, and the same model whole, which trains on all ranks' batches."""

    def __init__(self, topology: fcdp.Topology, **options: Any) -> None:
        self.topology = topology
        self.sharded, self.whole = fcdp.shard(_Net(), topology, **options), _Net()
        self.models = (self.sharded, self.whole)
        trained = ([p for p in model.parameters() if p.requires_grad] for model in self.models)
        self._optimizers = [torch.optim.SGD(params, lr=0.1) for params in trained]

    def batch(self, rank: int) -> torch.Tensor:
        return torch.linspace(-1, 1, 2 * _WIDTH).view(2, _WIDTH) * (1 + rank)

    def step(self, *scaled: bool) -> None:
        """Train one step; each flag is a micro-batch, and says whether it uses the factors."""
        for place, each in enumerate(scaled, 1):
            with fcdp.accumulate(self.sharded, last=place == len(scaled)):
                self.sharded(self.batch(self.topology.rank), each).sum().backward()
            for rank in range(self.topology.world_size):
                (self.whole(self.batch(rank), each).sum() / self.topology.world_size).backward()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def compare(self) -> None:
        """Raise ``AssertionError`` where the parameters of the two differ."""
        whole = dict(self.whole.named_parameters())
        for name, param in self.sharded.named_parameters():
            sharded: Any = param
            torch.testing.assert_close(sharded.full_tensor(), whole[name], msg=f"{name} differs")


def _a_gradient_in_early_micro_batches_only(pair: _Pair) -> None:
    for _ in range(3):
        pair.step(True, False)
    pair.compare()


def _an_error_inside_of_an_accumulation(pair: _Pair) -> None:
    pair.step(True, True)
    for last in (False, True):
        with contextlib.suppress(_Expected), fcdp.accumulate(pair.sharded, last=last):
            pair.sharded(pair.batch(pair.topology.rank), fails=last).sum().backward()
    pair.step(True, True)
    if reset := getattr(pair.sharded, "reset_iter_state", None):
        with contextlib.suppress(_Expected):
            pair.sharded(pair.batch(0), fails=True)
        reset()
        pair.step(True, True)
    pair.compare()


def _bytes_of_frozen_parameters(pair: _Pair) -> None:
    pair.step(True)
    ledger, units = fcdp.ledger(pair.sharded), engine_of(pair.sharded).units
    ledger.reset()
    pair.step(True)
    sent = ledger.total("inter_node")
    trained = sum(unit.shard_bytes for unit in units if unit.trainable)
    # Once in forward, once as gradients.
    expected = 2 * (pair.topology.nodes - 1) * trained
    assert sent == expected, f"{sent} bytes crossed nodes in a step, not {expected}"


def _parameters_that_are_loaded_and_replaced(pair: _Pair) -> None:
    pair.step(True)
    for model in pair.models:
        model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    pair.step(True)
    for model in pair.models:
        model.to(torch.bfloat16).to(torch.float32)
    pair.step(True)
    pair.compare()


def _a_block_that_is_called_by_itself(pair: _Pair) -> None:
    blocks: list[Any] = [model.blocks[1] for model in pair.models]  # type: ignore[index]
    register_fsdp_forward_method(blocks[0], "scale")
    for _ in range(2):
        pair.step(True)
        for method in ("__call__", "scale"):
            with torch.no_grad():
                mine, expected = (getattr(block, method)(pair.batch(0)) for block in blocks)
            torch.testing.assert_close(mine, expected)


def _the_dtype_of_reductions(pair: _Pair) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    pair = _Pair(pair.topology, mp_policy=policy)
    pair.step(True)
    units = engine_of(pair.sharded).units
    expected = {str(unit.reduce_dtype).removeprefix("torch.") for unit in units if unit.trainable}
    actual = fcdp.ledger(pair.sharded).reduce_dtypes
    assert actual == expected, f"reduce_dtype=None reduces in {actual}, not in {expected}"


CHECKS = (
    _a_gradient_in_early_micro_batches_only,
    _an_error_inside_of_an_accumulation,
    _bytes_of_frozen_parameters,
    _parameters_that_are_loaded_and_replaced,
    _a_block_that_is_called_by_itself,
    _the_dtype_of_reductions,
)


def problem(topology: fcdp.Topology) -> str | None:
    """Return a line that says what does not hold, or ``None``. Collective, on several nodes."""
    for check in CHECKS:
        try:
            check(_Pair(topology))
        except RankFailed:  # no matter of FSDP2's
            raise
        except Exception as error:
            what = check.__name__.strip("_").replace("_", " ")
            return f"{what}: " + " ".join(f"{type(error).__name__}: {error}".split())
    return None


def _run(rank: int, folder: str) -> None:
    """Run as one of two nodes; the first writes the line that the parent prints."""
    os.dup2(os.open(os.path.join(folder, f"log {rank}"), os.O_CREAT | os.O_WRONLY), 2)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))  # loopback
    store = os.path.join(folder, "store")
    dist.init_process_group(
        "gloo", f"file://{store}", timedelta(seconds=60), world_size=2, rank=rank
    )
    line = problem(fcdp.Topology.build(2, 1, "cpu")) or _ALL
    if rank == 0:
        with open(os.path.join(folder, "line"), "w", encoding="utf-8") as file:
            file.write(line)
    os._exit(line != _ALL)  # without waiting for a rank that has failed


def _read(folder: str, name: str) -> str:
    """The last line of a file, or nothing."""
    with contextlib.suppress(OSError), open(os.path.join(folder, name), encoding="utf-8") as file:
        return file.read().rstrip().rpartition("\n")[2]
    return ""


def main() -> int:
    """Run both nodes and print the line; return the exit status."""
    context = multiprocessing.get_context("fork")  # torch is imported once
    with tempfile.TemporaryDirectory() as folder:
        nodes = [context.Process(target=_run, args=(rank, folder)) for rank in range(2)]
        for node in nodes:
            node.start()
        until = time.monotonic() + TIME_LIMIT_S
        for node in nodes:
            node.join(max(0.0, until - time.monotonic()))
        codes = [node.exitcode for node in nodes]
        for node in nodes:
            node.kill()
            node.join()
        line = _read(folder, "line") or "; ".join(
            f"could not run: node {rank} ended with {code} {_read(folder, f'log {rank}')}".rstrip()
            for rank, code in enumerate(codes)
        )
    print(f"torch {torch.__version__}: {line}")
    return int(line != _ALL)


if __name__ == "__main__":
    sys.exit(main())
