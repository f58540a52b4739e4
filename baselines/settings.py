"""Settings of cells: how cells that differ in one are compared and shown, and who has which.

A field says it once, where it is declared: ``Annotated[int, Setting("Sequence")]``. Settings that
only some strategies have are fields of their own types. A field says which values it takes by
itself; ``experiments.records.allowed`` says which go together. Imports no engine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from baselines.pins import Pin
from fcdp.grouping import PartialsChoice
from fcdp.sizes import parse

#: ``condition``: cells are compared only where it is alike. ``subject``: it is what is compared.
#: ``incidental``: it changes nothing of what a step is.
Role = Literal["condition", "subject", "incidental"]
#: Where cells that differ in it stand: ``run`` and ``training`` in figures of their own, ``model``
#: in panels of one figure, ``axis`` in one panel. Tables sort by these in this order.
Place = Literal["run", "model", "training", "axis"]
#: ``later``: it came after the first records; where it has its default, ids are as they were.
InId = Literal["always", "later", "never"]


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Setting:
    """Description of a cell's field, in its annotation."""

    #: The name that readers see.
    label: str
    role: Role = "condition"
    place: Place = "training"
    in_id: InId = "always"
    #: Whether cells that differ in it train on other batches or other parameters, so that their
    #: losses say nothing of one another.
    learns: bool = False
    #: Whether all tables and headings show it, and not only those whose cells differ in it.
    always: bool = False
    #: A value in words.
    write: Callable[[Any], str] = _plain
    #: The text where there is none.
    absent: str = "–"


def _subject(
    label: str, text: str = "{}", words: Mapping[Any, str] | None = None, **more: Any
) -> Setting:
    """A setting of the subject: cells that differ in it are compared.

    Values are formatted by ``text``, but for those that ``words`` has.
    """
    in_words = words or {}
    return Setting(
        label, "subject", write=lambda value: in_words.get(value) or text.format(value), **more
    )


_later = partial(_subject, in_id="later")


class Strict(BaseModel):
    """A model that forbids unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Settings(Strict):
    """Settings that a strategy has beside those of all cells. The base class has none."""


#: How gathers and reductions cross nodes. ``hierarchical``: inside the node and across apart, and
#: gradients once per step. ``undeferred``: so too, and gradients of each micro-batch. ``flat``: in
#: one ring over all ranks, which carries whole values only, and gradients of each micro-batch.
ExchangeKind = Literal["hierarchical", "undeferred", "flat"]


class PaperSettings(Settings):
    """Settings of the FCDP paper's own system."""

    #: Cache policy: a name, or a user's class as ``package.module:Class(size=1 GiB)``.
    policy: Annotated[str, _later("Policy")] = "host"


class EncodedSettings(Settings):
    """Settings of strategies over this library that fix where parameters are cached."""

    #: Codec between nodes, as ``baselines.encoding`` reads it; a strategy with one of its own
    #: allows ``none`` alone.
    gather_codec: Annotated[str, _later("Gather codec", "gather {}")] = "none"
    reduce_codec: Annotated[str, _later("Reduce codec", "reduce {}")] = "none"
    error_feedback: Annotated[bool, _later("Error feedback", "error feedback")] = False

    @model_validator(mode="before")
    @classmethod
    def _without_adapters(cls, values: Any) -> Any:
        """Drop a field of old records, from when adapters could be replicated: all are sharded."""
        if isinstance(values, dict) and values.get("adapters") == "sharded":
            return {name: value for name, value in values.items() if name != "adapters"}
        return values


_PartialGradients = Annotated[PartialsChoice, _later("Partial gradients", "partial gradients {}")]


class CacheSettings(EncodedSettings, PaperSettings):
    """Settings of FCDP."""

    exchanges: Annotated[ExchangeKind, _later("Exchanges", "{} exchanges")] = "hierarchical"
    #: Where sums of micro-batches' gradients wait for the last one: where the library finds room,
    #: in device memory, in host memory; with ``each`` none wait, as with ``undeferred`` exchanges.
    partial_gradients: _PartialGradients = "device"


class FSDP2Settings(Settings):
    """Settings of FSDP2 itself."""

    #: Whether each forward before a step, as in generation, gathers, or one gathers for all.
    forwards: Annotated[Literal["gathered", "unsharded"], _later("Forwards", "{} forwards")] = (
        "gathered"
    )


#: Orders in which stages compute micro-batches, as ``baselines.pipeline.schedules`` has them.
PipelineSchedule = Literal["gpipe", "1f1b", "ahead", "interleaved", "looped", "zb"]
#: Schedules that take several stages on a node.
SEVERAL_STAGES = ("interleaved", "looped")
#: Schedules that take one stage on a node.
ONE_STAGE = ("gpipe", "1f1b", "ahead")


