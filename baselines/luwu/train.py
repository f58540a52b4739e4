"""A worker: it pulls each layer when a forward or backward comes to it, and pushes its gradients.

A step with blocks 1 to n, and 0 for what is outside of them::

    forward   0 1 2 … n 0        pulled, each let go by the next
    backward          0 n … 2 1  the head's gradients come while 0 is still there; n … 1 again
    pushed              n … 2 1 0

So each parameter is received twice per step, and each gradient sent once. The next step's forward
is asked for as soon as the last gradients are pushed; its layers come as the server has them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.nn as nn

from baselines.links import interface_bytes
from baselines.luwu.plan import ROOT, Chunk, Frozen, Layer, Parameter, Pass, Plan
from baselines.luwu.port import Port
from baselines.luwu.wire import Keys, tensor
from baselines.optimizers import AdamW
from baselines.part import Part, take_gradients
from baselines.settings import LuWuSettings
from baselines.strategy import Job, Trainable, trained_numel
from fcdp.arena import Arena


def build(model: nn.Module, job: Job) -> LuWu:
    """Put this rank's model under LuWu: ``FCDP_SWITCH`` is where the launcher has the switch.

    Raises ``ValueError`` for several micro-batches, another optimizer than AdamW, and a model
    whose parts cannot be pulled in LuWu's order.
    """
    keys, address = Keys.of_environment(), os.environ["FCDP_SWITCH"]
    worker = LuWu(model, job, lambda plan, rank, land: Port(plan, rank, keys, address, land))
    # At the exit of this process, whether it is a child of multiprocessing or not.
    Finalize(None, worker.close, exitpriority=1)
    return worker


class _Layer:
    """One layer's parameters on this worker, which are there between a pull and the next."""

    def __init__(self, params: Sequence[nn.Parameter], names: Mapping[int, str]) -> None:
        self.trained = [param for param in params if param.requires_grad]
        self.frozen = [param for param in params if not param.requires_grad]
        self.planned = Layer(
            trained=tuple(_described(self.trained, names)),
            frozen=tuple(_described(self.frozen, names)),
        )
        #: Trained parameters whose gradients of this step are not there yet.
        self.missing = 0
        #: Frozen parameters that were pulled once, in host memory.
        self.cached: torch.Tensor | None = None

    def move(self, device: torch.device, dtype: torch.dtype, *, caches: bool) -> None:
        """Move the parameters to memory of their own, of the type computed in, and free it.

        ``caches``: take host memory for the frozen ones.
        """
        self.parts = [Part(self.trained, device, dtype), Part(self.frozen, device, dtype)]
        if caches and self.frozen:
            self._arena = Arena(self.parts[1].numel * dtype.itemsize, device)
            self.cached = self._arena.memory.view(dtype)  # page-locked while the arena lives
        self.free()

    def land(self, chunk: Chunk, payload: Any) -> None:
        """Copy a chunk to its place; the first one allocates the memory."""
        part = self.parts[0 if chunk.trained else 1]
        values = tensor(payload, part.dtype)
        if not chunk.trained and self.cached is not None:
            self.cached[chunk.begin : chunk.end] = values
            return
        if not part.is_there:
            part.allocate()
        part.values()[chunk.begin : chunk.end].copy_(values)

    def enter(self) -> None:
        """Copy frozen parameters from host memory, where they are cached."""
        if self.cached is not None:
            self.parts[1].fill(self.cached)

    def free(self) -> None:
        for part in self.parts:
            part.free()


def _described(params: Sequence[nn.Parameter], names: Mapping[int, str]) -> list[Parameter]:
    return [Parameter(name=names[id(param)], shape=tuple(param.shape)) for param in params]


