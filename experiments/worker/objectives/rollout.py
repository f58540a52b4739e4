"""Answers to prompts, and how likely they were: drawn by the trainer, or by a rollout.

A rollout is a process on a machine of its own, which generates for all ranks. It has a plain model,
and follows over the link what the ranks publish, which the first rank's node serves. Each rank
sends its prompts, and gets answers with their log-probabilities.
"""

import os
import tempfile
import time
from collections import deque
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from multiprocessing.connection import Client, Connection, Listener
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

import fcdp
from experiments.records.cell import Cell
from experiments.records.objective import GRPO
from experiments.worker import models
from experiments.worker.objectives.objective import log_probabilities

#: Seconds that the rollout has to be there.
_PATIENCE_S = 300.0
#: Seconds in which a rank that has ended has closed its connection.
_GRACE_S = 10.0


class Answers(NamedTuple):
    """Answers to prompts, and the version of the parameters that generated them."""

    version: int
    #: Prompts with their answers, and log-probabilities of the answers' tokens.
    tokens: torch.Tensor
    old: torch.Tensor


class Sampler:
    """One rank's random numbers, which draw its answers wherever they are generated."""

    def __init__(self, cell: Cell, rank: int) -> None:
        spec = cell.objective
        assert isinstance(spec, GRPO)
        self._spec = spec
        self._prompt = cell.sequence_length + 1 - spec.new_tokens
        self._micro_batch = cell.micro_batch
        self._seed = cell.seed * 100_003 + rank
        self._generator: torch.Generator | None = None

    def generate(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Prompts with answers of equal length, so that no rank waits for another's."""
        if self._generator is None:
            self._generator = torch.Generator(tokens.device).manual_seed(self._seed)
        inputs, past = tokens, None
        for _ in range(self._spec.new_tokens):
            outputs: Any = model(input_ids=inputs, past_key_values=past, use_cache=True)
            past = outputs.past_key_values
            if past is None:
                raise ValueError(
                    "objective = grpo: the model keeps no keys and values of earlier tokens "
                    "(past_key_values), without which nothing is generated"
                )
            chances = (outputs.logits[:, -1].float() / self._spec.temperature).softmax(-1)
            inputs = torch.multinomial(chances, 1, generator=self._generator)
            tokens = torch.cat([tokens, inputs], dim=1)
        return tokens

    def scores(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probability of each token of the answers, a micro-batch at a time."""
        parts = [log_probabilities(model, part) for part in tokens.split(self._micro_batch)]
        return torch.cat(parts)[:, self._prompt - 1 :]


class Rollout:
    """A rank's side of the process that generates for it."""

    def __init__(self, cell: Cell, rank: int) -> None:
        """Raises ``ConnectionError`` or ``TimeoutError`` where no rollout comes."""
        assert isinstance(cell.objective, GRPO)
        #: Number of versions by which answers are behind the trained model.
        self._behind = int(cell.objective.rollout == "behind")
        #: Versions at which answers were requested that have not been received yet.
        self._asked: deque[int] = deque()
        #: Whether this rank tells the rollout of each version: rank 0 does.
        self._follows = rank == 0
        place: list[Any] = [_serve() if rank == 0 else None]
        dist.broadcast_object_list(place)
        self._place, url = place[0]
        self._version = 0
        self._connection = _connect()
        self._connection.send((rank, cell.model_dump_json(), url))

    def publish(self, model: nn.Module) -> fcdp.Publication:
        """Publish changes; returns once the rollout has them, if it is not behind. Collective."""
        published = fcdp.publish(model, self._place, compressed=True)
        self._version = published.version
        if self._follows:
            self._connection.send(self._version)
            if not self._behind:
                self._take()
        return published

    def answers(self, prompts: torch.Tensor) -> Answers:
        """Answers of this version; of the one before where they are behind, but for the first."""
        while len(self._asked) <= self._behind:
            self._connection.send(prompts.numpy(force=True))
            self._asked.append(self._version)
        self._asked.popleft()
        while not isinstance(message := self._take(), tuple):
            pass  # that it follows
        version, *parts = message
        return Answers(version, *(torch.from_numpy(part).to(prompts.device) for part in parts))

    def _take(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError as error:  # its own error says why
            raise ConnectionError("the rollout has ended, with answers to be given") from error


def _serve() -> tuple[str, str]:
    """A folder for publications, and the address at which this node's link has it."""
    folder = tempfile.mkdtemp()
    handler = partial(_Handler, directory=folder)
    server = _Server((os.environ["MASTER_ADDR"], 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    host, port = server.server_address[:2]
    return folder, f"http://{host!s}:{port}"


class _Server(ThreadingHTTPServer):
    #: Files of a publication that a reader asks for at once, however slow the link.
    request_queue_size = 128


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log no requests."""


def _address() -> tuple[str, int]:
    host, _, port = os.environ["FCDP_ROLLOUT"].rpartition(":")
    return host, int(port)


def _connect() -> Connection:
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return Client(_address(), authkey=bytes.fromhex(os.environ["FCDP_RUN_SECRET"]))
        except (ConnectionError, TimeoutError):  # not there yet, or too many at once
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def main() -> None:
    """Answer the ranks, in their order, until they end."""
    secret = bytes.fromhex(os.environ["FCDP_RUN_SECRET"])
    ranks: dict[int, Connection] = {}
    with Listener(_address(), backlog=128, authkey=secret) as listener:
        while len(ranks) < int(os.environ["WORLD_SIZE"]):
            connection = listener.accept()
            rank, cell_json, url = connection.recv()
            ranks[rank] = connection
    cell = Cell.model_validate_json(cell_json)
    generation = _Generation(cell, url)
    samplers = {rank: Sampler(cell, rank) for rank in sorted(ranks)}
    try:
        while True:
            for rank, sampler in samplers.items():
                while isinstance(asked := ranks[rank].recv(), int):
                    ranks[rank].send(generation.follow(asked))
                ranks[rank].send(generation.answer(sampler, asked))
    except Exception:  # of a connection, or of a file's reader: each library has its own
        # Where ranks have ended, it cut off what was on its way; where they wait, it is an error.
        if not _has_ended(ranks[0]):
            raise


def _has_ended(connection: Connection) -> bool:
    """Whether a rank has closed its end."""
    try:
        while connection.poll(_GRACE_S):
            connection.recv()
    except (EOFError, OSError):
        return True
    return False


class _Generation:
    """The plain model, of the version that it follows."""

    def __init__(self, cell: Cell, url: str) -> None:
        self._model, _ = models.build(cell)
        self._model.eval()
        self._reader = fcdp.Subscriber(url)

    def follow(self, version: int) -> int:
        """Load this version, or a later one; returns which."""
        first = self._reader.version is None
        held = self._reader.update()
        assert held is not None
        assert held >= version, "it is published"
        if first:
            # Shared, in the published dtype: later updates write to these tensors.
            for name, each in chain(self._model.named_parameters(), self._model.named_buffers()):
                if name in self._reader.state:
                    each.data = self._reader.state[name]
        return held

    @torch.no_grad()
    def answer(self, sampler: Sampler, prompts: np.ndarray[Any, Any]) -> tuple[Any, ...]:
        tokens = sampler.generate(self._model, torch.from_numpy(prompts))
        old = sampler.scores(self._model, tokens)
        return self._reader.version, tokens.numpy(), old.numpy()
