"""Parameters as views of flat memory that comes and goes, and that messages fill."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from baselines.optimizers import AdamW
from baselines.strategy import numel


@torch.no_grad()
def take_gradients(params: Sequence[nn.Parameter]) -> torch.Tensor:
    """Take all gradients, end to end, from the parameters, which have none then."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    for param in params:
        param.grad = None
    return torch.cat([grad.flatten() for grad in gradients])


def split(
    params: Sequence[nn.Parameter], blocks: Sequence[nn.Module]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters of no block or of several ones, and those of one block."""
    times = Counter(id(param) for block in blocks for param in block.parameters())
    return (
        [param for param in params if times[id(param)] != 1],
        [param for param in params if times[id(param)] == 1],
    )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter or of its gradient; all of it where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def views(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``flat`` (elements) cut as these tensors are, each part of its tensor's shape."""
    parts = flat.split([each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]


@contextmanager
def restored(values: list[torch.Tensor]) -> Iterator[None]:
    """Restore the values of tensors at the end of the context."""
    copies = [value.clone() for value in values]
    try:
        yield
    finally:
        torch._foreach_copy_(values, copies)


def step_adamw(
    chosen: AdamW,
    learning_rate: float,
    done: int,
    gradients: Sequence[torch.Tensor],
    states: Sequence[Sequence[torch.Tensor]],
    *,
    fused: bool,
) -> None:
    """Step parameters and moments where they lie, as PyTorch's AdamW does after ``done`` steps.

    ``states``: parameters, first and second moments; ``fused``: in one pass over each parameter,
    which needs no memory of its own.
    """
    params, firsts, seconds = map(list, states)
    adamw(
        params,
        [*gradients],
        firsts,
        seconds,
        [],
        [torch.tensor(float(done)) for _ in params],
        foreach=not fused,
        fused=fused,
        amsgrad=False,
        beta1=0.9,
        beta2=chosen.beta2,
        lr=learning_rate * chosen.rate(done),
        weight_decay=chosen.weight_decay,
        eps=1e-8,
        maximize=False,
    )


class Part:
    """Parameters that come and go together."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.params = params
        self._flat = torch.empty(numel(params), dtype=dtype, device=device)
        for param, view in zip(params, views(self._flat, params), strict=True):
            view.copy_(param.detach())
            param.data = view

    @property
    def numel(self) -> int:
        return self._flat.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self._flat.dtype

    @property
    def is_there(self) -> bool:
        return self._flat.untyped_storage().nbytes() == self._flat.nbytes

    def values(self) -> torch.Tensor:
        """All elements end to end: the live memory."""
        assert self.is_there
        return self._flat

    def fill(self, values: torch.Tensor) -> None:
        """Copy these elements to the memory that the graph knows, which is allocated again."""
        self.allocate()
        self._flat.copy_(values)

    def allocate(self) -> None:
        """Allocate the memory again, with undefined values."""
        self._flat.untyped_storage().resize_(self._flat.nbytes)

    def free(self) -> None:
        """Give the memory back until ``fill``."""
        self._flat.untyped_storage().resize_(0)
