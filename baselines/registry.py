"""The strategies, each described once: whatever else knows one derives it from here.

Imports no engine, for programs that must not wait for torch.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path

from baselines.description import Look, Strategy
from baselines.schedule import DDP, DEEPSPEED, FCDP, FSDP2, Schedule, within_node
from baselines.settings import (
    CacheSettings,
    DeepSpeedSettings,
    EncodedSettings,
    Settings,
)
from baselines.siblings import SIBLINGS


def has_cuda() -> bool:
    """Whether ranks here would compute on CUDA: an NVIDIA driver, and a torch that can use it."""
    return Path("/proc/driver/nvidia/version").exists() and "+cpu" not in metadata.version("torch")


_FUSED = "quantises with its CUDA operator quantizer, which has no CPU build"
_COALESCED = "gathers MiCS's shards by NCCL's coalesced all-gather, which gloo has not"
_DEEPSPEED_HPZ = replace(DEEPSPEED, cache="device")
_DEEPSPEED_OFFLOAD = replace(DEEPSPEED, optimizer="host")
# The order is that of tables and figures. One hue per engine (DeepSpeed warm, PyTorch blue, this
# one purple; FCDP alone is green) and one marker per strategy. The three main ones have Okabe and
# Ito's colours, which stay apart under the common colour-vision deficiencies; markers say the same
# in black and white.
STRATEGIES: tuple[Strategy, ...] = (
    Strategy(
        "deepspeed-zero3",
        "deepspeed",
        "ZeRO stage 3",
        DEEPSPEED,
        Look("#D55E00", "s"),
        title="DeepSpeed ZeRO-3",
        built_by="deepspeed.variants:zero3",
        settings=DeepSpeedSettings,
    ),
    Strategy(
        "deepspeed-hpz",
        "deepspeed",
        "ZeRO++ hpZ: a second shard inside the node",
        _DEEPSPEED_HPZ,
        Look("#E69F00", "D"),
        built_by="deepspeed.variants:hpz",
        settings=DeepSpeedSettings,
    ),
    Strategy(
        "deepspeed-hpz-offload",
        "deepspeed",
        "hpZ, with parameters on the CPU",
        # A second shard in host memory: copied a parameter at a time, while nothing computes.
        replace(DEEPSPEED, cache="host", parameters="host", blocking=True),
        Look("#8C3B00", "X"),
        built_by="deepspeed.variants:hpz_offload",
        settings=DeepSpeedSettings,
    ),
    Strategy(
        "deepspeed-offload",
        "deepspeed",
        "ZeRO-Offload: optimizer on the CPU",
        _DEEPSPEED_OFFLOAD,
        Look("#F0904F", "v"),
        operators=("CPUAdamBuilder",),
        built_by="deepspeed.variants:offload",
        settings=DeepSpeedSettings,
    ),
    Strategy(
        "deepspeed-offload-param",
        "deepspeed",
        "ZeRO-Offload: parameters on the CPU too",
        replace(_DEEPSPEED_OFFLOAD, parameters="host"),
        Look("#A67C00", "<"),
        operators=("CPUAdamBuilder",),
        built_by="deepspeed.variants:offload_param",
        settings=DeepSpeedSettings,
    ),
    Strategy(
        "deepspeed-infinity",
        "deepspeed",
        "ZeRO-Infinity: parameters and optimizer on NVMe",
        replace(DEEPSPEED, parameters="disk", optimizer="disk"),
        Look("#5C2E00", ">"),
        operators=("AsyncIOBuilder", "CPUAdamBuilder"),
        needs_header=(Path("/usr/include/libaio.h"), "libaio-dev"),
        built_by="deepspeed.variants:infinity",
        settings=DeepSpeedSettings,
    ),
    Strategy(
        "deepspeed-qwz",
        "deepspeed",
        "ZeRO++ qwZ: int8 gathers",
        replace(DEEPSPEED, gather_codec="int8"),
        Look("#FFB000", "P"),
        numerics="bounded",
        needs_cuda=_FUSED,
        built_by="deepspeed.variants:qwz",
        settings=DeepSpeedSettings,
    ),
    Strategy(
        "deepspeed-qgz",
        "deepspeed",
        "ZeRO++ qgZ: int4 reductions",
        # Its quantised reduction is two all-to-alls, inside the node and across.
        replace(DEEPSPEED, reduce_codec="int4"),
        Look("#C04000", "p"),
        numerics="bounded",
        needs_cuda=_FUSED,
        built_by="deepspeed.variants:qgz",
        settings=DeepSpeedSettings,
    ),
    Strategy(
        "deepspeed-zeropp",
        "deepspeed",
        "ZeRO++: hpZ, qwZ and qgZ",
        replace(_DEEPSPEED_HPZ, gather_codec="int8", reduce_codec="int4"),
        Look("#7A5C00", "h"),
        numerics="bounded",
        needs_cuda=_FUSED,
        built_by="deepspeed.variants:zeropp",
        settings=DeepSpeedSettings,
    ),
    Strategy(
        "deepspeed-mics",
        "deepspeed",
        "MiCS: sharded inside the node",
        within_node(DEEPSPEED),
        Look("#B35900", "*"),
        needs_cuda=_COALESCED,
        built_by="deepspeed.variants:mics",
        settings=DeepSpeedSettings,
    ),
    Strategy(
        "deepspeed-mics-hierarchical",
        "deepspeed",
        "MiCS, gathers in two hops",
        # Its two hops are inside the shard group, here one node: the same exchanges.
        within_node(DEEPSPEED),
        Look("#A0522D", "d"),
        needs_cuda=_COALESCED,
        built_by="deepspeed.variants:mics_hierarchical",
        settings=DeepSpeedSettings,
    ),
    Strategy(
        "fsdp2",
        "fsdp2",
        "ZeRO-3 as PyTorch ships it",
        FSDP2,
        Look("#0072B2", "^"),
        title="FSDP2",
        built_by="pytorch.fsdp2",
    ),
    Strategy(
        "fsdp2-hsdp",
        "fsdp2",
        "hybrid sharding: inside the node, replicated across",
        within_node(FSDP2),
        Look("#56B4E9", "D"),
        built_by="pytorch.hybrid",
    ),
    Strategy(
        "fsdp2-reshard",
        "fsdp2",
        "resharded over the node after forward, as hpZ does",
        replace(FSDP2, cache="device", cached_for="micro-batch"),
        Look("#003F6B", "s"),
        built_by="pytorch.reshard",
    ),
    Strategy(
        "fsdp2-offload",
        "fsdp2",
        "parameters and optimizer on the CPU",
        replace(FSDP2, parameters="host", optimizer="host"),
        Look("#7B9FC4", "v"),
        built_by="pytorch.fsdp2:offload",
    ),
    Strategy(
        "ddp",
        "ddp",
        "replicated on every rank",
        DDP,
        Look("#4D4D4D", "P"),
        built_by="pytorch.ddp",
    ),
    Strategy(
        "zero3",
        "fcdp",
        "ZeRO-3 over this engine: nothing is cached",
        replace(FCDP, policy="none"),
        Look("#CC79A7", "s"),
        built_by="presets.fcdp",
        settings=EncodedSettings,
    ),
    Strategy(
        "hpz",
        "fcdp",
        "ZeRO++ hpZ over this engine: cached on the device",
        replace(FCDP, policy="device"),
        Look("#882255", "D"),
        built_by="presets.fcdp",
        settings=EncodedSettings,
    ),
    Strategy(
        "qwz",
        "fcdp",
        "ZeRO++ qwZ over this engine: int8 gathers",
        replace(FCDP, policy="none", gather_codec="int8"),
        Look("#AA4499", "v"),
        numerics="bounded",
        built_by="presets.fcdp",
        settings=EncodedSettings,
    ),
    Strategy(
        "qgz",
        "fcdp",
        "ZeRO++ qgZ over this engine: int4 reductions",
        replace(FCDP, policy="none", reduce_codec="int4"),
        Look("#5B3F8C", "<"),
        numerics="bounded",
        built_by="presets.fcdp",
        settings=EncodedSettings,
    ),
    Strategy(
        "zeropp",
        "fcdp",
        "ZeRO++ over this engine: hpZ, qwZ and qgZ",
        replace(FCDP, policy="device", gather_codec="int8", reduce_codec="int4"),
        Look("#9C86CF", "P"),
        numerics="bounded",
        built_by="presets.fcdp",
        settings=EncodedSettings,
    ),
    Strategy(
        "mics",
        "fcdp",
        "MiCS over this engine: sharded inside the node",
        within_node(FCDP),
        built_by="presets.mics",
    ),
    Strategy(
        "offload",
        "fcdp",
        "ZeRO-Offload over this engine: parts and optimizer on the CPU",
        replace(FCDP, policy="none", parameters="host", optimizer="host"),
        built_by="presets.fcdp:offload",
        settings=EncodedSettings,
    ),
    Strategy(
        "replicated",
        "fcdp",
        "data parallel over this engine: one all-reduce a step",
        # One all-reduce when backward has ended.
        replace(DDP, hierarchical=True, pairwise=True, caches_own_shard=False),
        built_by="presets.replicated",
    ),
    Strategy(
        "fcdp-sched",
        "fcdp",
        "FCDP without FCDP-Comm: frozen parameters cross each step",
        replace(FCDP, cached_for="step"),
        Look("#7B4173", "^"),
        built_by="presets.sched",
        settings=CacheSettings,
    ),
    Strategy(
        "fcdp",
        "fcdp",
        "cached in host memory, or as the cell's policy says",
        FCDP,
        Look("#009E73", "o"),
        title="FCDP",
        built_by="presets.fcdp",
        settings=CacheSettings,
    ),
    *SIBLINGS,
)

STRATEGY_NAMES: tuple[str, ...] = tuple(strategy.name for strategy in STRATEGIES)


def find(name: str) -> Strategy:
    """The strategy of this name. Raises ``ValueError`` for one that does not exist."""
    for strategy in STRATEGIES:
        if strategy.name == name:
            return strategy
    raise ValueError(f"strategy = {name!r}: allowed are {', '.join(STRATEGY_NAMES)}")


def settings_types() -> tuple[type[Settings], ...]:
    """The strategies' types of settings, those with most fields first."""
    kinds = dict.fromkeys(strategy.settings for strategy in STRATEGIES)
    return tuple(sorted(kinds, key=lambda kind: -len(kind.model_fields)))


def setting_names() -> tuple[str, ...]:
    """Names of all settings that some strategy has beside what all cells have."""
    return tuple(dict.fromkeys(name for kind in settings_types() for name in kind.model_fields))


def simulated() -> tuple[str, ...]:
    """Names of the strategies whose schedule is described."""
    return tuple(strategy.name for strategy in STRATEGIES if strategy.schedule is not None)


def schedule_of(name: str) -> Schedule:
    """The schedule of the strategy of this name.

    Raises ``ValueError`` for one that does not exist or is not simulated.
    """
    found = find(name).schedule
    if found is None:
        raise ValueError(
            f"strategy = {name!r}: is not simulated yet; allowed are {', '.join(simulated())}"
        )
    return found
