"""Where a model can be cut into stages of consecutive blocks, whatever its family."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from baselines.cyclic.routes import partition
from baselines.strategy import Job, numel

#: Sequences and tokens of the forward that looks at a model; its loss predicts all but the first
#: token, and may compare the first half of the sequences with the other.
_SEQUENCES, _TOKENS = 2, 9


@dataclass(frozen=True)
class Seam:
    """Where a block has the one tensor that blocks hand on."""

    #: Its place among the leaves of the block's arguments, and among those of what it returns.
    argument: int
    returned: int
    #: All leaves of what the block returns, without tensors, and their structure.
    leaves: tuple[Any, ...]
    structure: TreeSpec

    def taken(self, returned: Any) -> torch.Tensor:
        """The tensor among what the block has returned."""
        tensor = tree_flatten(returned)[0][self.returned]
        assert isinstance(tensor, torch.Tensor), "as when the model was looked at"
        return tensor

    def given(self, tensor: torch.Tensor) -> Any:
        """Make the block's return value of this tensor, and no other one."""
        return tree_unflatten(_put(self.leaves, self.returned, tensor), self.structure)


@dataclass(frozen=True)
class Anatomy:
    """Roles of a model's blocks, and of the parameters outside of them, in a forward."""

    seams: tuple[Seam, ...]
    #: Parameters outside of blocks that the first block's input depends on, ...
    before: tuple[nn.Parameter, ...]
    #: ... that the loss depends on otherwise, as those of the head, and that nothing depends on.
    after: tuple[nn.Parameter, ...]
    unused: tuple[nn.Parameter, ...]
    #: Names of trained ones that are among both of the first, such as a tied embedding.
    tied: tuple[str, ...]
    tied_bytes: int
    #: Elements of one token's activations between blocks, and tokens of a sequence of the batch
    #: that have none: a loss may drop the last, which has nothing to predict.
    width: int
    dropped: int

    def cut(self, blocks: Sequence[nn.Module], stages: int) -> list[range]:
        """Cut blocks into stages, each cut nearest an equal share of all matrices, the head's too.

        An embedding costs nothing, as it is looked up; all experts of a block count. Raises
        ``ValueError`` for more stages than blocks.
        """
        if stages > len(blocks):
            raise ValueError(
                f"strategy = pipeline: {stages} stages need as many blocks, and the model has "
                f"{len(blocks)}; allowed are at most {len(blocks)} nodes × stages_per_node ÷ "
                "nodes_per_stage"
            )
        costs = [float(_multiplied(block.parameters())) for block in blocks]
        costs[-1] += _multiplied(self.after)
        return partition(costs, stages)

    def outside_of(self, stage: int, stages: int) -> list[nn.Parameter]:
        """The parameters outside of blocks that a stage needs."""
        first = [*self.before, *self.unused] if stage == 0 else []
        last = self.after if stage == stages - 1 else ()
        return [*first, *(param for param in last if not _is_in(param, first))]


def look(model: nn.Module, job: Job) -> Anatomy:
    """Look at one forward of the whole model, on a few tokens; nothing is trained.

    A model can be cut where blocks are called one after the other, and hand on one tensor,
    unchanged, and nothing else that depends on parameters. Raises ``ValueError`` for any other,
    saying what is in the way.
    """
    looked = _Look(model, job)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_trained(looked.outside))
        narrow = job.dtype == torch.bfloat16
        stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=narrow))
        stack.enter_context(looked.hooked())
        loss = job.loss(model, torch.zeros(_SEQUENCES, _TOKENS, dtype=torch.int64))
        return looked.read(loss)


