"""Experts and replicas on meshes of their own: bytes between nodes by the kernel's counters.

The ledger is compared with the closed form on each rank, and a node's interface with its ranks'
ledgers and what FSDP2 adds up over replicas by itself.
"""

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

import fcdp
from baselines.links import transmitted_bytes
from experiments.clusters.emulated import EmulatedCluster
from experiments.clusters.interface import Launch, Outcome
from experiments.records.cell import ClusterSpec
from fcdp.engine import engine_of
from tests.fcdp import test_expert_meshes as experts
from tests.fcdp import test_replicas as replicas

pytestmark = [pytest.mark.usefixtures("privileged"), pytest.mark.system]
#: Layouts by name: experts whose shards cross nodes; whose tokens do, and the shards of what is
#: beside them; and two replicas of two nodes.
LAYOUTS = {
    "experts": experts.Layout(2, 2, ep=2),
    "tokens": experts.Layout(2, 2, ep=2, across=True),
    "replicas": replicas.Layout(4, 1, replicas=2),
}
#: Bytes of a node beside the payload: a share for headers and acknowledgements, and agreements,
#: barriers and tokens of all steps.
SHARE, FIXED_BYTES = 0.015, 120_000


def train(name: str, folder: str) -> None:
    """Train as the layout's own tests do, with matrices that outweigh all else; write bytes."""
    experts.WIDTH = replicas.WIDTH = 384
    experts.HIDDEN, experts.TOKENS = 128, 1
    dist.init_process_group("gloo")
    layout, interface = LAYOUTS[name], os.environ["FCDP_INTERFACE"]
    tests = experts if isinstance(layout, experts.Layout) else replicas
    model = tests.set_up(layout, cached=True)
    units = engine_of(model).units
    nodes = {unit.topology.world_size: unit.topology.nodes for unit in units}
    before = transmitted_bytes(interface)
    dist.barrier()
    experts.train(model, nodes)
    dist.barrier()
    counted = transmitted_bytes(interface) - before
    over_replicas = 0
    if isinstance(layout, experts.Layout):
        assert experts.miscounted(layout, model) == []
    else:
        assert replicas.miscounted(layout, model, experts.STEPS * len(units)) == []
        ring = 2 * (layout.replicas - 1) / layout.replicas
        over_replicas = sum(experts.STEPS * ring * unit.shard_numel * 8 for unit in units)
    sent = sum(fcdp.ledger(model).snapshot()["inter_node"].values()) + over_replicas
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps([counted, sent]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_kernel_counts_the_closed_form_within_headers(
    fork_server: None, tmp_path: Path, name: str
) -> None:
    layout = LAYOUTS[name]
    spec = ClusterSpec(nodes=layout.nodes, ranks_per_node=layout.ranks_per_node)
    entry, arguments = f"{__name__}:train", (name, str(tmp_path))
    with EmulatedCluster(spec, preload=("torch.distributed.fsdp", __name__)) as cluster:
        launch = Launch(entry=entry, arguments=arguments, logs=tmp_path / "logs", timeout_s=200)
        assert cluster.run(launch) == Outcome("ok")
    ranks = [json.loads((tmp_path / f"{at}.json").read_text()) for at in range(layout.world_size)]
    for first in range(0, layout.world_size, layout.ranks_per_node):
        of_node = ranks[first : first + layout.ranks_per_node]
        counted, sent = of_node[0][0], sum(each[1] for each in of_node)
        assert sent <= counted <= (1 + SHARE) * sent + FIXED_BYTES
