"""Pipelines of one node per stage, and of groups of two that FCDP shards: bytes of real cells."""

from pathlib import Path

import pytest

from experiments.clusters.emulated import EmulatedCluster
from experiments.commands.kinds import PRELOADED
from experiments.records.cell import ClusterSpec
from tests.experiments.cells import Runner, model_spec

GROUPS = {"within_stage": "fcdp", "nodes_per_stage": 2}
LENGTH, WIDTH, LAYERS, NODES = 128, 128, 8, 4


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_groups_send_less_than_either_where_fcdp_and_a_pipeline_send_the_same(
    privileged: None, tmp_path: Path, ranks_per_node: int
) -> None:
    """By the kernel's counters, at T* tokens per step: half, but for the embeddings."""
    spec = ClusterSpec(nodes=NODES, ranks_per_node=ranks_per_node)
    model = model_spec("gpt2", layers=LAYERS, width=WIDTH)
    # T* = 2(n−1)/n · P / (2d) tokens, by the parameters of the blocks.
    tokens = 3 / 2 * 12 * LAYERS * WIDTH**2 / (2 * WIDTH)
    own = {"model": model, "sequence_length": LENGTH}
    own |= {"accumulation": round(tokens / (NODES * ranks_per_node * LENGTH)), "steps": 2}
    with EmulatedCluster(spec, [*PRELOADED, "experiments.worker.worker"]) as cluster:
        run = Runner(cluster, spec, tmp_path)
        groups = run("pipeline", **own, **GROUPS)
        alone = [run("pipeline", **own), run("fcdp", **own)]
    for result in (groups, *alone):
        least = result.measurement.inter_node_bytes_closed_form
        assert least <= result.sent <= 1.02 * least, result.cell.id
    assert alone[0].sent == pytest.approx(alone[1].sent, rel=0.1)
    assert min(each.sent for each in alone) >= 1.6 * groups.sent
    losses = [each.measurement.losses for each in (groups, *alone)]
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)
