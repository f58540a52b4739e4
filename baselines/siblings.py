"""Strategies of sibling systems, which have a folder each: entries of the registry's list."""

from __future__ import annotations

from baselines.description import Look, Strategy
from baselines.settings import CyclicSettings, FuyouSettings

CYCLIC = (
    Strategy(
        "cyclic",
        "ddp",
        "Cyclic Data Parallelism's update rules, on ranks that step together",
        None,
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
        None,
        Look("#3B3B3B", "o"),
        numerics="own",
        built_by="cyclic.ring:ring",
        settings=CyclicSettings,
    ),
    Strategy(
        "cyclic-zero",
        "cyclic",
        "the same, and a rank has its own stage and the one that it computes with",
        None,
        Look("#5A5A5A", "s"),
        numerics="own",
        built_by="cyclic.ring:zero",
        settings=CyclicSettings,
    ),
    Strategy(
        "cyclic-interleaved",
        "cyclic",
        "a step's micro-batches two slots apart on one device, as constant in memory",
        None,
        Look("#787878", "D"),
        numerics="own",
        built_by="cyclic.interleaved",
        settings=CyclicSettings,
    ),
)
FUYOU = Strategy(
    "fuyou",
    "fuyou",
    "all state on SSD: one device, the optimizer inside backward",
    None,
    Look("#6C3D1E", "D"),
    built_by="fuyou.train",
    settings=FuyouSettings,
    title="Fuyou",
)
