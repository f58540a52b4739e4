"""A check that words arrive, for tests of each form."""

import torch

from fcdp.delta.difference import Coding, apply, capacity, encode


def arrives(new: torch.Tensor, base: torch.Tensor | None, coding: Coding = "packed") -> int:
    """Return the bytes that encode ``new``, which arrives to the bit from a longer buffer."""
    encoded = encode(new, base, coding)
    assert encoded.numel() <= capacity(new.numel())
    out = torch.full_like(new, -1) if base is None else base.clone()
    assert apply(torch.cat([encoded, encoded.new_full((5,), 255)]), out) == encoded.numel()
    assert torch.equal(out, new)
    return encoded.numel()
