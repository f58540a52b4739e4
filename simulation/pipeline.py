"""A pipeline's stages, each a training of its own on its nodes.

The model is cut as ``baselines.pipeline.cut`` cuts it. Groups of nodes have one stage each, or
several in turn. Ranks of one place in their groups are a pipeline, which trains whole the
micro-batches that they have under every other strategy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import takewhile

from baselines.cyclic.routes import partition
from baselines.pipeline.order import InFlight, in_flight
from baselines.settings import PipelineSchedule, divided
from simulation import memory
from simulation.hardware import Hardware
from simulation.memory import Footprint, Tiers
from simulation.transformer import Lora, Transformer
from simulation.units import Layout, layout
from simulation.workload import Workload

#: Pipelines in the cache: those of a search, which asks for their memory, bound and tasks.
_REMEMBERED = 1024


@dataclass(frozen=True)
class Pipeline:
    """A workload that is cut into stages for a cluster."""

    workload: Workload
    hardware: Hardware
    #: Each stage's blocks, what is outside of them at both ends, and its micro-batches.
    stages: tuple[Workload, ...]

    @classmethod
    @lru_cache(maxsize=_REMEMBERED)
    def of(cls, workload: Workload, hardware: Hardware) -> "Pipeline":
        """The stages of a workload, in the order of forward.

        Raises ``ValueError`` for nodes that are no whole groups, for more stages than blocks, and
        for several stages of a group where there is one alone.
        """
        size = workload.nodes_per_stage
        if why := divided(size, hardware.nodes):
            raise ValueError(f"nodes_per_stage = {size}: {why}")
        groups, per_group = hardware.nodes // size, workload.stages_per_node
        count, model = groups * per_group, workload.model
        if groups == 1 and per_group > 1:
            raise ValueError(f"stages_per_node = {per_group}: allowed on one node is 1")
        if count > model.layers:
            raise ValueError(
                f"strategy = pipeline: {count} stages need as many blocks, and the model has "
                f"{model.layers}; allowed are at most {model.layers} stages"
            )
        batches, models = groups * workload.accumulation, _models(model, workload.lora, count)
        made = {
            id(of): workload.changed(model=of, accumulation=batches)
            for of in {id(of): of for of in models}.values()  # most stages are alike
        }
        return cls(workload, hardware, tuple(made[id(of)] for of in models))

    @property
    def groups(self) -> int:
        return self.hardware.nodes // self.workload.nodes_per_stage

    @cached_property
    def of_stage(self) -> Hardware:
        """The nodes of one stage."""
        return replace(self.hardware, nodes=self.workload.nodes_per_stage)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one pipeline in a step."""
        return self.groups * self.workload.accumulation

    @property
    def message_bytes(self) -> float:
        """Bytes of one micro-batch's activations, or gradients, between two stages."""
        workload = self.workload
        return float(workload.tokens * workload.model.width * workload.element_bytes)

    @property
    def tied_bytes(self) -> float:
        """Bytes of all ranks of a group of the gradients that both ends of a pipeline have."""
        model, full = self.workload.model, self.workload.lora is None
        both = full and model.tied and self.groups > 1
        return 4.0 * model.vocabulary * model.width * both

    def _sizes(self, group: int) -> tuple[PipelineSchedule, int, int, int, int]:
        of = self.workload
        sizes = group, self.groups, of.stages_per_node, self.micro_batches
        return of.pipeline_schedule, *sizes

    def placed(self, stage: int) -> tuple[Layout, Tiers, memory.CacheBytes]:
        """The units of a stage, and where what its gathers bring is kept."""
        return self._placed[self.stages[stage]]

    @cached_property
    def _placed(self) -> dict[Workload, tuple[Layout, Tiers, memory.CacheBytes]]:
        """The same of each stage, of which most are alike."""
        found = {}
        for part in dict.fromkeys(self.stages):
            units = layout(part, *self.of_stage.shape)
            found[part] = units, *memory.place(part, units, self.of_stage)
        return found

    def sums_on_host(self, stage: int) -> bool:
        """Whether gradients of a stage's micro-batches are summed up in host memory."""
        part, (units, _, cache) = self.stages[stage], self.placed(stage)
        if part.schedule.partial_gradients in ("device", "each"):
            return False
        return "gradient sums" in memory.footprint(part, units, self.of_stage, cache).host

    def footprint(self) -> Footprint:
        """The peak memory of a rank, and of a node, of the groups that need most of each.

        The first caches an embedding, where the last has a head's loss on its devices. Of groups
        whose stages are alike, the one counts that has most under way.
        """
        most: dict[tuple[Workload, ...], list[list[int]]] = {}
        for group in range(self.groups):
            own = range(group, len(self.stages), self.groups)
            flying = in_flight(*self._sizes(group))
            ends = [(at > 0) + (at < len(self.stages) - 1) for at in own]
            needs = [[*flying[at], end] for at, end in zip(own, ends, strict=True)]
            alike = most.setdefault(tuple(self.stages[at] for at in own), needs)
            for known, new in zip(alike, needs, strict=True):
                known[:] = map(max, known, new)
        found = [self._of_group(stages, needs) for stages, needs in most.items()]
        on_device = max(found, key=lambda of: of.device_bytes)
        on_host = max(found, key=lambda of: of.host_bytes)
        return replace(on_device, host=on_host.host)

    def _of_group(self, stages: Sequence[Workload], needs: Sequence[Sequence[int]]) -> Footprint:
        """A group's memory where the stage that needs most computes, or where all are stepped."""
        buffers = self.micro_batches * self.message_bytes * (self.groups > 1)
        parts = []
        for part, (*flying, ends) in zip(stages, needs, strict=True):
            units, _, cache = self._placed[part]
            under_way, received = InFlight(*flying), buffers * ends
            nodes = self.of_stage
            parts.append(memory.footprint(part, units, nodes, cache, under_way, received))
        if len(parts) == 1:
            return parts[0]
        computing = max(parts, key=lambda of: of.device_bytes - sum(of.waiting.values()))
        others = [of.waiting for of in parts if of is not computing]
        of_device = _sum([computing.device, *others]), _sum([of.stepping for of in parts])
        return Footprint(
            device=max(of_device, key=lambda of: sum(of.values())),
            forward=_sum([computing.forward, *others]),
            host=_sum([of.host for of in parts]),
            disk=_sum([of.disk for of in parts]),
        )


