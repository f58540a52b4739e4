"""DeepSpeed ZeRO-Infinity: parameters and optimizer states on NVMe."""

from __future__ import annotations

import tempfile

import torch.nn as nn

from baselines import deepspeed_offload, deepspeed_zero3
from baselines.deepspeed_zero3 import DeepSpeedZero3
from baselines.strategy import Job, zero3_bytes


def build(model: nn.Module, job: Job) -> DeepSpeedZero3:
    """Swap files go to the directory for temporary files (``TMPDIR``).

    DeepSpeed gives them fixed names there and leaves them behind, so a directory is for the ranks
    of one job only; a cluster gives each node's ranks one that ends with the job.
    """
    deepspeed_zero3.build_operators("AsyncIOBuilder")
    config = deepspeed_zero3.configuration(model, job)
    least = zero3_bytes(model, job)
    nvme = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
    return deepspeed_offload.initialize(model, job, config, least, optimizer=nvme, param=nvme)
