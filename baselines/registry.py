"""The strategies, each described once: whatever else knows one derives it from here.

Imports no engine, for programs that must not wait for torch.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from baselines.description import Engine, ExtraProcess, Look, Strategy
from baselines.schedule import (
    CO2,
    CYCLIC,
    CYCLIC_INTERLEAVED,
    CYCLIC_RING,
    CYCLIC_ZERO,
    DDP,
    DEEPSPEED,
    FCDP,
    FSDP2,
    LOCAL_SGD,
    STAGES,
    STREAMING,
    Schedule,
    within_node,
)
from baselines.settings import (
    CacheSettings,
    CO2Settings,
    CyclicSettings,
    DeepSpeedSettings,
    DiLoCoSettings,
    EncodedSettings,
    FSDP2Settings,
    FuyouSettings,
    LocalSGDSettings,
    LuWuSettings,
    PaperSettings,
    PipelineSettings,
    Settings,
    SlowMoSettings,
    StreamingSettings,
)


def has_cuda() -> bool:
    """Whether ranks here would compute on CUDA: an NVIDIA driver, and a torch that can use it."""
    return Path("/proc/driver/nvidia/version").exists() and "+cpu" not in metadata.version("torch")


_FUSED = "quantises with its CUDA operator quantizer, which has no CPU build"
_COALESCED = "gathers MiCS's shards by NCCL's coalesced all-gather, which gloo has not"
_GLOO = "replaces gloo's collectives; over NCCL fsdp2 has NCCL's own, and zero3 hierarchical ones"
_DEEPSPEED_HPZ = replace(DEEPSPEED, cache="device")
_DEEPSPEED_OFFLOAD = replace(DEEPSPEED, optimizer="host")


def _offloaded(schedule: Schedule) -> Schedule:
    """The schedule whose shards wait in host memory, where the optimizer steps too."""
    return replace(schedule, parameters="host", optimizer="host")


def _of(engine: Engine, **usual: Any) -> Callable[..., Strategy]:
    """A constructor of one engine's strategies, whose usual fields each may override."""
    return lambda name, what, *more, **own: Strategy(name, engine, what, *more, **(usual | own))


_deepspeed = _of("deepspeed", built_by="deepspeed.configuration", settings=DeepSpeedSettings)
_pytorch = _of("fsdp2", built_by="pytorch.fsdp2")
#: Strategies over this library that fix where parameters are cached.
_preset = _of("fcdp", built_by="presets.fcdp", settings=EncodedSettings)
#: Strategies with an optimization of their own.
_cyclic = _of("cyclic", built_by="cyclic.ring:Executor", settings=CyclicSettings, numerics="own")
_co2 = _of("co2", built_by="co2.train:LocalSteps", numerics="own")


# fmt: off
#: Systems of other papers.
SIBLINGS: tuple[Strategy, ...] = (
    Strategy("cyclic", "ddp", "Cyclic Data Parallelism's update rules, on ranks that step together",
             CYCLIC, Look("#1F1F1F", "*"), numerics="own", built_by="cyclic.synchronous:Cyclic",
             settings=CyclicSettings, title="Cyclic"),
    _cyclic("cyclic-ring", "Cyclic Data Parallelism by messages from rank to rank, two slots apart",
            CYCLIC_RING, Look("#3B3B3B", "o")),
    _cyclic("cyclic-zero",
            "the same, and a rank has its own stage and the one that it computes with",
            CYCLIC_ZERO, Look("#5A5A5A", "s")),
    _cyclic("cyclic-interleaved",
            "a step's micro-batches two slots apart on one device, as constant in memory",
            CYCLIC_INTERLEAVED, Look("#787878", "D"), built_by="cyclic.interleaved:Interleaved"),
    _co2("local-sgd", "Local SGD: steps apart, then the mean of all workers", LOCAL_SGD,
         Look("#C9A227", "s"), settings=LocalSGDSettings),
    _co2("slowmo", "SlowMo: Local SGD with an outer momentum", LOCAL_SGD, Look("#997515", "D"),
         settings=SlowMoSettings, title="SlowMo"),
    _co2("co2", "CO2: steps apart, whose mean arrives while the next ones are computed", CO2,
         Look("#6B4E00", "^"), settings=CO2Settings, title="CO2"),
    _co2("diloco", "DiLoCo: Local SGD whose outer step is Nesterov's", LOCAL_SGD,
         Look("#8A8D00", "v"), settings=DiLoCoSettings, title="DiLoCo"),
    _co2("streaming-diloco",
         "Streaming DiLoCo: fragments of the model in turn, each while steps are computed",
         STREAMING, Look("#4F5200", "P"), settings=StreamingSettings, title="Streaming DiLoCo"),
    Strategy("luwu", "luwu", "model in the network: a server steps, a switch sums and multicasts",
             None, Look("#D12E6A", "P"), settings=LuWuSettings, built_by="luwu.train", title="LuWu",
             extra=(ExtraProcess("switch", "baselines.luwu.switch:main", in_network=True),
                    ExtraProcess("server", "baselines.luwu.server:main"))),
    Strategy("fuyou", "fuyou", "all state on SSD: one device, the optimizer inside backward",
             None, Look("#6C3D1E", "D"), settings=FuyouSettings, built_by="fuyou.train",
             title="Fuyou"),
)

