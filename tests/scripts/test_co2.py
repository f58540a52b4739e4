"""The tables of CO2's records, of made-up ones."""

from __future__ import annotations

from typing import Any

from experiments.records.cell import ClusterSpec
from experiments.records.record import Record
from scripts import tables
from tests.experiments.stand_in import cell, record


def trained(strategy: str, seed: int, loss: float, **settings: Any) -> Record:
    return record(cell(strategy=strategy, seed=seed, **settings), held_out_loss=loss)


def test_each_seed_is_compared_with_its_own_ddp() -> None:
    ddp = [trained("ddp", seed, loss) for seed, loss in ((0, 2.0), (1, 4.0))]
    plain = {"penalty": "none", "clip": None}
    clipped = {"penalty": "none", "clip": 1.0}
    late = [
        trained("co2", 0, 2.2, **plain),
        trained("co2", 1, 4.8, **plain),
        trained("co2", 0, 2.02, **clipped),
        trained("co2", 1, 4.04, **clipped),
    ]
    head, _, row = tables.behind([*ddp, *late]).splitlines()
    assert head == "| Penalty | no clipping | φ = 1 |"
    assert row == "| `none` | 15 ± 7 % | 1.0 ± 0.0 % |"


def test_a_lag_is_at_the_learning_rate_of_most_seeds() -> None:
    records = [
        *(trained("ddp", seed, loss, learning_rate=0.1) for seed, loss in ((0, 2.0), (1, 4.0))),
        trained("ddp", 0, 1.0, learning_rate=0.2),
        *(trained("co2", seed, 2.2 * (seed + 1), interval=3) for seed in (0, 1)),
        *(trained("co2", seed, 2.4 * (seed + 1), interval=12) for seed in (0, 1)),
        *(trained("local-sgd", seed, 2.02 * (seed + 1), interval=12) for seed in (0, 1)),
    ]
    head, _, *rows = tables.lag(records).splitlines()
    assert head == "| τ | co2 | local-sgd |"
    assert rows == [
        "| 3 | 10.0 ± 0.0 % | – |",
        "| 12 | 20.0 ± 0.0 % | 1.0 ± 0.0 % |",
        "",
        "Learning rates: ddp 0.1, co2 0.001, local-sgd 0.001.",
    ]


def test_what_there_is_no_record_of_is_left_out() -> None:
    alone = [trained("co2", 0, 2.2, penalty="none", clip=None, interval=3)]
    assert tables.behind(alone).splitlines()[-1] == "| `none` | – |"
    assert "| 3 | – |" in tables.lag(alone)
    paired = [trained("ddp", 0, 2.0), *alone, trained("co2", 1, 9.0, penalty="none", clip=None)]
    assert tables.behind(paired).splitlines()[-1] == "| `none` | 10.0 % |"


def test_each_keeps_a_share_of_its_own_speed_with_as_many_workers() -> None:
    def of(nodes: int, strategy: str, free: float, slow: float, **settings: Any) -> list[Record]:
        cluster = ClusterSpec(nodes=nodes, ranks_per_node=1)
        return [
            record(
                cell(
                    strategy=strategy, cluster=cluster, inter_bandwidth_bits_per_s=link, **settings
                ),
                step_seconds=[seconds],
            )
            for link, seconds in ((None, free), (10**7, slow))
        ]

    matrices = [
        [
            *of(nodes, "ddp", 1.0, slow),
            *of(nodes, "co2", 1.0, 1.25, interval=3),
        ]
        for nodes, slow in ((2, 10.0), (4, 20.0))
    ]
    head, _, *rows, _, note = tables.kept_by_workers(matrices).splitlines()
    assert note.startswith("4 speed-ups are of fewer than 6 rounds")
    assert head == "| Keeps, with workers | 2 | 4 |"
    assert rows == ["| ddp | 10 % | 5.0 % |", "| co2, τ = 3 | 80 % | 80 % |"]
