"""Published steps of pipelines, in mixes of stages and replicas, beside what our events say.

Sailor's ranks (SOSP'25) split matrices inside a node and compute in fp32, which no plan does. So
the seconds of a pass are those that the source measured on one node of each kind, in
``results/pipelines/passes.csv``; predicted is all else of the steps in ``steps.csv``: the order of
DeepSpeed's engine, which trains there, what waits, messages, and reductions among replicas of a
stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

from pydantic import Field

from baselines.pipeline.order import Kind
from simulation.files import Strict, rows_of, validated
from simulation.hardware import cluster
from simulation.step.pipeline import DeepSpeedStages, PassWork, Phase, PipelineWork, StageWork
from simulation.traffic import all_reduce, inter_node
from simulation.workload import FP32

_RESULTS = Path(__file__).parents[1] / "results" / "pipelines"
#: Relative difference of two measured steps from which on their order counts.
_APART = 0.1


class Passes(Strict):
    """Seconds of a node of one kind for one micro-batch, and sizes in parameters.

    Layers are the embedding, the blocks, and the head with the loss. A step is one layer's.
    """

    source: str
    model: str
    gpu: str
    gpus_per_node: int = Field(ge=1)
    micro_batch: int = Field(ge=1)
    length: int = Field(ge=1)
    width: int = Field(ge=1)
    embedding_parameters: int
    block_parameters: int
    head_parameters: int
    embedding_seconds: float
    forward_seconds: float
    backward_seconds: float
    head_forward_seconds: float
    head_backward_seconds: float
    step_seconds: float


class Step(Strict):
    """A measured step: all replicas of a pipeline whose stages are on a node each."""

    source: str
    model: str
    #: Kinds of a pipeline's nodes in the order of its stages; of all replicas, if they differ,
    #: with ``/`` between; one kind, if all are alike.
    gpus: str
    nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    #: Bandwidth between nodes of one kind, and of two, as the source measured it.
    gbit_s: float = Field(gt=0)
    mixed_gbit_s: float | None = Field(default=None, gt=0)
    #: Layers of each stage.
    layers: str
    micro_batch: int = Field(ge=1)
    #: Sequences of a step.
    sequences: int = Field(ge=1)
    seconds: float = Field(gt=0)
    note: str = ""

    @property
    def stages(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return tuple(map(int, self.layers.split()))

    @property
    def replicas(self) -> int:
        """The number of pipelines."""
        return self.nodes // len(self.stages)

    @property
    def chains(self) -> list[tuple[str, ...]]:
        """The kinds of the nodes of each pipeline, in the order of its stages."""
        named = [tuple(chain.split()) for chain in self.gpus.split("/")]
        if len(named) == 1:
            named *= self.replicas
        return [chain * len(self.stages) if len(chain) == 1 else chain for chain in named]

    def bytes_per_s(self, *gpus: str) -> float:
        """Rate between nodes of these kinds."""
        mixed = len(set(gpus)) > 1 and self.mixed_gbit_s is not None
        return (self.mixed_gbit_s if mixed else self.gbit_s) * 1e9 / 8  # type: ignore[operator]


@dataclass(frozen=True)
class Predicted:
    """A measured step, and the seconds that our events say."""

    step: Step
    seconds: float

    @property
    def error(self) -> float:
        """The relative error of the seconds."""
        return self.seconds / self.step.seconds - 1


def read(folder: Path = _RESULTS) -> tuple[list[Step], list[Passes]]:
    """Read the steps and the passes. Raises ``ValueError`` with the file and the line."""
    steps = [validated(Step, row, where) for where, row in rows_of(folder / "steps.csv")]
    passes = [validated(Passes, row, where) for where, row in rows_of(folder / "passes.csv")]
    return steps, passes


@cache
def predicted() -> list[Predicted]:
    """All committed steps."""
    steps, passes = read()
    return [Predicted(step, seconds(step, passes)) for step in steps]


def seconds(step: Step, passes: Sequence[Passes]) -> float:
    """Seconds of a step, of the slowest replica; raises ``ValueError`` for passes that lack."""
    known = {(of.model, of.gpu, of.gpus_per_node, of.micro_batch): of for of in passes}
    found = {}
    for gpu in {gpu for chain in step.chains for gpu in chain}:
        key = step.model, gpu, step.gpus_per_node, step.micro_batch
        if key not in known:
            raise ValueError(f"passes.csv: has none of {', '.join(map(str, key))}")
        found[gpu] = known[key]
    return max(_of_replica(step, chain, found) for chain in dict.fromkeys(step.chains))


def _of_replica(step: Step, chain: Sequence[str], passes: Mapping[str, Passes]) -> float:
    groups = len(step.stages)
    work = PipelineWork(
        # Its GPUs are not used, as the seconds of their passes were measured.
        cluster("h100-96gb", nodes=groups, ranks_per_node=step.gpus_per_node, inter_bits_per_s=1e9),
        "1f1b",
        groups,
        step.sequences // step.micro_batch // step.replicas,
        [_stage(step, chain, at, passes[gpu]) for at, gpu in enumerate(chain)],
    )
    return DeepSpeedStages(work).timeline().seconds


def _stage(step: Step, chain: Sequence[str], at: int, of: Passes) -> StageWork:
    last = len(chain) - 1
    first, final = at == 0, at == last
    blocks = step.stages[at] - first - final
    forward = blocks * of.forward_seconds + first * of.embedding_seconds
    backward = blocks * of.backward_seconds
    forward += final * of.head_forward_seconds
    backward += final * of.head_backward_seconds
    parameters = blocks * of.block_parameters
    parameters += first * of.embedding_parameters + final * of.head_parameters
    nbytes = FP32 * of.micro_batch * of.length * of.width
    neighbours: Mapping[Phase, int] = {"forward": at + 1, "backward": at - 1}
    sends: dict[Phase, PassWork] = {
        phase: _sent(nbytes, step.bytes_per_s(chain[at], chain[to]))
        for phase, to in neighbours.items()
        if 0 <= to <= last
    }
    beside = {other[at] for other in step.chains}
    reduced = all_reduce(inter_node(float(FP32 * parameters), step.replicas)).inter_node_bytes
    passes: Mapping[Kind, PassWork] = {
        "forward": PassWork({"compute": forward}),
        "backward": PassWork({"compute": backward}),
        "activations": PassWork({"compute": backward}),
        "weights": PassWork({}),
    }
    return StageWork(
        passes,
        passes["forward"],
        [_sent(reduced, step.bytes_per_s(*beside))] if step.replicas > 1 else [],
        step.stages[at] * of.step_seconds,
        sends=sends,
    )


def _sent(nbytes: float, bytes_per_s: float) -> PassWork:
    return PassWork({"inter_node": nbytes / bytes_per_s})


def orders(rows: Sequence[Predicted]) -> tuple[int, int]:
    """Pairs of mixes for the same nodes and batch that are measured apart, and those in order."""
    right, apart = 0, 0
    for one, other in combinations(rows, 2):
        same = ("source", "model", "nodes", "gpus_per_node", "sequences")
        if any(getattr(one.step, name) != getattr(other.step, name) for name in same):
            continue
        fast, slow = sorted((one, other), key=lambda of: of.step.seconds)
        if slow.step.seconds > (1 + _APART) * fast.step.seconds:
            apart += 1
            right += slow.seconds > fast.seconds
    return apart, right
