"""The cycle: its update rules, its slots (papers' 2.1 and 2.3), and who sends what to whom.

Micro-batches and stages are numbered from 0; there are as many of the one as of the other. A slot
is the time of one stage's forward, or backward, of one micro-batch.

A stage's optimizer lies with its owner, the rank whose micro-batch comes to the stage right after
the last micro-batch has left it: rank ``S − 1 − l`` for stage ``l`` of ``S``. Messages are of one
stage, and from one rank to one other:

- ``gradient``: the sum of a stage's gradients so far, from rank to rank; each adds its own in its
  backward.
- ``sum``: that of all ranks, from the last to the owner, which updates the stage in the slot after.
- ``forward``: the new parameters, from the owner once through all ranks, each of which passes them
  on in its forward of the stage. By v2 the first who need them follow the owner; those before it
  need them two slots after the last rank, in the next step. By v1 all others need them in the next
  step, and in the order of ranks.
- ``backward``: the same parameters by the same way once more, where ranks let them go in between.

**No deadlock.** Sends do not wait (``isend``); a rank waits for a message alone, at the slot that
needs it. Every message is sent in a slot before the one that needs it, on the clock that the
schedule has (``Message.sent`` < ``Message.needed``), and a rank goes through its slots in order. So
of all ranks that wait, the one that is the earliest by that clock waits for what has been sent.
Nothing makes a rank keep to the clock: it fixes the order, and messages the pace.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from baselines.settings import UpdateRule


def chosen(stages: int | None, costs: Sequence[float], most: int, called: str) -> list[range]:
    """Cut blocks of these costs into stages: ``most`` of them, unless chosen.

    ``called`` names what ``most`` counts. Raises ``ValueError`` for more stages than blocks or than
    that.
    """
    count = most if stages is None else stages
    if count > min(most, len(costs)):
        raise ValueError(
            f"stages = {count}: allowed are 1 to {min(most, len(costs))}, as there are "
            f"{most} {called} and {len(costs)} blocks"
        )
    return partition(costs, count)


def partition(costs: Sequence[float], stages: int) -> list[range]:
    """Cut consecutive blocks into ``stages`` runs, each cut nearest an equal share of the costs.

    Every run has at least one block.
    """
    upto = [0.0, *accumulate(costs)]
    cuts = [0]
    for stage in range(1, stages):
        target = upto[-1] * stage / stages
        places = range(cuts[-1] + 1, len(costs) - (stages - stage) + 1)
        cuts.append(min(places, key=lambda place: abs(upto[place] - target)))
    cuts.append(len(costs))
    return [range(begin, end) for begin, end in pairwise(cuts)]


def is_fresh(rule: UpdateRule, micro_batch: int, stage: int, stages: int) -> bool:
    """Whether a micro-batch computes a stage with the parameters of this step, not of the last.

    By ``v1`` none does, by ``v2`` where they are ready when the micro-batch comes to the stage.
    """
    return rule == "v2" and micro_batch + stage >= stages - 1


def forward_slot(micro_batch: int, stage: int) -> int:
    """The slot of a stage's forward, counted from the start of the step."""
    return 2 * micro_batch + stage


def backward_slot(micro_batch: int, stage: int, stages: int) -> int:
    """The slot of a stage's backward, counted from the start of the step."""
    return 2 * micro_batch + 2 * stages - 1 - stage


def slots_per_step(stages: int) -> int:
    """Slots from the start of one step to that of the next."""
    return 2 * stages


Kind = Literal["forward", "backward", "gradient", "sum"]
KINDS: tuple[Kind, ...] = ("forward", "backward", "gradient", "sum")


@dataclass(frozen=True)
class Message:
    """One stage's parameters or gradients on their way from one rank to another."""

    kind: Kind
    stage: int
    source: int
    target: int
    #: Slots from the start of the step in which it is sent.
    sent: int
    needed: int
    #: Whether the target needs it in the step after.
    later: bool


@dataclass(frozen=True)
class Cycle:
    """Ranks, each with a micro-batch two slots after the one before, and stages."""

    rule: UpdateRule
    ranks: int
    stages: int
    #: Whether ranks let parameters go between forward and backward.
    twice: bool

    def owner(self, stage: int) -> int:
        """The rank that updates a stage."""
        return self.stages - 1 - stage

    def lag(self, rank: int, stage: int) -> int:
        """How many steps old the parameters are that a rank computes a stage with."""
        return 0 if is_fresh(self.rule, rank, stage, self.stages) else 1

    def stale(self, stage: int) -> float:
        """The share of ranks that compute a stage with parameters that are one step old."""
        return sum(self.lag(rank, stage) for rank in range(self.ranks)) / self.ranks

    def route(self, stage: int) -> list[int]:
        """The ranks that a stage's new parameters pass, from the owner on."""
        owner = self.owner(stage)
        others = [rank for rank in range(self.ranks) if rank != owner]
        return [owner, *sorted(others, key=lambda rank: (self.lag(rank, stage), rank))]

    def messages(self) -> list[Message]:
        """All messages that are sent in one step."""
        messages: list[Message] = []
        for stage in range(self.stages):
            passed_on = [*pairwise(self.route(stage))]
            hops: dict[Kind, list[tuple[int, int]]] = {
                "forward": passed_on,
                "backward": passed_on if self.twice else [],
                "gradient": [*pairwise(range(self.ranks))],
                # Within the rank, where the last one is the owner.
                "sum": [(self.ranks - 1, self.owner(stage))],
            }
            messages += [self._message(kind, stage, *hop) for kind in KINDS for hop in hops[kind]]
        return messages

    def sent_by(self, rank: int) -> dict[tuple[Kind, int], Message]:
        """Messages that a rank sends in each step, by kind and stage."""
        return {(m.kind, m.stage): m for m in self.messages() if m.source == rank}

    def received_by(self, rank: int) -> dict[tuple[Kind, int], Message]:
        """Messages that a rank receives for each step, by kind and stage, in the order of need."""
        mine = [m for m in self.messages() if m.target == rank]
        step = 2 * self.ranks
        mine.sort(key=lambda message: message.needed - step * message.later)
        return {(m.kind, m.stage): m for m in mine}

    def _message(self, kind: Kind, stage: int, source: int, target: int) -> Message:
        later = kind == "sum"
        if kind in ("forward", "backward"):
            has = 0 if source == self.owner(stage) else self.lag(source, stage)
            later = self.lag(target, stage) > has
        sent = self._slot(kind, source, stage)
        needed = self._slot("forward" if kind == "sum" else kind, target, stage)
        return Message(kind, stage, source, target, sent, needed + 2 * self.ranks * later, later)

    def _slot(self, kind: Kind, rank: int, stage: int) -> int:
        if kind == "forward":
            return forward_slot(rank, stage)
        return backward_slot(rank, stage, self.stages)


def crossing(
    cycle: Cycle, sizes: Mapping[Kind, Sequence[int]], ranks_per_node: int, nodes: int
) -> int:
    """The most that a node sends per step, in the unit of ``sizes``, those of stages' messages."""
    sent = [0] * nodes
    for message in cycle.messages():
        node = message.source // ranks_per_node
        if message.target // ranks_per_node != node:
            sent[node] += sizes[message.kind][message.stage]
    return max(sent)
