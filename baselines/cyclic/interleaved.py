"""Cyclic Data Parallelism on one device: micro-batches two slots apart, taking turns.

A step's N micro-batches, those between two optimizer steps, are the cycle's. As one is in its
forward the next ones follow and the ones before are in backward, so that activations of
N (N + 1) / 2 stages of a micro-batch are there in every slot, where N micro-batches at once have N²
of them. Steps overlap: when ``step`` returns, some of its micro-batches are under way, and end in
the next one, or in ``settle``.

Forward runs in a thread per micro-batch, of which one runs at a time; backward goes stage by stage.
Where there are several ranks, each does this, and they add up a stage's gradients when it is
updated: one stage at a time too.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.graph import saved_tensors_hooks

from baselines.cyclic.routes import Cycle
from baselines.cyclic.stages import Segments, Staged, chosen_runs, parameters
from baselines.part import restored, views
from baselines.settings import CyclicSettings
from baselines.strategy import Job, crossing_bytes, make_optimizer, trained_numel


class _Closed(BaseException):
    """Ends a paused call that is given up."""


class Lane:
    """A call in a thread of its own, which runs while ``resume`` waits for it and no longer.

    A thread because a model's forward is an ordinary function, which cannot yield.
    """

    def __init__(self, function: Callable[[], torch.Tensor]) -> None:
        self._function = function
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        # A daemon: a paused call must not hold up the end of the program.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._closed = False
        self._ended: Future[torch.Tensor] = Future()
        self._thread.start()

    def resume(self) -> torch.Tensor | None:
        """Run until the function pauses (``None``) or ends (its result, or the error it raised)."""
        self._go.release()
        self._back.acquire()
        if not self._ended.done():
            return None
        self._thread.join()
        return self._ended.result()

    def pause(self) -> None:
        """Called within the function: return from ``resume``, and wait for the next one."""
        self._back.release()
        self._go.acquire()
        if self._closed:
            raise _Closed

    def close(self) -> None:
        """Give the function up, wherever it is."""
        self._closed = True
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._closed:
                self._ended.set_result(self._function())
        except _Closed:
            pass  # a future that kept it would keep the forward's activations
        except BaseException as error:
            self._ended.set_exception(error)
        self._back.release()


class SavedBytes:
    """Memory that graphs hold, each piece counted once however many operations keep it."""

    def __init__(self, others: Iterable[torch.Tensor]) -> None:
        """``others``: what is there anyway, parameters and buffers, which are not counted."""
        self._others = {tensor.untyped_storage().data_ptr() for tensor in others}
        self._uses: Counter[int] = Counter()
        self.now = 0
        self.peak = 0

    def counted(self) -> saved_tensors_hooks:
        """A context in which tensors that operations save are counted until they are freed."""
        return saved_tensors_hooks(lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor)

    def use(self, tensor: torch.Tensor, more: int) -> None:
        """Count one more use of a tensor's memory, or one less."""
        storage = tensor.untyped_storage()
        where = storage.data_ptr()
        if where in self._others:
            return
        before = self._uses[where]
        self._uses[where] += more
        if not before:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        elif not self._uses[where]:
            del self._uses[where]
            self.now -= storage.nbytes()


class _Saved:
    """A tensor that a graph has saved, which is counted as long as the graph lives."""

    def __init__(self, tensor: torch.Tensor, counts: SavedBytes) -> None:
        self.tensor = tensor
        self._counts = counts
        counts.use(tensor, 1)

    def __del__(self) -> None:
        self._counts.use(self.tensor, -1)


class Editions:
    """Versions of one stage's trained parameters, by number, and their optimizer.

    A version may be written while graphs of the one before are alive: each has tensors of its own.
    Two are enough: when a stage is updated, nothing needs the version before the one that it has.
    """

    def __init__(self, model: nn.Module, params: Sequence[nn.Parameter], job: Job) -> None:
        self._params = (list(params), [nn.Parameter(param.detach().clone()) for param in params])
        number = {id(param): index for index, param in enumerate(params)}
        self._places = [
            (module, name, number[id(param)])
            for module in model.modules()
            for name, param in module._parameters.items()
            if id(param) in number
        ]
        self._optimizer = make_optimizer([*self._params[0], *self._params[1]], job)
        # A parameter has one state, whichever tensor it is in.
        for pair in zip(*self._params, strict=True):
            state: dict[str, torch.Tensor] = {}
            for param in pair:
                self._optimizer.state[param] = state

    def of(self, version: int) -> list[nn.Parameter]:
        """The parameters of a version: the newest, or the one before."""
        return self._params[version % 2]

    def values(self, version: int) -> list[torch.Tensor]:
        return [param.detach() for param in self.of(version)]

    def install(self, version: int) -> None:
        """Point the model's parameters at this version."""
        params = self.of(version)
        for module, name, index in self._places:
            module._parameters[name] = params[index]

    @torch.no_grad()
    def update(self, version: int, gradients: Sequence[torch.Tensor]) -> None:
        """Make the version after this one, by an optimizer step."""
        torch._foreach_copy_(self.values(version + 1), self.values(version))
        for param, grad in zip(self.of(version + 1), gradients, strict=True):
            param.grad = grad
        self._optimizer.step()
        self._optimizer.zero_grad()


@dataclass(eq=False)
class _Flight:
    """A micro-batch on its way through the stages."""

    number: int
    step: int
    #: The slot in which it began.
    begin: int
    lane: Lane
    segments: Segments = field(default_factory=Segments)
    #: Bytes that its forward has left for its backward.
    saved: int = 0