class _Look:
    """A forward whose graph is interrupted at each block."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        self._blocks = job.blocks
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        inside = [param for block in job.blocks for param in block.parameters()]
        ids = set(map(id, inside))
        if len(ids) < len(inside):
            raise _cannot("blocks share parameters")
        self.outside = [param for param in model.parameters() if id(param) not in ids]
        self._seams: list[Seam] = []
        self._argument = 0
        #: By block: what it took, and what was handed on in the place of what it returned.
        self._took: list[torch.Tensor] = []
        self._handed_on: list[torch.Tensor] = []
        #: Other tensors that blocks return, which nothing may use.
        self._beside: list[torch.Tensor] = []

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as stack:
            for index, block in enumerate(self._blocks):
                begin, end = partial(self._begin, index), partial(self._end, index)
                stack.enter_context(block.register_forward_pre_hook(begin, with_kwargs=True))
                stack.enter_context(block.register_forward_hook(end))
            yield

    def _begin(self, index: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        leaves, _structure = tree_flatten((args, kwargs))
        if index != len(self._handed_on):
            raise _cannot(f"block {index} is called before those in front of it, or again")
        self._argument = _the_one(leaves, f"block {index} takes")
        took = leaves[self._argument]
        if index and took is not self._handed_on[-1]:
            raise _cannot(f"block {index} does not take what block {index - 1} returns")
        self._took.append(took)

    def _end(self, index: int, _: nn.Module, __: Any, returned: Any) -> Any:
        leaves, structure = tree_flatten(returned)
        # Some return attention's weights too, which models do not use; ``read`` sees to it.
        shape, places = self._took[-1].shape, _depending(leaves)
        alike = [at for at in places if leaves[at].shape == shape]
        if len(alike) != 1:
            raise _cannot(f"block {index} returns {len(alike)} tensors like the one that it takes")
        plain = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        self._seams.append(Seam(self._argument, alike[0], plain, structure))
        for at in places:
            leaves[at] = leaves[at].detach().requires_grad_()
            (self._handed_on if at == alike[0] else self._beside).append(leaves[at])
        return tree_unflatten(leaves, structure)

    def read(self, loss: torch.Tensor) -> Anatomy:
        """Read off the graph what depends on what, once the forward has ended."""
        if len(self._handed_on) != len(self._blocks):
            raise _cannot(f"{len(self._handed_on)} of its {len(self._blocks)} blocks are called")
        *earlier, last = [*self._beside, *self._handed_on]
        after = _reached(loss, [*earlier, last, *self.outside])
        if not _is_in(last, after) or any(_is_in(each, after) for each in earlier):
            raise _cannot("its loss depends on other blocks than the last one directly")
        before = _reached(self._took[0], self.outside)
        used, both = [*before, *after], [each for each in before if _is_in(each, after)]
        tied = {name: param for name, param in self._trained.items() if _is_in(param, both)}
        return Anatomy(
            seams=tuple(self._seams),
            before=tuple(p for p in self.outside if _is_in(p, before)),
            after=tuple(p for p in self.outside if _is_in(p, after)),
            unused=tuple(p for p in self.outside if not _is_in(p, used)),
            tied=tuple(tied),
            tied_bytes=sum(param.nbytes for param in tied.values()),
            width=self._took[0].numel() // self._took[0].shape[:2].numel(),
            dropped=_TOKENS - self._took[0].shape[1],
        )


@contextmanager
def _trained(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let frozen parameters take part in the graph."""
    frozen = [p for p in params if not p.requires_grad and p.is_floating_point()]
    try:
        for param in frozen:
            param.requires_grad_(True)
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


def _reached(end: torch.Tensor, starts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of ``starts`` that ``end`` depends on."""
    tracked = [each for each in starts if each.requires_grad]
    if not tracked:
        return []
    ones = torch.ones_like(end)
    gradients = torch.autograd.grad(end, tracked, ones, retain_graph=True, allow_unused=True)
    return [each for each, grad in zip(tracked, gradients, strict=True) if grad is not None]


def _the_one(leaves: Sequence[Any], who: str) -> int:
    """The place of the one tensor that depends on parameters."""
    places = _depending(leaves)
    if len(places) != 1:
        raise _cannot(f"{who} {len(places)} tensors that depend on parameters, not 1")
    return places[0]


def _depending(leaves: Sequence[Any]) -> list[int]:
    """The places of tensors that depend on parameters."""
    depends = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
    return [at for at, each in enumerate(depends) if each]


def _put(leaves: Sequence[Any], at: int, tensor: torch.Tensor) -> list[Any]:
    return [*leaves[:at], tensor, *leaves[at + 1 :]]


def _is_in(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    return any(tensor is other for other in others)


def _multiplied(params: Iterable[nn.Parameter]) -> int:
    """Elements of matrices, with which each token is multiplied."""
    return numel(param for param in params if param.dim() > 1)


def _cannot(why: str) -> ValueError:
    return ValueError(
        f"strategy = pipeline: the model cannot be cut between its blocks: {why}; allowed are "
        "models whose blocks hand on one tensor"
    )
