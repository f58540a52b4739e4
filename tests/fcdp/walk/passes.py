"""Events that compute: passes forward and backward, steps, freezing, failures."""

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

import fcdp
from tests.fcdp.walk.drive import Walk
from tests.fcdp.walk.model import Boom, FailsInBackward, inputs_of_a_block, loss_of
from tests.fcdp.walk.pair import Side


def train(walk: Walk) -> None:
    walk.backward("last" if walk.waiting else "plain")
    walk.step()


def accumulate(walk: Walk) -> None:
    for _ in range(walk.random.randint(1, 3)):
        walk.backward("waits")
    walk.backward("last")
    walk.step()


def clip_step(walk: Walk) -> None:
    """Clipped gradients are exact no longer: the step follows at once."""
    if walk.waiting or walk.uneven:
        return
    walk.backward("plain")
    walk.tidy()

    def clip(side: Side) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(side.params.values(), 0.5)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    walk.both("norm", clip)
    walk.step()
    walk.both("zero_grad", lambda side: side.optimizer.zero_grad())


def closure(walk: Walk) -> None:
    """An optimizer that computes the loss itself; now and then after a write of its own."""
    if walk.waiting or walk.uneven:
        return
    walk.tidy()
    tokens, writes = walk.tokens(), walk.random.random() < 0.3
    walk.note("writes" if writes else "")

    def step(side: Side) -> Any:
        def loss() -> float:
            side.optimizer.zero_grad()
            if writes:
                for group in side.optimizer.param_groups:
                    with torch.no_grad():
                        for param in group["params"]:  # in place, as SAM's: its stamp shows it
                            param.mul_(0.75)
            return side.backward(tokens, frozenset(), "plain").item()

        return side.optimizer.step(loss)

    walk.both("loss", step)
    walk.started = True
    walk.zero_grad()


def zero_grad(walk: Walk) -> None:
    """Drop gradients; those of waiting micro-batches with or without a word."""
    discards = walk.random.random() < 0.5
    if walk.waiting and discards:
        walk.note("and discard")
        for side in walk.pair.sides:
            side.discard()
    elif walk.waiting:
        walk.uneven = "abandoned micro-batches"
    dropped = walk.waiting and discards
    walk.waiting = False
    walk.zero_grad()
    if dropped:  # a micro-batch that never was leaves nothing, where FSDP2 has zeros of it
        for name, param in walk.pair.reference.params.items():
            if walk.pair.cached.params[name].grad is None:
                param.grad = None


def evaluate(walk: Walk) -> None:
    batches = [walk.tokens() for _ in range(walk.random.randint(1, 2))]

    def losses(side: Side) -> list[float]:
        side.model.eval()
        with torch.no_grad():
            values = [loss_of(side.model(tokens[:, :-1]), tokens).item() for tokens in batches]
        side.model.train()
        return values

    walk.both("evaluation", losses)
    walk.started = True


def no_grad_forward(walk: Walk) -> None:
    tokens = walk.tokens()
    with torch.no_grad():
        walk.both("logits", lambda side: side.model(tokens[:, :-1]))
    walk.started = True


def inference_forward(walk: Walk) -> None:
    """Under inference mode, which allows no gathered parameter to be made first in it."""
    walk.start()
    tokens = walk.tokens()

    def logits(side: Side) -> torch.Tensor:
        with torch.inference_mode():
            result = side.model(tokens[:, :-1])
        return torch.as_tensor(result.clone())

    walk.both("logits", logits)


def forward_only(walk: Walk) -> None:
    """A forward that records a graph and has no backward."""
    tokens = walk.tokens()
    walk.both("logits", lambda side: side.model(tokens[:, :-1]).detach())
    walk.started = True


def two_forwards(walk: Walk) -> None:
    if walk.waiting:
        return
    first, second = walk.tokens(), walk.tokens()

    def action(side: Side) -> torch.Tensor:
        losses = [loss_of(side.model(tokens[:, :-1]), tokens) for tokens in (first, second)]
        total = torch.stack(losses).sum()
        side.backpropagate(total)
        return total.detach()

    walk.may_refuse(walk.uneven, "loss", action) if walk.uneven else walk.both("loss", action)
    walk.started = True


