"""Cell: one point of a matrix.

A matrix expands to cells; each runs in fresh processes and ends as one record.
"""

from __future__ import annotations

import hashlib
import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator
from pydantic_core import to_json

from baselines import registry
from baselines.description import ExtraProcess
from baselines.optimizers import AdamW, AnyOptimizer
from baselines.pins import Pin
from baselines.settings import DeepSpeedSettings, Setting, Settings
from experiments.records.abilities import ABILITIES, Abilities, Kind
from experiments.records.objective import GRPO, AnyObjective, CausalLM
from experiments.records.settings import Parts, described, left_out_of_id
from experiments.records.workload import AnyData, AnyModel, Function, Library, Origin
from simulation import hardware
from simulation.files import Name, Strict
from simulation.quantities import UNSHAPED, format_link
from simulation.transformer import ModelSpec, Tuning

if TYPE_CHECKING:
    from simulation.imitated.records import Case

#: Name of a matrix, after that of its suite and a slash if it is in one.
MatrixName = Annotated[
    str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
]
DType = Literal["float32", "bfloat16"]
FrozenDType = Literal["float32", "bfloat16", "float8", "nf4", "bnb-4bit"]


_later, _run = partial(Setting, in_id="later"), partial(Setting, place="run")
_link = partial(Setting, write=format_link, absent=UNSHAPED)
_Count = Annotated[int, Field(ge=1)]
_Natural = Annotated[int, Field(ge=0)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Nodes(Strict):
    """``nodes`` × ``ranks_per_node`` processes."""

    kind: Annotated[Kind, _run("Cluster")]
    nodes: Annotated[_Count, _run("Nodes", learns=True)]
    ranks_per_node: Annotated[_Count, _run("Ranks per node", learns=True)]

    @property
    def can(self) -> Abilities:
        return ABILITIES[self.kind]


class ClusterSpec(_Nodes):
    """The cluster a cell runs on: ``nodes`` × ``ranks_per_node`` processes."""

    kind: Annotated[Literal["emulated", "rented"], _run("Cluster")] = "emulated"
    #: Groups of equally many consecutive nodes; links between them have a limit and counters of
    #: their own. Emulated clusters only.
    groups: Annotated[_Count, _later("Groups of nodes", place="run")] = 1
    #: Whether nodes share cores; where a file does not say, ``run`` gives each its own if there are
    #: enough. Emulated clusters only.
    cores: Annotated[Literal["shared", "own"], _later("Cores", place="run")] = "shared"
    port: Annotated[int, Setting("Port", "incidental", in_id="never")] = Field(
        default=29500, ge=1024, le=65535
    )


class SimulatedSpec(_Nodes):
    """A simulated cluster of nodes with one kind of GPU, of those in ``simulation.hardware``.

    Between nodes ``inter_efficiency`` of the cell's bandwidth is reached; where it is ``None``,
    ``link_efficiency``, as inside a node.
    """

    kind: Annotated[Literal["simulated"], _run("Cluster")]
    gpu: Annotated[str, _run("GPU")]
    host_memory_gb: Annotated[float, Field(gt=0), _run("Host memory", write="{:g} GB".format)] = 512
    #: Shares of the data sheets' peaks that matrix products and links reach.
    matmul_efficiency: Annotated[_Share, _run("Matmul efficiency")] = 0.5
    link_efficiency: Annotated[_Share, _run("Link efficiency")] = 0.8
    inter_efficiency: Annotated[
        float | None, Field(gt=0, le=1), _later("Share of the link", place="run")
    ] = None
    inter_latency_us: Annotated[float, Field(ge=0), _run("Latency", write="{:g} µs".format)] = 15.0
    #: NVMe drives of the server that LuWu has beside the nodes; 0: it has a node's disks.
    server_drives: Annotated[_Natural, _later("Server's drives", place="run")] = 0

    @field_validator("gpu")
    @classmethod
    def _is_known(cls, value: str) -> str:
        return hardware.gpu(value).name


AnyCluster = Annotated[ClusterSpec | SimulatedSpec, Field(discriminator="kind")]


#: Keys of matrix files for fields of a cell that have another name there.
FILE_NAMES = {
    "inter_bandwidth_bits_per_s": "inter_bandwidth",
    "inter_group_bandwidth_bits_per_s": "inter_group_bandwidth",
    "matrix": "name",
}


class Cell(Strict):
    """One point of a matrix: everything a worker needs to know.

    Its types say which values each setting takes; the reader of a matrix file also asks
    ``experiments.records.allowed`` whether they go together.
    """

    matrix: Annotated[MatrixName, _run("Matrix")]
    #: How parameters are placed and moved.
    strategy: Annotated[Name, Setting("Strategy", "subject", always=True)]
    #: Which of the file's models.
    model: Annotated[AnyModel, Setting("Model", place="model", learns=True, always=True)]
    #: Whether all parameters are trained, or adapters beside frozen ones.
    tuning: Annotated[Tuning, Setting("Tuning", place="model", learns=True, always=True)]
    cluster: Annotated[AnyCluster, Parts(named="kind")]
    #: Egress limit of each node, in bits per second.
    inter_bandwidth_bits_per_s: Annotated[int | None, _link("Link", place="axis", always=True)] = (
        Field(gt=0)
    )
    #: Limit of what each node sends to other groups, where a cluster has several.
    inter_group_bandwidth_bits_per_s: Annotated[
        int | None, _link("Link between groups", in_id="later")
    ] = Field(default=None, gt=0)
    #: Tokens per sequence; 1 for images, each of which counts as one token.
    sequence_length: Annotated[_Count, Setting("Sequence", learns=True)] = 1
    #: Sequences, or images, per rank and micro-batch.
    micro_batch: Annotated[_Count, Setting("Micro-batch", learns=True)]
    #: Micro-batches between two optimizer steps.
    accumulation: Annotated[_Count, Setting("Accumulation", learns=True)]
    #: Type of gathered parameters and of compute; the optimizer steps float32 parameters.
    dtype: Annotated[DType, Setting("Type", learns=True)]
    #: Settings of its strategy, of the type that ``baselines.registry`` has for it.
    settings: Annotated[SerializeAsAny[Settings], Parts()] = Field(
        default=Settings(), validate_default=True
    )
    #: Share of the blocks whose activations are recomputed in backward; simulated clusters only.
    recomputed: Annotated[float, Field(ge=0, le=1), _later("Recomputed")] = 0.0
    #: Rank of the adapters, where tuning is ``lora``.
    lora_rank: Annotated[_Count, Setting("LoRA rank", place="model", learns=True)]
    #: Type of frozen parameters: float32, or what a user's own model has; the others only where
    #: ``dtype`` is bfloat16. The last three are of linear layers of the blocks, and all else that
    #: is frozen is bfloat16: nf4 (torchao) and bnb-4bit (bitsandbytes) have four bits per weight,
    #: as in QLoRA; in float8 (torchao) they are gathered and multiplied, from bfloat16 shards.
    frozen_dtype: Annotated[FrozenDType, _later("Frozen type", learns=True)] = "float32"
    learning_rate: Annotated[_Above, Setting("Learning rate", learns=True)]
    optimizer: Annotated[AnyOptimizer, _later("Optimizer", learns=True)] = AdamW()
    #: Steps before those that are measured.
    warmup_steps: Annotated[_Natural, Setting("Warm-up steps", "incidental")]
    #: Steps that are measured.
    steps: Annotated[_Count, Setting("Steps", "incidental")]
    #: Seed of initial weights and of the order of the data.
    seed: Annotated[int, Field(ge=0, lt=2**32), Setting("Seed", place="axis", learns=True)] = 0
    data: Annotated[AnyData, _later("Data", learns=True)] = Library()
    #: Next-token cross entropy, or a user's function, as docs/use.md says.
    loss: Annotated[Literal["cross entropy"] | Function, _later("Loss", learns=True)] = (
        "cross entropy"
    )
    #: Computation of a step: losses alone, or post-training around them.
    objective: Annotated[AnyObjective, _later("Objective", learns=True)] = CausalLM()
    #: Sequences at the end of the data, or images, on which the trained model is evaluated.
    held_out: Annotated[_Natural, _later("Held-out examples", learns=True)] = 0
    #: Steps between evaluations on them, the last of which is after training; 0: only that one.
    #: Times and bytes of steps leave out what evaluations have fetched or waited for.
    held_out_every: Annotated[_Natural, _later("Held out every", "incidental")] = 0
    #: Whether one more step is trained under torch.profiler; simulated cells have `trace`.
    profile: Annotated[bool, _later("Profiled", "incidental")] = False
    #: Steps between checkpoints, from which a cell resumes if its ranks were ended; 0: none. For
    #: strategies that shard by FSDP2, with FCDP's cache or without, and pipelines, on nodes that
    #: share the folder.
    checkpoint_every: Annotated[_Natural, _later("Checkpoint every", "incidental")] = 0
    origin: Annotated[Origin, Setting("Origin", "incidental", in_id="never")] = Origin()
    #: Index of this repetition, of those that its matrix asks for.
    repeat: Annotated[_Natural, _later("Repetition", "incidental")] = 0
    #: Seconds after which a cell is ended.
    timeout_s: Annotated[_Above, Setting("Time limit", "incidental", in_id="never")]

    @field_validator("settings", mode="plain")
    @classmethod
    def _are_its_strategys(cls, value: Any, info: ValidationInfo) -> Settings:
        kind = registry.find(str(info.data.get("strategy"))).settings
        fields = value.model_dump() if isinstance(value, Settings) else value
        return value if type(value) is kind else kind.model_validate(fields)

    @classmethod
    def of(cls, **values: Any) -> Cell:
        """Make a cell of its fields and of settings of strategies.

        Settings that its strategy does not have are left out: a matrix has one value of each for
        all of its strategies. Raises ``ValidationError`` of the cell, or of its settings.
        """
        of_strategies = registry.setting_names()
        settings = registry.find(values["strategy"]).chosen(values)
        values = {name: value for name, value in values.items() if name not in of_strategies}
        return cls.model_validate({**values, "settings": settings}, strict=True)

    @classmethod
    def of_case(cls, case: Case) -> Cell:
        """A case of the study on imitated devices, as a cell of a matrix."""
        return cls.of(
            matrix="memory",
            strategy=case.strategy,
            model=case.model,
            tuning=case.tuning,
            cluster=ClusterSpec(nodes=case.nodes, ranks_per_node=case.ranks_per_node),
            inter_bandwidth_bits_per_s=None,
            sequence_length=case.sequence_length,
            micro_batch=1,
            accumulation=case.accumulation,
            dtype="bfloat16",
            **case.settings,
            lora_rank=case.lora_rank,
            learning_rate=1e-4,
            warmup_steps=0,
            steps=1,
            timeout_s=1.0,
        )

    @property
    def links(self) -> tuple[int | None, int | None]:
        """Limits of a node's links, inside of its group and to others, as ``shape`` takes them."""
        return self.inter_bandwidth_bits_per_s, self.inter_group_bandwidth_bits_per_s

    @property
    def extra(self) -> tuple[ExtraProcess, ...]:
        """Processes that its strategy and its objective need beside the ranks."""
        of_objective = self.objective.extra if isinstance(self.objective, GRPO) else ()
        return (*registry.find(self.strategy).extra, *of_objective)

    @property
    def deepspeed(self) -> Pin:
        """The pin of DeepSpeed, for strategies that are its own."""
        settings = self.settings
        return settings.deepspeed if isinstance(settings, DeepSpeedSettings) else "current"

    @property
    def variant(self) -> str:
        """The strategy, and its engine's version if it is not the usual one: for comparisons."""
        return self.strategy if self.deepspeed == "current" else f"{self.strategy}@{self.deepspeed}"

    @property
    def choices(self) -> tuple[str, ...]:
        """Settings of its strategy that are not the defaults, in words, for comparisons."""
        by_name = described(type(self))
        return tuple(
            by_name[name].written(value)
            for name, value in self.settings
            if name != "deepspeed"  # the variant has it
            and by_name[name].setting.in_id != "never"
            and value != type(self.settings).model_fields[name].default
        )

    @property
    def subject(self) -> str:
        """The variant with its choices, as it is compared."""
        return " ".join((self.variant, *self.choices))

    @property
    def id(self) -> str:
        """Readable and stable: the same settings give the same id on every machine.

        The time limit and the port are left out: they change nothing that is measured, and a cell
        that ran into its limit is the same cell when it is tried again with a longer one.
        """
        bandwidth = self.inter_bandwidth_bits_per_s
        link = "unshaped" if bandwidth is None else f"{bandwidth / 1e6:g}mbit"
        exclude = left_out_of_id(self) | {"repeat": True}  # the id's end says it
        if getattr(self.model, "vocabulary", None) == ModelSpec.model_fields["vocabulary"].default:
            exclude["model"] = {"vocabulary"}  # as before models had one
        settings = to_json(self.flat(exclude))
        digest = hashlib.sha256(settings).hexdigest()[:8]
        subject = "-".join((self.variant, *map(_in_a_name, self.choices)))
        again = f"-r{self.repeat + 1}" if self.repeat else ""
        return (
            f"{subject}-{self.tuning}-{self.model.name}-{link}-k{self.accumulation}-{digest}{again}"
        )

    def flat(self, exclude: dict[str, Any] | None = None) -> dict[str, Any]:
        """All fields as JSON has them, the settings of its strategy on the same level."""
        fields: dict[str, Any] = {}
        for name, value in self.model_dump(mode="json", exclude=exclude).items():
            fields |= value if name == "settings" else {name: value}
        return fields

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together train on between two optimizer steps."""
        ranks = self.cluster.nodes * self.cluster.ranks_per_node
        return ranks * self.micro_batch * self.accumulation * self.sequence_length


def _in_a_name(words: str) -> str:
    """A choice as a part of an id, which is a folder's name too: ``threshold-0.8``."""
    joined = re.sub(r"(?<=\d) (?=[KMGT]i?B)", "", words)
    return re.sub(r"[^A-Za-z0-9.]+", "-", joined).strip("-")
