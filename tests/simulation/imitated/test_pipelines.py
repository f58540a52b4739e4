"""The memory of pipelines of FCDP groups, as planned and as a rank of each group has it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _StageBackwardMeta, _StageForwardMeta, _TensorMeta

import fcdp
from baselines.pipeline.train import _sharded
from baselines.settings import PipelineSchedule
from experiments.commands.memory import build
from simulation.imitated.accelerator import NAME, imitated
from simulation.imitated.rank import Rank, _move, _with_contents, imitated_host, over, world
from simulation.imitated.records import Case
from simulation.imitated.study import SEQUENCE_LENGTHS
from tests.ranks import Pools
from tests.simulation.imitated import test_agreement
from tests.simulation.imitated.small import case, leave_group, planned

pytestmark = pytest.mark.system

NODES, RANKS_PER_NODE, NODES_PER_STAGE, MICRO_BATCH = 8, 8, 2, 4
LENGTH = SEQUENCE_LENGTHS[0]
MODEL = test_agreement.MODEL.model_copy(update={"layers": 8})
#: Ranks of a group, which have a stage.
RANKS = NODES_PER_STAGE * RANKS_PER_NODE


class Staged(Case):
    """A pipeline of groups that FCDP shards."""

    schedule: PipelineSchedule
    stages_per_node: int

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "within_stage": "fcdp",
            "nodes_per_stage": NODES_PER_STAGE,
            "pipeline_schedule": self.schedule,
            "stages_per_node": self.stages_per_node,
        }


def staged(schedule: PipelineSchedule, stages_per_node: int = 1, **more: Any) -> Staged:
    usual = {"model": MODEL, "device_bytes": 48 * 10**9, "sequence_length": LENGTH, "nodes": NODES}
    made = case("pipeline", accumulation=2, **(usual | more))
    return Staged(**made.model_dump(), schedule=schedule, stages_per_node=stages_per_node)


STUDIED: dict[PipelineSchedule, Staged] = {
    "ahead": staged("ahead"),
    "zb": staged("zb"),
    "interleaved": staged("interleaved", 2),
    "looped": staged("looped", 2),
}


def sharded_there(stage: Any, *others: Any) -> Any:
    """Shard a stage that alone is moved to the device, of all of the model."""
    _move(stage.model, torch.device(NAME))
    return _sharded(stage, *others)


def topology_of(mesh: DeviceMesh, ranks_per_node: int) -> fcdp.Topology:
    """The topology of this rank's group, without asking other ranks: there are none."""
    nodes, groups = NODES_PER_STAGE, NODES // NODES_PER_STAGE
    names = ("stage", "inter", "intra")
    return over(mesh, init_device_mesh(NAME, (groups, nodes, ranks_per_node), mesh_dim_names=names))


def of_neighbour(stage: Any, other: int) -> Any:
    """Shapes as a stage is told them, of the tensors of the one before it, or after it."""
    shape = torch.Size((MICRO_BATCH, LENGTH, MODEL.width))
    stride = (LENGTH * MODEL.width, MODEL.width, 1)
    before = other < stage.stage_index
    meta = _TensorMeta(shape, stride, torch.bfloat16, requires_grad=before)
    return _StageForwardMeta((meta,)) if before else _StageBackwardMeta((meta,))


def agree(objects: list[Any], own: Any, group: Any = None) -> None:
    objects[:] = [own] * len(objects)


@contextmanager
def neighbours() -> Iterator[None]:
    """Other stages, which send and receive nothing, have tensors of the same shapes."""
    dynamic = SimpleNamespace(item=lambda: 0)  # as where shapes were not named
    schedules = "torch.distributed.pipelining.schedules"
    with (
        mock.patch("baselines.pipeline.groups.init_device_mesh", _with_contents(init_device_mesh)),
        mock.patch.object(fcdp.Topology, "of_mesh", _with_contents(topology_of)),
        mock.patch("simulation.imitated.rank._move"),
        mock.patch("baselines.pipeline.train._sharded", sharded_there),
        mock.patch.object(dist, "all_gather_object", agree),
        mock.patch.object(PipelineStage, "_warmup_forward_vote", return_value=dynamic),
        mock.patch.object(PipelineStage, "_warmup_backward_result", return_value=dynamic),
        mock.patch.object(PipelineStage, "_send_meta"),
        mock.patch.object(PipelineStage, "_recv_meta", of_neighbour),
        mock.patch(f"{schedules}._batch_p2p", return_value=[]),
        mock.patch("torch.random.fork_rng", return_value=nullcontext()),
    ):
        yield


def real(*all_studied: Staged) -> list[int]:
    """Most bytes that a device holds in a step of the real code, in the first and the last group.

    A process has one place in all worlds that it is in, one after another.
    """
    group = dist.get_rank() * (NODES // NODES_PER_STAGE - 1)
    leave_group()
    there = partial(world, NODES * RANKS_PER_NODE, NAME, rank=group * RANKS)
    peaks = []
    for studied in all_studied:
        with imitated(studied.device_bytes) as allocations, there(), imitated_host(), neighbours():
            rank = Rank(studied, NAME, build)
            rank.step(MICRO_BATCH)
            allocations.reset_peak()
            rank.step(MICRO_BATCH)
            peaks.append(allocations.peak[NAME])
    return peaks


@pytest.fixture(scope="module")
def peaks(apart: Pools) -> dict[PipelineSchedule, list[int]]:
    """Of each schedule that is studied, the peaks in the first and the last group.

    All in one run: the processes leave their pool's group.
    """
    first, last = apart.run(2, real, *STUDIED.values())
    return {schedule: [*both] for schedule, *both in zip(STUDIED, first, last, strict=True)}


@pytest.mark.parametrize("schedule", STUDIED)
def test_the_fullest_group_has_the_planned_peak(
    schedule: PipelineSchedule, peaks: dict[PipelineSchedule, list[int]]
) -> None:
    """Where a rank has two stages, the one that waits has no block under way."""
    assert 0.95 < planned(STUDIED[schedule], MICRO_BATCH) / max(peaks[schedule]) < 1.05