class PipelineSettings(Settings):
    """Settings of a pipeline across nodes."""

    #: When a stage computes which micro-batch: all forwards first; 1F1B; 1F1B that computes more
    #: forwards ahead, while messages are under way; with several stages a node, in turns or
    #: breadth-first; zero bubble.
    pipeline_schedule: Annotated[PipelineSchedule, _later("Pipeline schedule")] = "ahead"
    #: Stages on each node, one of each round through the nodes.
    stages_per_node: Annotated[
        Annotated[int, Field(ge=1)], _later("Stages per node", "{} stages a node")
    ] = 1
    #: Whether the ranks of a node shard its stages, or replicate them, for a step at a time; or
    #: FCDP shards them, which gathers for each micro-batch, and keeps sums of 1/L of the gradients.
    within_stage: Annotated[
        Literal["sharded", "replicated", "fcdp"],
        _later("Within a stage", "{} inside stages", {"fcdp": "FCDP inside stages"}),
    ] = "sharded"
    #: Nodes that share a stage, if FCDP shards it.
    nodes_per_stage: Annotated[
        Annotated[int, Field(ge=1)], _later("Nodes per stage", "{} nodes per stage")
    ] = 1
    #: Where sums of micro-batches' gradients wait for the last one, inside of a stage of several
    #: nodes.
    partial_gradients: _PartialGradients = "device"


class DeepSpeedSettings(Settings):
    """Settings of DeepSpeed's strategies."""

    #: Which of DeepSpeed's pins, as ``baselines.pins`` has them.
    deepspeed: Annotated[Pin, _later("DeepSpeed")] = "current"


_Count = Annotated[int, Field(ge=1)]
#: Where the outer state and the snapshot lie.
OuterPlace = Literal["device", "host"]
#: How much of the mean displacement a worker follows: CO2's α.
OuterLearningRate = Annotated[
    float, Field(gt=0, allow_inf_nan=False), _subject("Outer learning rate", "α = {:g}")
]
#: CO2's β.
OuterMomentum = Annotated[float, Field(ge=0, lt=1), _subject("Outer momentum", "β = {:g}")]
#: Whether displacements count in units of the learning rate, as SlowMo has it.
ByLearningRate = Annotated[
    bool,
    _subject(
        "By learning rate",
        words={True: "displacements ÷ learning rate", False: "plain displacements"},
    ),
]
Penalty = Literal["none", "first-step", "first-steps"]


def divided(parts: int, whole: int) -> str | None:
    """Say why ``whole`` nodes cannot be put in groups of ``parts``; ``None`` if they can."""
    if whole % parts == 0:
        return None
    allowed = [str(size) for size in range(1, whole + 1) if whole % size == 0]
    return f"must divide the cluster's {whole} nodes; allowed are {', '.join(allowed)}"


class LocalSGDSettings(Settings):
    """Settings of Local SGD."""

    #: Steps between two exchanges: the paper's τ.
    interval: Annotated[_Count, _subject("Interval", "τ = {}")] = 12
    #: Who trains apart: each rank; each node, over whose ranks FSDP2 shards the model; or several,
    #: over whose ranks FCDP does.
    worker: Annotated[
        Literal["rank", "node", "nodes"],
        _subject("Worker", "a worker per {}", {"nodes": "FCDP inside workers"}),
    ] = "rank"
    nodes_per_worker: Annotated[_Count, _later("Nodes per worker", "{} nodes per worker")] = 1
    outer_on: Annotated[OuterPlace, _later("Outer state on", "outer state on the {}")] = "device"


class SlowMoSettings(LocalSGDSettings):
    """Settings of SlowMo; its paper's momentum of language models."""

    outer_learning_rate: OuterLearningRate = 1.0
    outer_momentum: OuterMomentum = 0.5
    by_learning_rate: ByLearningRate = True


class CO2Settings(SlowMoSettings):
    """Settings of CO2; momentum and clip are those of its authors' run of GPT-2 medium."""

    outer_momentum: OuterMomentum = 0.2
    by_learning_rate: ByLearningRate = False
    #: The largest outer momentum of an element: the paper's φ; ``None``: as large as it is.
    clip: Annotated[
        Annotated[float, Field(gt=0)] | None, _subject("Clip", "φ = {:g}", {None: "no clipping"})
    ] = 1.0
    #: Divisor of a late displacement; see ``baselines.co2.train``.
    penalty: Annotated[Penalty, _subject("Penalty", "penalty {}")] = "first-steps"


