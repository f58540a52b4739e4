"""Pipelines of one node per stage, and of groups of two that FCDP shards: bytes of real cells."""

import pytest

from experiments.records.cell import ClusterSpec
from tests.experiments.cells import Runner, model_spec

CLUSTER = ClusterSpec(nodes=4, ranks_per_node=2)
LENGTH, WIDTH, LAYERS = 128, 128, 8


@pytest.mark.drawn
def test_groups_send_less_than_either_where_fcdp_and_a_pipeline_send_the_same(run: Runner) -> None:
    """By the kernel's counters, at T* tokens per step: half, but for the embeddings."""
    own = {"model": model_spec("gpt2", layers=LAYERS, width=WIDTH), "sequence_length": LENGTH}
    # T* = 2(n−1)/n · P / (2d) tokens, by the parameters of the blocks.
    tokens = 3 / 2 * 12 * LAYERS * WIDTH**2 / (2 * WIDTH)
    ranks = CLUSTER.nodes * CLUSTER.ranks_per_node
    own |= {"accumulation": round(tokens / (ranks * LENGTH)), "steps": 2}
    groups = run("pipeline", **own, within_stage="fcdp", nodes_per_stage=2)
    alone = [run("pipeline", **own), run("fcdp", **own)]
    for result in (groups, *alone):
        least = result.measurement.inter_node_bytes_closed_form
        assert least <= result.sent <= 1.02 * least, result.cell.id
    assert alone[0].sent == pytest.approx(alone[1].sent, rel=0.1)
    assert min(each.sent for each in alone) >= 1.6 * groups.sent
    losses = [each.measurement.losses for each in (groups, *alone)]
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)