def submodule(walk: Walk) -> None:
    """A forward of one block alone, and its backward now and then."""
    walk.start()
    index = walk.random.randrange(walk.options.blocks)
    trains = not (walk.waiting or walk.uneven) and walk.random.random() < 0.5
    method = walk.random.choice(["__call__", "refine"])
    x = inputs_of_a_block(walk.random.randrange(2**24), walk.rank, walk.options.width)
    walk.note(f"{index} {method}{' and backward' if trains else ''}")

    def action(side: Side) -> torch.Tensor:
        with torch.set_grad_enabled(trains):
            result = getattr(side.model.blocks[index], method)(x.clone())
        if trains:
            side.backpropagate(result.square().mean())
        return torch.as_tensor(result.detach())

    walk.both("output", action)


def method(walk: Walk) -> None:
    """A registered forward method of the whole model, and its backward now and then."""
    trains = not (walk.waiting or walk.uneven) and walk.random.random() < 0.6
    tokens = walk.tokens()
    walk.note("and backward" if trains else "")

    def action(side: Side) -> torch.Tensor:
        with torch.set_grad_enabled(trains):
            result = side.model.encode(tokens[:, :-1])
        if trains:
            side.backpropagate(result.square().mean())
        return result.detach()

    walk.both("output", action)
    walk.started = True


def unshard(walk: Walk) -> None:
    """Gather by hand; then let go, or go on with a forward."""
    walk.start()
    asynchronous, reshards = walk.random.random() < 0.5, walk.random.random() < 0.6
    index = walk.random.randrange(-1, walk.options.blocks)
    tokens = walk.tokens()
    walk.note(f"{index}{' async' if asynchronous else ''}{' reshard' if reshards else ''}")

    def action(side: Side) -> dict[str, torch.Tensor]:
        module: Any = side.model if index < 0 else side.model.blocks[index]
        handle = module.unshard(async_op=asynchronous)
        if handle is not None:
            handle.wait()
        gathered = {
            name: param.detach().clone()
            for name, param in module.named_parameters()
            if not isinstance(param, DTensor)
        }
        if reshards:
            module.reshard()
        else:
            with torch.no_grad():
                gathered["logits"] = side.model(tokens[:, :-1])
        return gathered

    walk.both("gathered", action)


def _set_trained(walk: Walk, trained: bool) -> None:
    """Freeze or thaw blocks, adapters or single parameters, also between backward and step."""
    walk.tidy()
    names = walk.pair.reference.params
    some = walk.random.choice([*names])
    part = walk.random.choice(["blocks.0.", "blocks.1.", "adapter", "head", "embedding", some])
    walk.note(part)
    for side in walk.pair.sides:
        for name, param in side.params.items():
            if part in name:
                param.requires_grad_(trained)
    if walk.waiting:
        walk.uneven = "parameters frozen or thawed amid micro-batches"


def boom(walk: Walk) -> None:
    """An exception in a forward, on all ranks, which the user catches."""
    place = walk.random.randint(0, walk.options.blocks)
    graph = walk.random.random() < 0.5
    within = walk.random.random() < 0.3
    tokens = walk.tokens()
    walk.note(f"{place}{' with grad' if graph else ''}{' in accumulate' if within else ''}")
    for side in walk.pair.sides:
        try:
            with side.accumulating("waits" if within else "plain"), torch.set_grad_enabled(graph):
                side.model(tokens[:, :-1], frozenset(), place)
            raise AssertionError("the forward did not fail")
        except Boom:
            side.reset()
    if within:  # which drops what waits: the step's micro-batches begin again
        walk.waiting, walk.uneven = False, ""
        walk.both("zero_grad", lambda side: side.optimizer.zero_grad())


def boom_in_backward(walk: Walk) -> None:
    """An exception in a backward, on all ranks, which the user catches."""
    if walk.waiting or walk.uneven:
        return
    index, tokens = walk.random.randrange(walk.options.blocks), walk.tokens()
    walk.note(str(index))
    for side in walk.pair.sides:
        handle = side.model.blocks[index].register_forward_hook(FailsInBackward.hook)
        try:
            side.backward(tokens, frozenset(), "plain")
        except Boom:
            side.reset()
        handle.remove()
    walk.both("zero_grad", lambda side: side.optimizer.zero_grad())


def setup_again(walk: Walk) -> None:
    """Set up again, as a second ``train()`` of a trainer does; equal arguments change nothing."""
    if walk.options.setup == "cache":
        walk.pair.cache(walk.pair.cached.model)


def invalidate(walk: Walk) -> None:
    """Invalidate, which is never needed here and never wrong."""
    fcdp.invalidate(walk.pair.cached.model)