class DiLoCoSettings(LocalSGDSettings):
    """Settings of DiLoCo; its outer step is Nesterov's, with its paper's rate and momentum."""

    outer_learning_rate: OuterLearningRate = 0.7
    outer_momentum: OuterMomentum = 0.9


class StreamingSettings(DiLoCoSettings):
    """Settings of Streaming DiLoCo; the steps and the share are its paper's."""

    #: Fragments of the model, one after another of which crosses; blocks are dealt to them in turn.
    fragments: Annotated[_Count, _subject("Fragments", "{} fragments")] = 2
    #: Steps that are trained while a fragment crosses.
    overlap: Annotated[_Count, _subject("Overlap", "{} steps of overlap")] = 1
    #: Share of its own parameters that a worker keeps when a fragment arrives.
    kept: Annotated[float, Field(ge=0, lt=1), _subject("Kept", "{:g} kept")] = 0.5


#: How old parameters may be, as ``baselines.cyclic.routes`` has it.
UpdateRule = Literal["v1", "v2"]


class CyclicSettings(Settings):
    """Settings of Cyclic Data Parallelism."""

    #: Which parameters a micro-batch may find one step old, as ``baselines.cyclic.routes`` has it.
    rule: Annotated[UpdateRule, _subject("Update rule", "CDP-{}")] = "v2"
    #: Parts of the model with an optimizer each; ``None``: as many as ranks, as the paper has it.
    stages: Annotated[
        _Count | None, _subject("Stages", "{} stages", {None: "a stage per rank"})
    ] = None


class LuWuSettings(Settings):
    """Settings of LuWu."""

    #: Threads of the server's optimizer: one each reads, casts and writes, the others step.
    threads: Annotated[int, Field(ge=4), _subject("Server threads", "{} server threads")] = 4
    #: Bytes of one message.
    chunk_bytes: Annotated[
        int,
        Field(ge=4096, le=4 * 2**20, multiple_of=4096),
        Setting("Chunk", "subject", write=lambda value: f"chunks of {value // 1024} KiB"),
    ] = 256 * 1024
    #: Whether a thread of the server does one thing for all layers, or all for one layer.
    pipeline: Annotated[Literal["step", "layer"], _subject("Pipeline", "{}-centric")] = "step"
    #: Whether the switch merges the workers' acknowledgements.
    merged: Annotated[
        bool,
        _subject(
            "Acknowledgements",
            words={True: "merged acknowledgements", False: "single acknowledgements"},
        ),
    ] = True
    #: Whether frozen parameters are pulled once, and then kept in the worker's host memory.
    cached: Annotated[
        bool,
        _subject(
            "Frozen layers",
            words={True: "frozen layers cached", False: "frozen layers pulled each time"},
        ),
    ] = False


#: When the optimizer steps, as ``baselines.fuyou.optimizer`` has it.
Update = Literal["after", "overlapped", "delayed"]


def _is_a_size(value: str) -> str:
    parse(value, least=1)
    return value


def _is_an_amount(value: str) -> str:
    if value not in ("auto", "none", "all"):
        try:
            _is_a_size(value)
        except ValueError as error:
            raise ValueError(f"{error}; and auto, none, all") from error
    return value


class FuyouSettings(Settings):
    """Settings of Fuyou."""

    #: Host memory for all that the strategy keeps there.
    dram_budget: Annotated[str, AfterValidator(_is_a_size), _subject("DRAM", "{} of DRAM")] = (
        "1 GiB"
    )
    #: Memory of the device; where that is the CPU, all beyond what the process has without a model.
    device_budget: Annotated[
        str, AfterValidator(_is_a_size), _subject("Device", "{} on device")
    ] = "1 GiB"
    #: Blocks that are on the device at once.
    blocks_on_device: Annotated[
        int, Field(ge=2), _subject("Blocks on device", "{} blocks on device")
    ] = 3
    update: Annotated[Update, _subject("Optimizer step")] = "delayed"
    #: Bytes of matrix products that are kept instead of computed again: as many as the cost model
    #: chooses, none, all, or so many.
    swap: Annotated[str, AfterValidator(_is_an_amount), _subject("Swapped", "swap {}")] = "auto"
    #: The folder in which a run makes its own; ``None``: that of temporary files.
    ssd: Annotated[str | None, Setting("SSD", "incidental", in_id="never")] = None
    #: Bytes a second each way that the folder's disk is limited to, by control groups.
    ssd_limit: Annotated[
        _Count | None,
        Setting(
            "SSD limit",
            "subject",
            "axis",
            write=lambda value: "SSD as it is" if value is None else f"SSD {value / 1e6:g} MB/s",
        ),
    ] = None
