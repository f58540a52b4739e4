"""The same step with real allocations: one of 32 ranks on a GPU, beside the imitated one.

python -m pytest -m gpu tests/simulation/imitated/test_on_cuda.py
"""

import pytest
import torch

from experiments.commands.memory import build
from simulation import models
from simulation.imitated import study
from simulation.imitated.rank import Rank, world
from simulation.imitated.records import Case
from tests.ranks import Pools
from tests.simulation.imitated.small import leave_group, measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none"),
]

#: Blocks as wide as the 10B model's; few, because its whole weights are made on the host first.
LAYERS = 4
MICRO_BATCH = 8


def wide_case(strategy: str, tuning: str, *, checkpointing: bool) -> Case:
    (case,) = (
        each
        for each in study.cases([models.find("gpt-10b")], [strategy], study.SEQUENCE_LENGTHS[:1])
        if each.policy == "host" and each.tuning == tuning and each.checkpointing == checkpointing
    )
    model = case.model.model_copy(update={"layers": LAYERS})
    # So little that the search ends where the comparison is made.
    return case.model_copy(update={"model": model, "device_bytes": 24 * 10**9})


def allocated(case: Case) -> int:
    """Peak of a step by PyTorch's allocator, in bytes."""
    leave_group()
    with world(case.nodes * case.ranks_per_node, "cuda"):
        rank = Rank(case, "cuda", build)
        rank.step(1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        rank.step(MICRO_BATCH)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("strategy", ["fsdp2", "fcdp", "hpz", "zeropp", "fsdp2-offload"])
def test_the_imitation_counts_what_cuda_allocates(
    strategy: str, tuning: str, checkpointing: bool, apart: Pools
) -> None:
    case = wide_case(strategy, tuning, checkpointing=checkpointing)
    pools = Pools()  # one process has the GPU, another the imitated accelerator
    try:
        real = pools.run(1, allocated, case)[0]
    finally:
        pools.close()
    imitated = apart.run(1, measure, case)[0]
    counted = next(p.device_bytes for p in imitated.peaks if p.micro_batch == MICRO_BATCH)
    assert counted == pytest.approx(real, rel=0.05)
