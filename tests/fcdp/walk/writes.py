"""Events that write parameters, between passes and amid one."""

from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from tests.fcdp.walk.drive import Walk
from tests.fcdp.walk.model import loss_of
from tests.fcdp.walk.pair import Side

#: Elementwise, so that a shard becomes what the whole does.
_CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "mul": lambda t: t.mul_(0.5),
    "add": lambda t: t.add_(0.125),
    "clamp": lambda t: t.clamp_(-0.25, 0.25),
    "neg": lambda t: t.neg_(),
    "copy": lambda t: t.copy_(t * 0.75),
}

#: What is handed to the change: the parameter itself, or its memory by some other name. Counters
#: of writes grow for the first two; the others nobody counts.
_VISIBLE: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "param": lambda p: p,
    "local": lambda p: p.to_local() if isinstance(p, DTensor) else p,
}
_UNSEEN: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "data": lambda p: p.data,
    "local_data": lambda p: p.to_local().data if isinstance(p, DTensor) else p.data,
    "detach": lambda p: p.detach(),
}
#: Names under which autograd counts writes too.
_COUNTED = {*_VISIBLE, "detach"}


def _write(
    walk: Walk,
    places: dict[str, Callable[[nn.Parameter], torch.Tensor]],
    *,
    may_be_alone: bool = True,
) -> list[str]:
    """Change some parameters, on all ranks or on one; return their names."""
    place, change = walk.random.choice([*places]), walk.random.choice([*_CHANGES])
    names = _some_names(walk)
    rank = _writing_rank(walk, names)
    if not may_be_alone and place in _COUNTED:
        rank = None
    walk.note(f"{place} {change} {_shown(names)} on {'all' if rank is None else rank}")
    for side in walk.pair.sides:
        for name in names:
            if rank in (None, walk.rank):
                with torch.no_grad():
                    _CHANGES[change](places[place](side.params[name]))
    return names


def _some_names(walk: Walk) -> list[str]:
    params = walk.pair.reference.params
    everything = [*params]
    kind = walk.random.choice(["all", "block", "one", "trained", "frozen"])
    if kind == "block":
        block = f"blocks.{walk.random.randrange(walk.options.blocks)}."
        return [name for name in everything if name.startswith(block)]
    if kind == "one":
        return [walk.random.choice(everything)]
    if kind in ("trained", "frozen"):
        return [name for name in everything if params[name].requires_grad == (kind == "trained")]
    return everything


def _writing_rank(walk: Walk, names: Sequence[str]) -> int | None:
    """One rank, or ``None`` for all."""
    rank = walk.random.randrange(walk.options.world_size)
    return None if walk.random.random() < 0.6 else rank


def _shown(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} params"


def _write_between(walk: Walk, places: dict[str, Callable[[nn.Parameter], torch.Tensor]]) -> None:
    walk.tidy()
    _write(walk, places)


def foreach_write(walk: Walk) -> None:
    """Write whole lists at once, as averages of weights and some optimizers do."""
    walk.tidy()
    local = walk.random.random() < 0.5
    walk.note("local" if local else "")
    for side in walk.pair.sides:
        for group in side.optimizer.param_groups:
            params = [_VISIBLE["local"](p) for p in group["params"]] if local else group["params"]
            with torch.no_grad():
                torch._foreach_mul_(params, 0.75)


def assign_data(walk: Walk) -> None:
    """``p.data = …``, as ``vector_to_parameters`` does: of a DTensor FSDP2 goes on with the old."""
    walk.tidy()
    names = _some_names(walk)
    walk.note(_shown(names))
    for side in walk.pair.sides:
        for name in names:
            side.params[name].data = side.params[name].detach() * 0.5


def vector_write(walk: Walk) -> None:
    """All local shards from one flat vector."""
    walk.tidy()
    factor = walk.random.choice([0.5, 0.75])
    for side in walk.pair.sides:
        shards = [_UNSEEN["local_data"](param) for param in side.params.values()]
        vector = torch.cat([shard.flatten() for shard in shards]) * factor
        for shard, part in zip(shards, vector.split([s.numel() for s in shards]), strict=True):
            shard.copy_(part.view_as(shard))


def master_copy(walk: Walk) -> None:
    """An optimizer of the user's own, whose fp32 masters are copied back."""
    if walk.waiting or walk.uneven:
        return
    walk.tidy()
    for side in walk.pair.sides:
        for param in side.params.values():
            master = param.detach().float()
            if param.grad is not None:
                master -= 0.125 * param.grad.float()
            param.data.copy_(master)


def average(walk: Walk) -> None:
    """A weight average: taken when there is none; else swapped in, evaluated, swapped out."""
    walk.tidy()
    tokens = walk.tokens()
    takes = walk.pair.cached.average is None or walk.random.random() < 0.3
    keeps = walk.random.random() < 0.2
    walk.note("taken" if takes else "swapped in" if keeps else "swapped in and out")

    def action(side: Side) -> torch.Tensor | None:
        if takes:
            side.average = {
                name: param.detach().clone() * 0.75 for name, param in side.params.items()
            }
            return None
        assert side.average is not None
        trained = {name: param.detach().clone() for name, param in side.params.items()}
        for name, param in side.params.items():
            param.data.copy_(side.average[name])
        with torch.no_grad():
            loss = loss_of(side.model(tokens[:, :-1]), tokens)
        side.let_go()
        if not keeps:
            for name, param in side.params.items():
                param.data.copy_(trained[name])
        return loss

    walk.both("loss", action)
    walk.started = walk.started or not takes


def convert(walk: Walk) -> None:
    """Convert to another dtype and back, by ``Module._apply``."""
    if walk.waiting or walk.uneven:
        return
    walk.tidy()
    for side in walk.pair.sides:
        side.model.float().double()


def _write_within(walk: Walk, places: dict[str, Callable[[nn.Parameter], torch.Tensor]]) -> None:
    """A write between forward and backward.

    FSDP2 computes with old parameters what it keeps gathered, and with new ones what it gathers
    again. FCDP refuses, in this pass or at the next gather, or does the same.
    """
    if walk.waiting or walk.uneven:
        return
    walk.both("zero_grad", lambda side: side.optimizer.zero_grad())
    tokens, after = walk.tokens(), walk.tokens()
    losses = {side: loss_of(side.model(tokens[:, :-1]), tokens) for side in walk.pair.sides}
    walk.started = True
    # A rank that alone sees a write refuses alone, and ends the others' exchanges with it: that
    # ends the process groups too, and is tested where ranks may die.
    names = _write(walk, places, may_be_alone=False)
    why = "written amid a pass"
    if walk.pair.not_resharded & {*names}:
        # It is used as it was, or autograd itself refuses, where FSDP2 gathers anew.
        walk.begin_anew()
        return
    if walk.may_refuse(why, "backward", lambda side: side.backpropagate(losses[side])):
        return
    same = walk.pair.difference(gradients=True) is None
    walk.tidy()
    with torch.no_grad():
        refused = walk.may_refuse(why, "forward", lambda side: side.model(after[:, :-1]))
    if not refused and not same:
        walk.expect_equal("what used a parameter written amid the pass", "nothing", "an error")
    walk.begin_anew()