class Interleaved(Staged):
    """All micro-batches of a cycle, on this rank."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        """Cut the model into as many stages as a step has micro-batches, unless fewer are chosen.

        Raises ``ValueError`` for more stages than blocks or micro-batches.
        """
        settings = job.settings
        assert isinstance(settings, CyclicSettings)
        called = "micro-batches per step (accumulation)"
        runs = chosen_runs(settings.stages, job.blocks, job.accumulation, called)
        super().__init__(model, job, 2 * crossing_bytes(trained_numel(model), job, 4), runs)
        model.to(job.topology.mesh.device_type)
        self._cycle = Cycle(settings.rule, job.accumulation, len(runs), twice=False)
        of_stages = parameters(model, job.blocks, runs)
        self._stages = [Editions(model, params, job) for params in of_stages]
        self._micro_batches = job.accumulation
        #: Slots and steps that have begun.
        self._slot = 0
        self._steps = 0
        self._flights: list[_Flight] = []
        #: The micro-batch whose forward is running.
        self._running: _Flight | None = None
        #: Gradients so far, by step and stage.
        self._sums: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._losses: list[torch.Tensor] = []
        params = chain(*(stage.of(version) for stage in self._stages for version in (0, 1)))
        self._saved = SavedBytes([*params, *model.parameters(), *model.buffers()])
        #: Most bytes that graphs held in each slot of the last step, and those that they would hold
        #: with all micro-batches at once.
        self._peaks: list[float] = []
        self._together = 0

    def step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Begin a micro-batch every other slot.

        Returns the mean loss of the micro-batches whose forward has ended since the last call.
        """
        self._peaks = []
        try:
            for number, batch in enumerate(micro_batches):
                self._flights.append(self._begun(number, batch))
                for _ in range(2):
                    self._run_slot()
                    self._peaks.append(self._saved.peak)
        except BaseException:
            for flight in self._flights:
                flight.lane.close()
            raise
        self._steps += 1
        losses, self._losses = torch.stack(self._losses), []
        return losses.mean()

    def _begun(self, number: int, batch: torch.Tensor) -> _Flight:
        def forward() -> torch.Tensor:
            with self.casting(), self._saved.counted():
                return self.job.loss(self.model, batch)

        return _Flight(number, self._steps, self._slot, Lane(forward))

    def _run_slot(self) -> None:
        """Take each micro-batch through one stage; forwards first, as if all ran at once."""
        self._saved.peak = self._saved.now
        stages = len(self._stages)
        for flight in self._flights:
            phase = self._slot - flight.begin
            if phase < stages:
                with self._timed("forward"):
                    self._forward(flight)
        for flight in self._flights:
            phase = self._slot - flight.begin
            if phase >= stages:
                self._backward(flight, 2 * stages - 1 - phase)
        self._slot += 1
        self._flights = [f for f in self._flights if self._slot - f.begin < 2 * stages]

    def _forward(self, flight: _Flight) -> None:
        for index, stage in enumerate(self._stages):
            stage.install(self._version(flight.number, flight.step, index))
        before = self._saved.now
        self._running = flight
        loss = flight.lane.resume()
        self._running = None
        flight.saved += self._saved.now - before
        if loss is not None:
            flight.segments.loss = loss / self._micro_batches
            self._losses.append(loss.detach())
            self._together = flight.saved * self._micro_batches

    def _next_stage(self, index: int, inputs: Any) -> Any:
        """Pause a forward before a stage's first block, for the others to go one stage on."""
        flight = self._running
        if flight is None:  # an evaluation
            return inputs
        flight.lane.pause()
        return flight.segments.cut(index, inputs)

    def _backward(self, flight: _Flight, stage: int) -> None:
        with self._timed("backward"):
            flight.segments.backward(stage)
            self._collect(flight, stage)
        if flight.number == self._micro_batches - 1:
            with self._timed("optimizer"):
                self._update(flight.step, stage)

    def _version(self, number: int, step: int, stage: int) -> int:
        return step - self._cycle.lag(number, stage)

    def _collect(self, flight: _Flight, stage: int) -> None:
        """Take the gradients of a stage's backward, lest another micro-batch add to them.

        Earlier stages may have some too, of parameters that they share with this one.
        """
        for index in range(stage + 1):
            params = self._stages[index].of(self._version(flight.number, flight.step, index))
            key = (flight.step, index)
            if key not in self._sums:
                self._sums[key] = [torch.zeros_like(param) for param in params]
            for total, param in zip(self._sums[key], params, strict=True):
                if param.grad is not None:
                    total += param.grad
                    param.grad = None

    def _update(self, step: int, stage: int) -> None:
        """Update a stage by the gradients of all its micro-batches, on all ranks."""
        gradients = self._sums.pop((step, stage))
        ranks = self.job.topology.world_size
        if ranks > 1 and gradients:
            flat = torch.cat([grad.flatten() for grad in gradients])
            dist.all_reduce(flat)
            gradients = views(flat.div_(ranks), gradients)
        self._stages[stage].update(step, gradients)

    def settle(self) -> None:
        """Wait until all micro-batches that are under way have ended."""
        while self._flights:
            self._run_slot()

    def take_metrics(self) -> Mapping[str, float | list[float]]:
        """Bytes of activations: in each slot of the last step, and of all micro-batches at once."""
        if not self._peaks:
            return {}
        return {
            "activation_bytes_by_slot": self._peaks,
            "activation_bytes_together": self._together,
        }

    def evaluate(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss with the mean of the parameters that micro-batches have next."""
        self.settle()  # which needs gradients
        newest = [stage.values(self._steps) for stage in self._stages]
        with restored([*chain(*newest)]):
            for index, stage in enumerate(self._stages):
                before, stale = stage.values(self._steps - 1), self._cycle.stale(index)
                torch._foreach_lerp_(newest[index], before, stale)
                stage.install(self._steps)
            return super().evaluate(batch)
