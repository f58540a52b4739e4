"""Rules for cells, and reasons why one is refused or skipped: each is written here, once.

- ``mismatches`` and ``mismatches_of_nodes``: settings that do not go together; and
  ``why_not_given``: a value that a matrix file may not give on its kind of cluster. The reader of
  the file raises ``ValueError`` with file, line and key.
- ``why_not_here`` and ``why_not_simulated``: what this machine, or the simulator, cannot do. The
  cell is skipped, and its record says why.
- ``why_too_large``: a cell that this machine has too little memory for; the run does not begin.

Two kinds of mistakes stand elsewhere: the type and range of one setting where it is declared
(``Cell``, ``baselines.settings``, ``experiments.records.workload`` and ``objective``), and what is
wrong with a file (an unknown key, a file that is not there) in ``experiments.matrix``.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from baselines import pins, registry
from baselines.description import Strategy
from baselines.encoding import EXPONENTS
from baselines.pins import Pin
from baselines.schedule import STAGES
from baselines.settings import ONE_STAGE, SEVERAL_STAGES, divided
from experiments.records.cell import AnyCluster, Cell, ClusterSpec, FrozenDType
from experiments.records.objective import DPO, GRPO, CausalLM
from experiments.records.workload import (
    ConfiguredModel,
    Group,
    ImageModel,
    Images,
    OwnModel,
    needed,
)
from fcdp import sizes
from simulation import models
from simulation.hardware import card
from simulation.luwu import LUWU
from simulation.planner.request import holds_packed
from simulation.quantities import UNSHAPED, format_link
from simulation.transformer import ATTENTION, Transformer

#: A field and why its value is refused, in words that name the value.
Mismatch = tuple[str, str]

#: Engines whose model an objective can call as it likes, outside of a training step.
_WHOLE_CALLS = ("fcdp", "fsdp2", "ddp", "deepspeed")
#: Packages by the types of frozen parameters that are packed, or gathered so.
PACKED: Mapping[FrozenDType, str] = {
    "float8": "torchao",
    "nf4": "torchao",
    "bnb-4bit": "bitsandbytes",
}
#: Settings in a matrix file that are fields of a simulated cluster, which cells may differ in.
OF_CLUSTER = ("nodes", "inter_efficiency")
#: Value of ``micro_batch`` in a matrix file: the largest that fits by the simulator, or 1 if none.
LARGEST = "max"


def mismatches_of_nodes(cluster: ClusterSpec) -> Iterator[Mismatch]:
    """Fields of a cluster of nodes that do not fit the others."""
    if cluster.groups > 1 and not cluster.can.make_nodes:
        why = f"allowed is 1 on clusters of kind {cluster.kind}, whose links are as they are"
        yield "groups", _not(cluster.groups, why)
    if problem := divided(cluster.groups, cluster.nodes):
        yield "groups", _not(cluster.groups, problem)
    if cluster.cores != "shared" and not cluster.can.make_nodes:
        why = f"allowed is shared on clusters of kind {cluster.kind}, whose nodes are apart"
        yield "cores", _not(cluster.cores, why)


def mismatches(cell: Cell) -> Iterator[Mismatch]:
    """Fields of a cell, and settings of its strategy, that do not fit the others."""
    yield from _of_links(cell)
    yield from _of_strategy(cell)
    yield from _of_images(cell)
    yield from _of_objective(cell)
    if cell.frozen_dtype != "float32" and (cell.tuning, cell.dtype) != ("lora", "bfloat16"):
        why = f"{cell.frozen_dtype} is for tuning lora, in which parameters are frozen, with dtype"
        yield "frozen_dtype", f"{why} bfloat16, not for {cell.tuning} with {cell.dtype}"
    if cell.frozen_dtype in PACKED and not holds_packed(cell.strategy):
        why = f"{cell.frozen_dtype} is not known to be held by {cell.strategy}"
        yield "frozen_dtype", f"{why}; allowed are float32 and bfloat16"
    elif cell.frozen_dtype == "nf4" and _shards_for_one(cell):
        why = "nf4 is several tensors, of which FSDP2 takes one where each rank has a whole model"
        why += f", as {cell.strategy} has it on this cluster"
        yield "frozen_dtype", f"{why}; allowed are float32, bfloat16, float8 and bnb-4bit"
    if cell.recomputed and cell.cluster.can.start_processes:
        why = f"{cell.recomputed:g} {_for_simulated(cell.cluster)}"
        yield "recomputed", f"{why}: the worker recomputes nothing"
    if cell.checkpoint_every and not registry.find(cell.strategy).is_saved:
        allowed = ", ".join(each.name for each in registry.STRATEGIES if each.is_saved)
        why = f"{cell.checkpoint_every} is not for {cell.strategy}, allowed is 0"
        yield "checkpoint_every", f"{why}; others are for {allowed}"
    if cell.checkpoint_every and not isinstance(cell.objective, CausalLM):
        why = f"{cell.checkpoint_every} is not for objective {cell.objective.name}, allowed is 0"
        yield "checkpoint_every", f"{why}: what it has generated is in no checkpoint"


def _shards_for_one(cell: Cell) -> bool:
    """Whether the strategy shards over one rank: inside nodes that have no more, or of one."""
    schedule = registry.find(cell.strategy).schedule
    if schedule is None or schedule.shards == "rank":
        return False
    return schedule.sharers(cell.cluster.nodes, cell.cluster.ranks_per_node) == 1


def _of_links(cell: Cell) -> Iterator[Mismatch]:
    between_groups = cell.inter_group_bandwidth_bits_per_s
    if between_groups is not None and getattr(cell.cluster, "groups", 1) == 1:
        why = _not(between_groups, "needs a cluster of several groups of nodes (groups)")
        yield "inter_group_bandwidth_bits_per_s", why
    lowest, highest = cell.cluster.can.rates or (0, float("inf"))
    for name in ("inter_bandwidth_bits_per_s", "inter_group_bandwidth_bits_per_s"):
        bits_per_s = getattr(cell, name)
        if bits_per_s is not None and not lowest <= bits_per_s <= highest:
            allowed = f"{format_link(lowest)} to {format_link(highest)}, and {UNSHAPED}"
            yield name, f"{format_link(bits_per_s)} cannot be emulated; allowed are {allowed}"


def _of_strategy(cell: Cell) -> Iterator[Mismatch]:
    """Settings of the cell's strategy that fit neither one another nor the cluster."""
    given, fixes = dict(cell.settings), registry.find(cell.strategy).fixes
    for name in ("gather_codec", "reduce_codec"):
        if given.get(name, "none") == "none":
            continue
        if name in fixes:
            why = f"allowed is none: the strategy has its own, {fixes[name]}, in any case"
            yield name, _not(given[name], why)
        if given.get("exchanges") == "flat":
            why = f"allowed with another {name} than none: hierarchical, undeferred"
            yield "exchanges", _not("flat", why)
    waiting = given.get("partial_gradients", "device")
    name = "exchanges" if "exchanges" in given else "nodes_per_stage"
    if waiting != "device" and given[name] in ("undeferred", "flat", 1):
        why = f"leave it out with {name} {given[name]}, where no gradients wait"
        yield "partial_gradients", _not(waiting, why)
    if given.get("error_feedback") and given["reduce_codec"] in ("none", *EXPONENTS):
        why = "needs a reduce_codec that rounds, whose loss it feeds back"
        yield "error_feedback", _not(True, why)
    stages, schedule = given.get("stages_per_node"), given.get("pipeline_schedule")
    if stages == 1 and schedule in SEVERAL_STAGES:
        why = f"allowed for pipeline_schedule {schedule} are 2 and more"
        yield "stages_per_node", _not(stages, why)
    if stages != 1 and schedule in ONE_STAGE:
        yield "stages_per_node", _not(stages, f"allowed for pipeline_schedule {schedule} is 1")
    within, sharers = given.get("within_stage"), given.get("nodes_per_stage", 1)
    if sharers > 1 and within != "fcdp":
        why = f"allowed is 1 where within_stage is {within}, not fcdp"
        yield "nodes_per_stage", _not(sharers, why)
    if problem := divided(sharers, cell.cluster.nodes):
        yield "nodes_per_stage", _not(sharers, problem)
    together, worker = given.get("nodes_per_worker", 1), given.get("worker")
    if together > 1 and worker != "nodes":
        why = f"allowed is 1 where worker is {worker}, not nodes"
        yield "nodes_per_worker", _not(together, why)
    if problem := divided(together, cell.cluster.nodes):
        yield "nodes_per_worker", _not(together, problem)
    for name in ("fragments", "overlap"):
        if given.get(name, 0) > (interval := given.get("interval", 0)):
            yield name, _not(given[name], f"must be at most the interval, {interval}")