class LuWu(Trainable):
    """One worker in training."""

    def __init__(self, model: nn.Module, job: Job, connect: Any) -> None:
        """``connect``: called with the plan, this rank, and the function that lands chunks."""
        topology, settings = job.topology, job.settings
        assert isinstance(settings, LuWuSettings)
        sent = trained_numel(model) * job.dtype.itemsize * topology.ranks_per_node
        super().__init__(model, job, sent)
        if job.accumulation != 1:
            raise ValueError(
                f"accumulation = {job.accumulation}: allowed is 1, as each pass's gradients are "
                "pushed and applied"
            )
        if not isinstance(job.optimizer, AdamW):
            raise ValueError(f"optimizer = {job.optimizer.name}: allowed is AdamW")
        self._rank = topology.rank
        self._layers = _layers(model, job.blocks)
        plan = Plan(
            workers=topology.world_size,
            layers=tuple(layer.planned for layer in self._layers),
            dtype="bfloat16" if job.dtype == torch.bfloat16 else "float32",
            learning_rate=job.learning_rate,
            optimizer=job.optimizer,
            **settings.model_dump(exclude={"cached"}),
        )
        self._port: Port = connect(plan, self._rank, self._land)
        #: Steps that are done; the server's, where it has been restarted from its files.
        self.steps_done = self._port.step
        if self._port.wants_initial and self._rank == 0:
            self._send_initial(plan)
        self._port.wait(self.steps_done)
        self._cached = settings.cached
        device = torch.device(topology.mesh.device_type)
        for layer in self._layers:
            layer.move(device, job.dtype, caches=self._cached)
        model.to(device)
        self._hook(model, job.blocks)
        #: The layer that is there, and whether a step is under way and in backward.
        self._held: int | None = None
        self._training = self._backward = False
        #: Whether this pass has come to the blocks, and which blocks backward has not come to.
        self._among_blocks = False
        self._left: list[int] = []
        self._counted: dict[str, float] = {}
        self._steps_counted = self.steps_done
        self._begin(Pass.FORWARD, first=True)

    def step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Push the gradients of one micro-batch; the server steps. Returns the loss."""
        (batch,) = micro_batches
        self._training = True
        self._left = [*reversed(range(1, len(self._layers)))]
        for layer in self._layers:
            layer.missing = len(layer.trained)
        with self._timed("forward"):
            loss = self.job.loss(self.model, batch)
        self._backward = True
        with self._timed("backward"):
            loss.backward()
            self._end_backward()
        self._training = self._backward = False
        self._leave()
        self.steps_done += 1
        self._begin(Pass.FORWARD)
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batch: torch.Tensor) -> torch.Tensor:
        measured = super().evaluate(batch)
        self._leave()
        self._begin(Pass.FORWARD)
        return measured

    def settle(self) -> None:
        """Wait until the server has the last step in its files, and sends nothing more."""
        self._port.wait(self.steps_done)

    def take_metrics(self) -> dict[str, Any]:
        """Bytes per step of this node's link and of the server's, by direction; messages too.

        ``server_messages_per_step``: that the server receives, signs of life left out.
        """
        self.settle()
        now: dict[str, float] = {}
        if interface := os.environ.get("FCDP_INTERFACE"):
            now["node received"], now["node sent"] = interface_bytes(interface)
        if self._rank == 0:
            now |= {f"server {name}": count for name, count in self._port.counts().items()}
        before, self._counted = self._counted, now
        steps, self._steps_counted = self.steps_done - self._steps_counted, self.steps_done
        if not steps or not before:
            return {}
        per_step = {name: (now[name] - before[name]) / steps for name in now}
        messages = per_step.pop("server messages", None)
        return {"link_bytes_per_step": per_step, "server_messages_per_step": messages}

    def close(self) -> None:
        self._port.close()

    @property
    def host_cache_bytes(self) -> int | None:
        return sum(each.cached.nbytes for each in self._layers if each.cached is not None) or None

    def _land(self, chunk: Chunk, payload: Any) -> None:
        self._layers[chunk.layer].land(chunk, payload)

    def _send_initial(self, plan: Plan) -> None:
        for index, layer in enumerate(self._layers):
            parts = [
                torch.cat([torch.empty(0), *(p.detach().float().flatten().cpu() for p in params)])
                for params in (layer.frozen, layer.trained)
            ]
            for chunk in plan.chunks(index):
                self._port.initial(chunk, parts[chunk.trained][chunk.begin : chunk.end])

    def _begin(self, order: Pass, *, first: bool = False) -> None:
        self._among_blocks = order == Pass.BACKWARD
        frozen = Frozen.ALL
        if self._cached:
            frozen = Frozen.ONCE if first else Frozen.NONE
        self._port.begin(order, frozen, self.steps_done)

    def _hook(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        inside = {id(module) for block in blocks for module in block.modules()}
        for module in _outside(model, inside):
            module.register_forward_pre_hook(lambda *_: self._enter(ROOT))
            if not isinstance(module, nn.Embedding):
                module.register_forward_hook(self._after_outside)
        for index, block in enumerate(blocks, start=1):
            block.register_forward_pre_hook(partial(self._before_block, index))
            block.register_forward_hook(partial(self._after_block, index))
        for index, layer in enumerate(self._layers):
            for param in layer.trained:
                param.register_post_accumulate_grad_hook(partial(self._has_gradient, index))

    def _after_outside(self, module: nn.Module, *_: object) -> None:
        if not self._among_blocks:
            raise ValueError(
                f"model: {type(module).__name__} is before the blocks and outside of them; allowed "
                "there are embeddings, whose backward needs no parameters"
            )

    def _before_block(self, index: int, *_: object) -> None:
        self._enter(index)
        self._among_blocks = True
        if index == len(self._layers) - 1 and self._training and not self._backward:
            self._begin(Pass.BACKWARD)

    def _after_block(self, index: int, _module: nn.Module, _inputs: object, output: Any) -> None:
        if not self._training or self._backward:
            return
        for each in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each.register_hook(lambda _: self._enter(index))

    def _enter(self, index: int) -> None:
        """Pull a layer if it is not here, and free the one before."""
        if self._held == index:
            return
        self._leave()
        self._port.pull(index)
        self._layers[index].enter()
        self._held = index
        if self._backward:
            self._left.remove(index)

    def _leave(self) -> None:
        if self._held is not None:
            self._layers[self._held].free()
            self._held = None
            self._port.release()

    def _has_gradient(self, index: int, _param: torch.Tensor) -> None:
        layer = self._layers[index]
        layer.missing -= 1
        if not layer.missing:
            self._push(index)

    def _end_backward(self) -> None:
        """Pull and push layers that the loss did not depend on, lest the order of layers change."""
        for index in [*self._left]:
            self._enter(index)
        for index in reversed(range(len(self._layers))):
            if self._layers[index].missing:
                self._push(index)

    def _push(self, index: int) -> None:
        self._port.push(self.steps_done, index, take_gradients(self._layers[index].trained))


def _outside(model: nn.Module, inside: set[int]) -> Iterator[nn.Module]:
    """The modules outside of blocks that have parameters.

    Raises ``ValueError`` for one that contains a block: it would need them all the time.
    """
    for name, module in model.named_modules():
        if id(module) in inside or not any(True for _ in module.parameters(recurse=False)):
            continue
        if any(id(each) in inside for each in module.modules()):
            raise ValueError(
                f"model: {name or type(module).__name__} has parameters of its own beside its "
                "blocks; allowed are modules that have either"
            )
        yield module


def _layers(model: nn.Module, blocks: Sequence[nn.Module]) -> list[_Layer]:
    """The layers: what is outside of the blocks, then each block.

    Raises ``ValueError`` for blocks that share a parameter.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    by_block = [[*block.parameters()] for block in blocks]
    inside = [id(param) for params in by_block for param in params]
    if len(inside) != len(set(inside)):
        raise ValueError("model: blocks share a parameter; allowed are blocks of their own")
    outside = [param for param in model.parameters() if id(param) not in set(inside)]
    return [_Layer(params, names) for params in (outside, *by_block)]
