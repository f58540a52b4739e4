"""Checkpoints of model and optimizer, by torch.distributed.checkpoint.

A checkpoint is a directory: one folder of shards, written by all ranks, and ``state.pt``, which
names the folder, describes what lies where in it, keeps its files' checksums and holds what is not
sharded. Replacing that file is what completes a save. Until then the checkpoint that was there
before is the one that counts.

``.metadata`` in the folder is for other programs, which read the shards as any checkpoint of
PyTorch's. It is a pickle, and is never opened here but for its checksum.
"""

from fcdp.checkpoint.loading import load
from fcdp.checkpoint.saving import save

__all__ = ["load", "save"]