def _of_images(cell: Cell) -> Iterator[Mismatch]:
    """Fields that fit images alone, or text alone."""
    data, model, length = cell.data, cell.model, cell.sequence_length
    images = isinstance(data, Images)
    if images != isinstance(model, ImageModel):
        why = f"{data.name} and model {model.name} do not go together: models of family "
        yield "data", f"{why}convolutional and resnet train on images, all others on text"
    if not images and length < 2:
        yield "sequence_length", f"{length} is not allowed: text has 2 tokens or more per sequence"
    if not images:
        return
    if length > 1:
        yield "sequence_length", f"{length} is not allowed: an image is 1; leave it out"
    if cell.tuning != "full":
        yield "tuning", f"{cell.tuning} is not allowed: models of images train in full"
    if cell.loss != "cross entropy":
        yield "loss", f"{cell.loss} is not allowed: images have cross entropy alone"
    if registry.find(cell.strategy).engine == "pipeline":
        why = "blocks of text's models hand on one shape, those of images' do not"
        why += "; allowed are strategies that gather whole layers, such as fsdp2"
        yield "strategy", f"{cell.strategy} is not allowed on images: {why}"


def _of_objective(cell: Cell) -> Iterator[Mismatch]:
    """Fields that do not fit an objective beside a causal language model's loss."""
    spec, engine = cell.objective, registry.find(cell.strategy).engine
    if isinstance(spec, CausalLM):
        return
    engines = ", ".join(_WHOLE_CALLS)
    if engine == "pipeline" and not isinstance(spec, DPO):
        why = f"{spec.name} calls the whole model, of which a rank of {cell.strategy} has a stage"
        yield "objective", f"{why}; allowed are dpo, and for others strategies of {engines}"
    elif engine not in (*_WHOLE_CALLS, "pipeline"):
        why = f"{cell.strategy} trains by a loop of its own, which calls the model for losses alone"
        yield "objective", f"{why}; allowed are strategies of {engines}"
    if isinstance(cell.model, ImageModel | OwnModel):
        yield "objective", f"{spec.name} needs a language model of transformers, not the file's own"
    if cell.loss != "cross entropy":
        yield "loss", f"{cell.loss} is not allowed: {spec.name} has a loss of its own"
    if not isinstance(spec, GRPO):
        return
    if spec.new_tokens > cell.sequence_length:
        why = f"{spec.new_tokens} new tokens leave no prompt in sequences of {cell.sequence_length}"
        yield "objective", f"{why}; allowed are up to {cell.sequence_length} (sequence_length)"
    if spec.extra and not registry.find(cell.strategy).is_published:
        why = f"a rollout by a process follows what fcdp.publish writes, and not {cell.strategy}"
        yield "objective", f"{why}; allowed is rollout: trainer"
    if cell.micro_batch % spec.group:
        why = f"{cell.micro_batch} sequences are not whole groups of {spec.group} answers"
        yield "micro_batch", f"{why} (group of objective); allowed are its multiples"