def equal_tokens(trained: float, width: int, nodes: int) -> float:
    """Tokens of all ranks per step for which a node of a pipeline sends what one of FCDP does.

    With a stage per node and one dtype: activations of this width to one neighbour or two, beside
    one gather and one reduction of the trained parameters.
    """
    return 2 * (nodes - 1) / nodes * trained / (min(2, nodes - 1) * width)


def _sum(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


@lru_cache(maxsize=_REMEMBERED)
def _models(model: Transformer, lora: Lora | None, count: int) -> tuple[Transformer, ...]:
    """The shapes of the stages into which a model is cut; one object for those that are alike."""
    of_kinds = []
    for kind in model.kinds or (model,):
        adapters = 0 if lora is None else kind.adapter_parameters(lora.on(kind))
        of_kinds.append(sum(matrix.weights for matrix in kind.matrices) + adapters)
    costs = [float(of_kinds[kind]) for kind in model.order]
    costs[-1] += model.vocabulary * model.width
    made: dict[tuple[object, ...], Transformer] = {}
    stages = []
    for run in partition(costs, count):
        ends = run.start == 0, run.stop == model.layers
        alike = *ends, tuple(model.order[block] for block in run)
        if alike not in made:
            made[alike] = _model(model, run)
        stages.append(made[alike])
    return tuple(stages)


def _model(model: Transformer, run: range) -> Transformer:
    """The shape of a stage of these blocks, with embeddings and head if it is at an end."""
    embedded = [*takewhile(lambda rows: rows[1] > 1, model.root_rows)]
    rows = embedded if run.start == 0 else []
    last = run.stop == model.layers
    if last:
        rows = rows + model.root_rows[len(embedded) :]
        if model.tied and run.start > 0:
            rows = rows + embedded[:1]
    kinds = [model.order[block] for block in run]
    used = sorted(set(kinds)) if model.kinds else []
    return replace(
        model,
        layers=len(run),
        vocabulary=model.vocabulary if last else 1,
        counted_root=tuple(rows) or ((0, 1),),
        kinds=tuple(replace(model.kinds[kind], layers=kinds.count(kind)) for kind in used),
        kind_of=tuple(used.index(kind) for kind in kinds) if used else (),
    )
