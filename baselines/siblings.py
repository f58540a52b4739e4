"""The sibling systems of other papers, described as all strategies are; the registry has them.

Imports no engine, for programs that must not wait for torch.
"""

from __future__ import annotations

from baselines.description import ExtraProcess, Look, Strategy
from baselines.schedule import (
    CO2,
    CYCLIC,
    CYCLIC_INTERLEAVED,
    CYCLIC_RING,
    CYCLIC_ZERO,
    LOCAL_SGD,
)
from baselines.settings import (
    CO2Settings,
    CyclicSettings,
    FuyouSettings,
    LocalSGDSettings,
    LuWuSettings,
    SlowMoSettings,
)

SIBLINGS: tuple[Strategy, ...] = (
    Strategy(
        "cyclic",
        "ddp",
        "Cyclic Data Parallelism's update rules, on ranks that step together",
        CYCLIC,
        Look("#1F1F1F", "*"),
        numerics="own",
        built_by="cyclic.synchronous",
        settings=CyclicSettings,
        title="Cyclic",
    ),
    Strategy(
        "cyclic-ring",
        "cyclic",
        "Cyclic Data Parallelism by messages from rank to rank, two slots apart",
        CYCLIC_RING,
        Look("#3B3B3B", "o"),
        numerics="own",
        built_by="cyclic.ring:ring",
        settings=CyclicSettings,
    ),
    Strategy(
        "cyclic-zero",
        "cyclic",
        "the same, and a rank has its own stage and the one that it computes with",
        CYCLIC_ZERO,
        Look("#5A5A5A", "s"),
        numerics="own",
        built_by="cyclic.ring:zero",
        settings=CyclicSettings,
    ),
    Strategy(
        "cyclic-interleaved",
        "cyclic",
        "a step's micro-batches two slots apart on one device, as constant in memory",
        CYCLIC_INTERLEAVED,
        Look("#787878", "D"),
        numerics="own",
        built_by="cyclic.interleaved",
        settings=CyclicSettings,
    ),
    Strategy(
        "local-sgd",
        "co2",
        "Local SGD: steps apart, then the mean of all workers",
        LOCAL_SGD,
        Look("#C9A227", "s"),
        numerics="own",
        built_by="co2.train:local_sgd",
        settings=LocalSGDSettings,
    ),
    Strategy(
        "slowmo",
        "co2",
        "SlowMo: Local SGD with an outer momentum",
        LOCAL_SGD,
        Look("#997515", "D"),
        numerics="own",
        built_by="co2.train:local_sgd",
        settings=SlowMoSettings,
        title="SlowMo",
    ),
    Strategy(
        "co2",
        "co2",
        "CO2: steps apart, whose mean arrives while the next ones are computed",
        CO2,
        Look("#6B4E00", "^"),
        numerics="own",
        built_by="co2.train:co2",
        settings=CO2Settings,
        title="CO2",
    ),
    Strategy(
        "luwu",
        "luwu",
        "model in the network: a server steps, a switch sums and multicasts",
        None,
        Look("#D12E6A", "P"),
        settings=LuWuSettings,
        built_by="luwu.train",
        title="LuWu",
        extra=(
            ExtraProcess("switch", "baselines.luwu.switch:main", in_network=True),
            ExtraProcess("server", "baselines.luwu.server:main"),
        ),
    ),
    Strategy(
        "fuyou",
        "fuyou",
        "all state on SSD: one device, the optimizer inside backward",
        None,
        Look("#6C3D1E", "D"),
        built_by="fuyou.train",
        settings=FuyouSettings,
        title="Fuyou",
    ),
)