def why_not_given(setting: str, value: object, cluster: AnyCluster) -> str | None:
    """Why a matrix file may not give this value on its cluster; ``None`` if it may."""
    for_simulator = setting in OF_CLUSTER or (setting == "micro_batch" and value == LARGEST)
    return _for_simulated(cluster) if for_simulator and cluster.can.start_processes else None


def why_not_installed(strategy: Strategy, deepspeed: Pin, *, cuda: bool) -> str | None:
    """Why this machine cannot run a strategy, with this pin of DeepSpeed; ``None`` if it can.

    ``cuda``: whether its ranks would compute on CUDA.
    """
    if strategy.engine != "deepspeed":
        if deepspeed != "current":
            return f"{strategy.name} does not use DeepSpeed, so it has one pin only"
        return f"{strategy.name} {strategy.cpu_only}" if strategy.cpu_only and cuda else None
    version = pins.version(deepspeed)
    if version is None:
        return f"DeepSpeed ({deepspeed}) is not installed: {pins.COMMANDS[deepspeed]}"
    if strategy.needs_cuda and not cuda:
        return f"DeepSpeed {version} {strategy.needs_cuda}"
    if strategy.needs_header and not strategy.needs_header[0].exists():
        header, package = strategy.needs_header
        return f"{header} is missing: sudo apt-get install {package}"
    return None


