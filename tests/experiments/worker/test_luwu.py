"""LuWu on an emulated cluster: bytes of all links by the kernel's count, and losses."""

import pytest

from experiments.records.cell import ClusterSpec
from tests.experiments.cells import Runner

CLUSTER = ClusterSpec(nodes=2, ranks_per_node=1)
#: Headers, encryption and acknowledgements beside the payload, and the measurement's own messages.
FRAMING = 0.05


def test_each_link_carries_what_the_table_says_and_losses_are_fsdp2s(run: Runner) -> None:
    settings = {"chunk_bytes": 65536, "inter_bandwidth_bits_per_s": 10**8}
    mine, fsdp2 = (run(strategy, **settings).measurement for strategy in ("luwu", "fsdp2"))
    assert mine.losses == pytest.approx(fsdp2.losses, rel=1e-4)
    parameters = 4 * mine.parameters
    links = mine.link_bytes_per_step
    expected = {
        "node received": 2 * parameters,
        "node sent": parameters,
        "server received": parameters,
        "server sent": 2 * parameters,
    }
    for link, payload in expected.items():
        assert payload * 0.99 <= links[link] <= payload * (1 + FRAMING), (link, links, parameters)