# The order is that of tables and figures. One hue per engine (DeepSpeed warm, PyTorch blue, this
# one purple; FCDP alone is green) and one marker per strategy. The three main ones have Okabe and
# Ito's colours, which stay apart under the common colour-vision deficiencies; markers say the same
# in black and white.
STRATEGIES: tuple[Strategy, ...] = (
    _deepspeed("deepspeed-zero3", "ZeRO stage 3", DEEPSPEED, Look("#D55E00", "s"),
               title="DeepSpeed ZeRO-3"),
    _deepspeed("deepspeed-hpz", "ZeRO++ hpZ: a second shard inside the node", _DEEPSPEED_HPZ,
               Look("#E69F00", "D")),
    # A second shard in host memory: copied a parameter at a time, while nothing computes.
    _deepspeed("deepspeed-hpz-offload", "hpZ, with parameters on the CPU",
               replace(DEEPSPEED, cache="host", parameters="host", blocking=True),
               Look("#8C3B00", "X")),
    _deepspeed("deepspeed-offload", "ZeRO-Offload: optimizer on the CPU", _DEEPSPEED_OFFLOAD,
               Look("#F0904F", "v"), operators=("CPUAdamBuilder",)),
    _deepspeed("deepspeed-offload-param", "ZeRO-Offload: parameters on the CPU too",
               replace(_DEEPSPEED_OFFLOAD, parameters="host"), Look("#A67C00", "<"),
               operators=("CPUAdamBuilder",)),
    _deepspeed("deepspeed-infinity", "ZeRO-Infinity: parameters and optimizer on NVMe",
               replace(DEEPSPEED, parameters="disk", optimizer="disk"), Look("#5C2E00", ">"),
               operators=("AsyncIOBuilder", "CPUAdamBuilder"),
               needs_header=(Path("/usr/include/libaio.h"), "libaio-dev")),
    _deepspeed("deepspeed-qwz", "ZeRO++ qwZ: int8 gathers", replace(DEEPSPEED, gather_codec="int8"),
               Look("#FFB000", "P"), numerics="bounded", needs_cuda=_FUSED),
    # Its quantised reduction is two all-to-alls, inside the node and across.
    _deepspeed("deepspeed-qgz", "ZeRO++ qgZ: int4 reductions",
               replace(DEEPSPEED, reduce_codec="int4"), Look("#C04000", "p"),
               numerics="bounded", needs_cuda=_FUSED),
    _deepspeed("deepspeed-zeropp", "ZeRO++: hpZ, qwZ and qgZ",
               replace(_DEEPSPEED_HPZ, gather_codec="int8", reduce_codec="int4"),
               Look("#7A5C00", "h"), numerics="bounded", needs_cuda=_FUSED),
    _deepspeed("deepspeed-mics", "MiCS: sharded inside the node", within_node(DEEPSPEED),
               Look("#B35900", "*"), needs_cuda=_COALESCED),
    # Its two hops are inside the shard group, here one node: the same exchanges.
    _deepspeed("deepspeed-mics-hierarchical", "MiCS, gathers in two hops", within_node(DEEPSPEED),
               Look("#A0522D", "d"), built_by="deepspeed.configuration:in_two_hops",
               needs_cuda=_COALESCED),
    _pytorch("fsdp2", "ZeRO-3 as PyTorch ships it", FSDP2, Look("#0072B2", "^"), title="FSDP2",
             settings=FSDP2Settings),
    _pytorch("fsdp2-hsdp", "hybrid sharding: inside the node, replicated across",
             within_node(FSDP2), Look("#56B4E9", "D"), settings=FSDP2Settings),
    _pytorch("fsdp2-hsdp-offload", "hybrid sharding, with parameters and optimizer on the CPU",
             _offloaded(within_node(FSDP2)), Look("#3A6EA5", "X"), settings=FSDP2Settings),
    _pytorch("fsdp2-reshard", "resharded over the node after forward, as hpZ does",
             replace(FSDP2, cache="device", cached_for="micro-batch"), Look("#003F6B", "s")),
    _pytorch("fsdp2-offload", "parameters and optimizer on the CPU",
             _offloaded(FSDP2), Look("#7B9FC4", "v")),
    # Its gathers run ahead by FSDP2's own hooks.
    _pytorch("fsdp2-hierarchical", "ZeRO-3 by FSDP2 over hierarchical exchanges, which overlap",
             replace(FSDP2, hierarchical=True, pairwise=True, gathers_ahead_on_host=True),
             Look("#2E4BA0", "p"), settings=FSDP2Settings, built_by="presets.hierarchical",
             cpu_only=_GLOO),
    Strategy("pipeline", "pipeline", "a stage per node, or per group of nodes", STAGES["sharded"],
             Look("#1B9CFC", "h"), settings=PipelineSettings, built_by="pipeline.train",
             title="Pipeline"),
    Strategy("ddp", "ddp", "replicated on every rank", DDP, Look("#4D4D4D", "P"),
             built_by="pytorch.ddp"),
    _preset("zero3", "ZeRO-3 over this engine: nothing is cached", replace(FCDP, policy="none"),
            Look("#CC79A7", "s")),
    _preset("hpz", "ZeRO++ hpZ over this engine: cached on the device",
            replace(FCDP, policy="device"), Look("#882255", "D")),
    _preset("qwz", "ZeRO++ qwZ over this engine: int8 gathers",
            replace(FCDP, policy="none", gather_codec="int8"), Look("#AA4499", "v"),
            numerics="bounded"),
    _preset("qgz", "ZeRO++ qgZ over this engine: int4 reductions",
            replace(FCDP, policy="none", reduce_codec="int4"), Look("#5B3F8C", "<"),
            numerics="bounded"),
    _preset("zeropp", "ZeRO++ over this engine: hpZ, qwZ and qgZ",
            replace(FCDP, policy="device", gather_codec="int8", reduce_codec="int4"),
            Look("#9C86CF", "P"), numerics="bounded"),
    Strategy("mics", "fcdp", "MiCS over this engine: sharded inside the node", within_node(FCDP),
             built_by="presets.mics"),
    _preset("offload", "ZeRO-Offload over this engine: parts and optimizer on the CPU",
            _offloaded(replace(FCDP, policy="none"))),
    # One all-reduce when backward has ended.
    Strategy("replicated", "fcdp", "data parallel over this engine: one all-reduce a step",
             replace(DDP, hierarchical=True, pairwise=True, caches_own_shard=False),
             built_by="presets.replicated:Replicated"),
    _preset("fcdp-paper", "FCDP as its paper has it: flat exchanges, those of each micro-batch",
            FCDP.exchanging("flat"), Look("#4B0082", "X"), settings=PaperSettings),
    _preset("fcdp-sched", "FCDP without FCDP-Comm: frozen parameters cross each step",
            replace(FCDP, cached_for="step"), Look("#7B4173", "^"), settings=CacheSettings),
    _preset("fcdp-offload", "FCDP, with parts and optimizer on the CPU beside the cache",
            _offloaded(FCDP), Look("#2E1A47", ">"), settings=CacheSettings),
    _preset("fcdp", "cached in host memory, or as the cell's policy says", FCDP,
            Look("#009E73", "o"), settings=CacheSettings, title="FCDP"),
    *SIBLINGS,
)
# fmt: on

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
    schedule = find(name).schedule
    if schedule is None:
        raise ValueError(
            f"strategy = {name!r}: is not simulated yet; allowed are {', '.join(simulated())}"
        )
    return schedule