def why_not_here(cell: Cell, *, cuda: bool) -> str | None:
    """Why this machine, or the cell's cluster, cannot run the cell; ``None`` if it can.

    ``cuda``: whether its ranks would compute on CUDA.
    """
    if why := why_not_installed(registry.find(cell.strategy), cell.deepspeed, cuda=cuda):
        return why
    if not cell.cluster.can.limit_links and cell.inter_bandwidth_bits_per_s is not None:
        return "the links of rented nodes are what they are: nothing limits them to a bandwidth"
    extra = " and ".join(each.name for each in cell.extra)
    if extra and not cell.cluster.can.start_extra:
        where = f"clusters of kind {cell.cluster.kind} start ranks alone"
        return f"needs machines for its {extra}, and {where}"
    if extra and getattr(cell.cluster, "groups", 1) > 1:
        return f"its {extra} would be in no group of nodes"
    for group, package in _packages(cell):
        if not importlib.util.find_spec(package):
            return f"{needed(group)}; there is no {package} here"
    return None


def _packages(cell: Cell) -> Iterator[tuple[Group, str]]:
    """The packages that the cell needs of groups that are not installed for all, by group."""
    if isinstance(cell.data, Images):
        yield "images", cell.data.package
    if (package := PACKED.get(cell.frozen_dtype)) is not None:
        yield "quantised", package


def why_not_simulated(cell: Cell) -> str | None:
    """Why the cell's training cannot be predicted; ``None`` if it can."""
    why = None
    if getattr(cell.cluster, "groups", 1) > 1:
        why = "between its nodes there are two kinds of links"
    elif registry.find(cell.strategy).schedule is None and cell.strategy != LUWU:
        why = f"{cell.strategy} has no schedule that is described"
    elif getattr(cell.settings, "within_stage", "sharded") not in STAGES:
        why = "its stages are replicated; those that are sharded are simulated alone"
    elif cell.optimizer.kind != "adamw":
        why = f"{cell.optimizer.name}; AdamW is simulated alone"
    elif cell.frozen_dtype == "float8" and _lacks_float8(cell.cluster):
        why = "its GPU has no products in float8"
    else:
        try:
            shape_of(cell)
        except ValueError as error:
            why = str(error)
    return why and f"is not simulated: {why}"


def _lacks_float8(cluster: AnyCluster) -> bool:
    return cluster.kind == "simulated" and not card(cluster.gpu).fp8


def shape_of(cell: Cell) -> Transformer:
    """The shape of the cell's model, whose operations and bytes the simulator counts.

    Raises ``ValueError`` that says why they cannot be counted.
    """
    model = cell.model
    if not isinstance(cell.objective, CausalLM):
        raise ValueError(f"{cell.objective.name}; the loss of a causal language model is alone")
    if isinstance(model, ImageModel):
        raise ValueError(f"{model.name} classifies images; language models are simulated alone")
    if isinstance(model, OwnModel):
        raise ValueError(f"the shape of what {model.function} makes is not known")
    if isinstance(model, ConfiguredModel):
        if cell.tuning == "lora" and model.model_type not in ATTENTION:
            raise ValueError(f"what peft adapts of {model.model_type} is not counted")
        shape = models.from_config(model.configuration, cell.sequence_length)
        return replace(shape, name=model.name)
    return Transformer.of(model, cell.sequence_length)


def why_too_large(needs: float, has: float) -> str | None:
    """Say why a cell does not run that needs more bytes than the machine has."""
    if needs <= has:
        return None
    here = f"needs about {sizes.written(needs)}, and this machine has {sizes.written(has)}"
    return f"{here}: make it smaller (--set), or leave it out (--only)"


def _not(value: Any, why: str) -> str:
    return f"{value!r} is not allowed: {why}"


def _for_simulated(cluster: AnyCluster) -> str:
    return f"is for clusters of kind simulated, not {cluster.kind}"
