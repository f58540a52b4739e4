"""Bytes that autograd keeps from forward to backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes:
    """Memory that graphs hold, each piece counted once however many operations keep it."""

    def __init__(self, others: Iterable[torch.Tensor]) -> None:
        """``others``: what is there anyway, parameters and buffers, which are not counted."""
        self._others = {tensor.untyped_storage().data_ptr() for tensor in others}
        self._uses: Counter[int] = Counter()
        self.now = 0
        self.peak = 0

    def counted(self) -> saved_tensors_hooks:
        """A context in which what operations keep is counted, until it is let go."""
        return saved_tensors_hooks(lambda tensor: _Kept(tensor, self), lambda kept: kept.tensor)

    def begin(self) -> None:
        """Count the peak from here on."""
        self.peak = self.now

    def keep(self, storage: torch.UntypedStorage) -> None:
        where = storage.data_ptr()
        if where not in self._others:
            self._uses[where] += 1
            if self._uses[where] == 1:
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)

    def let_go(self, storage: torch.UntypedStorage) -> None:
        where = storage.data_ptr()
        if where not in self._others:
            self._uses[where] -= 1
            if not self._uses[where]:
                del self._uses[where]
                self.now -= storage.nbytes()


class _Kept:
    """A tensor that a graph holds; the graph's end is its own."""

    def __init__(self, tensor: torch.Tensor, counts: SavedBytes) -> None:
        self.tensor = tensor
        self._counts = counts
        counts.keep(tensor.untyped_storage())

    def __del__(self) -> None:
        self._counts.let_go(self.tensor.untyped_storage())
