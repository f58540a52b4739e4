"""A workload for the simulator, a cell without its cluster; and the cost of one of its tokens.

The cost is counted block by block, by the kernels that do it: operations, bytes, activations. One
multiplication and addition counts as two operations; as trainers count, every token attends to the
whole sequence (PaLM's 12·L·H·Q·T for forward and backward), and frozen weights take four. Bytes
are those that kernels read and write, with matrices' inputs and outputs but without weights; they
were counted by hand, from the code of ``transformers`` and of fused kernels. So were the
activations, which a test compares with real modules. Fused kernels are those of published runs, all
of which fit by these figures: a test holds that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property, lru_cache, reduce
from operator import add
from typing import Any, Literal, TypeVar

from baselines.registry import find, schedule_of
from baselines.schedule import STAGES, Schedule, by_node
from baselines.settings import ExchangeKind, OuterPlace, PipelineSchedule, UpdateRule
from fcdp.grouping import PartialsChoice
from simulation.checks import Checked, Count, Share
from simulation.hardware import Work
from simulation.transformer import Lora, Transformer

#: Kernels: attention by matrix products; fused attention, as PyTorch has it; and fused norms,
#: activation functions and loss besides, as a compiler or a library of such kernels makes them.
Kernels = Literal["eager", "flash", "fused"]
#: Whether backward computes a whole block again, or all but attention and every second matrix
#: product, as torchtitan does.
Checkpointing = Literal["full", "selective"]
#: Shares of the blocks that are recomputed, or of all blocks what is no product.
Recomputed = float | Literal["selective"]
#: Type in which frozen parameters are held: fp32 as FSDP2 has them unless told otherwise; bf16; or
#: blocks' matrices as ``PACKINGS`` says, the rest in bf16.
FrozenDtype = Literal["fp32", "bf16", "fp8", "nf4", "bnb-4bit"]
ReduceDtype = Literal["same", "fp32"]
#: Dtype of the blocks' matrix products; all else, and attention, is in bf16.
ProductDtype = Literal["bf16", "fp8"]
#: Generation of the fused attention.
Attention = Literal["flash-1", "flash-2", "flash-3"]
#: States that an optimizer keeps: parameters and moments in fp32; both in bf16, and no other copy;
#: or parameters in bf16 and moments in 8 bits.
States = Literal["fp32", "bf16", "int8"]
#: Bytes per weight in 4 bits that its scales take, which are themselves quantised (QLoRA).
_SCALES = 0.127 / 8
#: Operations of attention's backward per operation of its forward: a fused kernel computes the
#: scores again.
_ATTENTION_BACKWARD = 2.5
#: Seconds of attention, by those of the second generation: the first took twice as many, the third
#: takes two thirds (the papers on FlashAttention-2 and 3).
_GENERATIONS: Mapping[Attention, float] = {"flash-1": 2.0, "flash-2": 1.0, "flash-3": 2 / 3}
#: Seconds of products, by those in bf16: fp8 has twice the rate on all GPUs that have it, and casts
#: take the rest. By eleven published runs of three sources, which a test predicts: each alone says
#: 0.49 to 0.74, but one that is nearly all attention.
_PRODUCTS: Mapping[ProductDtype, float] = {"bf16": 1.0, "fp8": 0.6}
#: Bytes per element of AdamW: it reads parameter, gradient and two moments, and writes all but the
#: gradient.
_ADAM_BYTES: Mapping[States, int] = {"fp32": 28, "bf16": 14, "int8": 10}
#: Bytes per head and earlier token where the scores are written out: scaled, masked, softmax.
_SCORES_FORWARD, _SCORES_BACKWARD = 20.0, 30.0
#: Bytes per parameter in fp32, and of AdamW's master and moments.
FP32, STATE_BYTES = 4, 12
#: Kernels of a block's forward, or backward: ours, by traces of such blocks; and of an adapter's.
_KERNELS: Mapping[Kernels, int] = {"eager": 60, "flash": 45, "fused": 20}
_KERNELS_OF_ADAPTER = 6
#: Bytes per token and word when the loss's backward begins, in fp32 whatever the logits are in:
#: their log-softmax, its gradient and theirs.
_LOSS_BYTES = 12
#: Computations of a token in the cache: those of a search and of its flips.
_REMEMBERED = 1024
_Sum = TypeVar("_Sum", int, float, Work)


@dataclass(frozen=True)
class Packing:
    """Bytes per frozen weight in a library's tensors: what ranks shard, and what a gather sends."""

    sharded: float
    gathered: float
    #: Bytes that each rank holds besides, and nobody sends.
    on_each_rank: float = 0.0


#: torchao's float8 training, which rounds bf16 shards to send them; torchao's NF4, whose scales are
#: sharded too; bitsandbytes' 4 bits, whose scales are not.
PACKINGS: Mapping[FrozenDtype, Packing] = {
    "fp8": Packing(sharded=2.0, gathered=1.0),
    "nf4": Packing(sharded=0.5 + _SCALES, gathered=0.5 + _SCALES),
    "bnb-4bit": Packing(sharded=0.5, gathered=0.5, on_each_rank=_SCALES),
}


@dataclass(frozen=True, kw_only=True)
class Workload(Checked):
    """A strategy on a model, as the simulator sees it.

    Raises ``ValueError`` naming the field that cannot be.
    """

    strategy: str
    model: Transformer
    #: ``None``: all parameters are trained.
    lora: Lora | None = None
    sequence_length: Count
    #: Sequences per rank and micro-batch, and micro-batches between two optimizer steps.
    micro_batch: Count
    accumulation: Count = 1
    #: Bytes per element in gathers, computation and reductions. With 2, master weights stay fp32.
    element_bytes: Literal[2, 4] = 2
    #: Activation-checkpointing fraction: share of the blocks that backward recomputes.
    recomputed: Share = 0.0
    #: Blocks that these recompute.
    checkpointing: Checkpointing = "full"
    kernels: Kernels = "flash"
    frozen_dtype: FrozenDtype = "fp32"
    #: Type in which gradients are summed on their way: as they are, or fp32.
    reduce_dtype: ReduceDtype = "same"
    product_dtype: ProductDtype = "bf16"
    attention: Attention = "flash-2"
    states: States = "fp32"
    #: Settings as a cell has them, for strategies that have the choice.
    policy: str = "host"
    gather_codec: str = "none"
    reduce_codec: str = "none"
    exchanges: ExchangeKind = "hierarchical"
    partial_gradients: PartialsChoice = "device"
    #: Local SGD and its kin: steps per round, what a worker is, where the outer state lies.
    interval: Count = 12
    worker: str = "rank"
    #: Number of fragments that arrive in turn, and of steps in which one crosses.
    fragments: Count = 2
    overlap: Count = 1
    outer_on: OuterPlace = "device"
    #: Cycles: which parameters may be one step old, and how many stages there are, if not as many
    #: as micro-batches.
    rule: UpdateRule = "v2"
    stages: Count | None = None
    #: Pipelines: their order, stages of each group of nodes, what shards a stage, and nodes of a
    #: group.
    pipeline_schedule: PipelineSchedule = "ahead"
    stages_per_node: Count = 1
    within_stage: Literal["sharded", "replicated", "fcdp"] = "sharded"
    nodes_per_stage: Count = 1
    #: AdamW's, on which the size of differences depends (``gather_codec`` ``delta``).
    learning_rate: float = 1e-5
    #: LuWu's: bytes of a message, whether acknowledgements are merged, and whether frozen
    #: parameters are pulled once.
    chunk_bytes: Count = 256 * 1024
    merged: bool = True
    cached: bool = False

    @cached_property
    def schedule(self) -> Schedule:
        """The strategy's, as the settings have it.

        Raises ``ValueError`` for a strategy that does not exist or is not simulated.
        """
        settings = self.within_stage, self.exchanges, self.partial_gradients, self.worker
        return _schedule(self.strategy, *settings)

    @property
    def engine(self) -> str:
        """Engine of a step's hooks and calls: ``ddp`` where FSDP2 and DeepSpeed have none."""
        if self.served:  # nothing was fitted to LuWu
            return "fsdp2"
        schedule = self.schedule
        if schedule.shards == "rank" or schedule.cycle is not None:
            return "ddp"
        # The engine of workers that step apart is the one that trains each.
        return find(self.strategy).engine if schedule.averages is None else "fsdp2"

    @property
    def served(self) -> bool:
        """Whether a server beside the ranks holds the model, as in LuWu."""
        return bool(find(self.strategy).extra)

    @property
    def packing(self) -> Packing | None:
        """Bytes of the weights of adapters' base, where it is packed, or gathered so."""
        return None if self.lora is None else PACKINGS.get(self.frozen_dtype)

    @property
    def frozen(self) -> int:
        """Parameters that the optimizer does not step."""
        return self.parameters - self.trained

    @property
    def frozen_bytes(self) -> float:
        """Bytes per frozen parameter of what can be sharded, the mean of all."""
        usual = 4.0 if self.frozen_dtype == "fp32" else 2.0
        return usual if self.packing is None else self._mean(self.packing.sharded, usual)

    @property
    def frozen_gathered_bytes(self) -> float:
        """Bytes per frozen parameter in a gather, the mean of all."""
        usual = float(self.element_bytes)
        return usual if self.packing is None else self._mean(self.packing.gathered, usual)

    @property
    def frozen_scale_bytes(self) -> float:
        """Bytes of the scales of frozen parameters that each rank holds whole."""
        return 0.0 if self.packing is None else self.packing.on_each_rank * self.packed_weights

    @property
    def packed_weights(self) -> int:
        """Weights of the blocks' matrices, which a packed base has packed."""
        return self.total(lambda each: sum(m.weights for m in each.model.matrices))

    def _mean(self, packed: float, usual: float) -> float:
        """The mean of bytes per parameter of blocks' matrices and of the rest of the model."""
        share = self.packed_weights / self.model.parameters
        return share * packed + (1 - share) * usual

    @property
    def sharded_bytes(self) -> int:
        """Bytes per parameter of what the ranks shard: fp32 ones, or those that are gathered."""
        wide = self.schedule.shards_fp32 and self.states == "fp32"
        return FP32 if wide else self.element_bytes

    @property
    def frozen_sharded_bytes(self) -> float:
        """Bytes per frozen parameter of what the ranks shard."""
        return min(float(self.sharded_bytes), self.frozen_bytes)

    @property
    def reduced_bytes(self) -> int:
        """Bytes per element of a reduction."""
        wide = self.reduce_dtype == "fp32" or self.schedule.gathered_for == "step"
        return FP32 if wide else self.element_bytes

    @property
    def adam_bytes(self) -> int:
        """Bytes per trained parameter that the optimizer's step reads and writes on a device."""
        return _ADAM_BYTES[self.states]

    @property
    def tokens(self) -> int:
        """Tokens per rank and micro-batch."""
        return self.micro_batch * self.sequence_length

    @cached_property
    def parts(self) -> tuple["Workload", ...]:
        """The workload on each kind of block alone, for what is said of one; itself, if equal."""
        if not self.model.kinds:
            return (self,)
        return tuple(
            self.changed(model=kind, lora=self.lora and self.lora.on(kind))
            for kind in self.model.kinds
        )

    def changed(self, **values: Any) -> "Workload":
        """The workload with these values of fields, which must be such as it allows.

        ``replace`` would check all of them again: a search has thousands.
        """
        assert values.keys() <= _FIELDS, values.keys() - _FIELDS
        made, own = object.__new__(Workload), vars(self).copy()
        for name in _CACHED & own.keys():  # of this one alone
            del own[name]
        vars(made).update(own, **values)
        return made

    def total(self, of: Callable[["Workload"], _Sum]) -> _Sum:
        """The sum over all blocks of what this gives for one."""
        return reduce(add, (of(part) * part.model.layers for part in self.parts))

    @property
    def block_adapters(self) -> int:
        """Parameters of the adapters of one block, the most of any."""
        some = (part.model.adapter_parameters(part.lora) for part in self.parts if part.lora)
        return max(some, default=0)

    @property
    def block_parameters(self) -> int:
        """Parameters of one block, adapters included, of the largest."""
        return self.model.block_parameters + self.block_adapters

    @cached_property
    def adapters(self) -> int:
        """Parameters of all adapters."""
        return 0 if self.lora is None else self.total(lambda each: each.block_adapters)

    @property
    def parameters(self) -> int:
        """Parameters of the model, adapters included."""
        return self.model.parameters + self.adapters

    @property
    def trained(self) -> int:
        """Parameters that the optimizer steps."""
        return self.model.parameters if self.lora is None else self.adapters


_FIELDS = frozenset(field.name for field in fields(Workload))
_CACHED = {name for name, of in vars(Workload).items() if isinstance(of, cached_property)}


@cache
def _schedule(
    strategy: str,
    within_stage: str,
    exchanges: ExchangeKind,
    partial_gradients: PartialsChoice,
    worker: str,
) -> Schedule:
    schedule = schedule_of(strategy)
    if schedule.cut:
        if within_stage not in STAGES:
            raise ValueError(
                f"within_stage = {within_stage!r}: is not simulated; allowed are "
                f"{', '.join(STAGES)}"
            )
        schedule = STAGES[within_stage]
    schedule = schedule.exchanging(exchanges, partial_gradients)
    if schedule.averages is None or worker == "rank":
        return schedule
    if worker != "node":
        raise ValueError(
            f"worker = {worker!r}: workers of several nodes are not simulated; allowed "
            "are rank and node"
        )
    return by_node(schedule)


def block_work(workload: Workload) -> tuple[Work, Work]:
    """One token's forward and backward in one block."""
    model, lora, length = workload.model, workload.lora, workload.sequence_length
    weights = float(sum(matrix.active_weights for matrix in model.matrices))
    adapters = float(workload.block_adapters)
    pairs = 4.0 * model.attended(length) * model.attention_width + 8.0 * model.scanned
    forward_bytes, backward_bytes = _moved_bytes(workload)
    products = 2.0 * (weights + adapters)
    again = 4.0 * weights if lora is None else 2.0 * weights + 4.0 * adapters
    attention = pairs / 2
    flops = products + pairs, again + 2 * pairs
    attention *= _GENERATIONS[workload.attention]
    if workload.kernels == "eager":  # all pairs, by matrix products
        (products, again), attention = flops, 0.0
    products, again = (_PRODUCTS[workload.product_dtype] * part for part in (products, again))
    forward = Work(flops[0], products, attention, forward_bytes)
    return forward, Work(flops[1], again, _ATTENTION_BACKWARD * attention, backward_bytes)


def head_work(workload: Workload) -> tuple[Work, Work]:
    """One token's forward and backward in the output layer and the loss."""
    model, element = workload.model, workload.element_bytes
    flops = model.head_flops
    times = 2 if workload.lora is None else 1
    if workload.kernels == "fused":
        forward, backward = 2 * element, 4 * element
    else:  # the loss is in fp32, and written out
        forward, backward = 2 * element + 12, 3 * element + 16
    words = model.vocabulary
    return (
        Work(flops, flops, 0.0, forward * words),
        Work(times * flops, times * flops, 0.0, backward * words),
    )


def checkpointed(recomputed: Recomputed) -> dict[str, Any]:
    """Fields of a workload that recomputes this share of its blocks."""
    if recomputed == "selective":
        return {"recomputed": 1.0, "checkpointing": "selective"}
    return {"recomputed": recomputed}


def recomputed_work(workload: Workload) -> Work:
    """Work that backward does again for a block whose activations were not kept."""
    forward, _ = block_work(workload)
    if workload.checkpointing == "full":
        return forward
    products = forward.products / 2
    return Work(products, products, 0.0, _elementwise(workload)[0])


def block_passes(workload: Workload, share: float = 1.0) -> tuple[Work, Work]:
    """One token's forward in this share of a block, and its backward with what it does again."""
    forward, backward = (work * share for work in block_work(workload))
    return forward, backward + recomputed_work(workload) * share * workload.recomputed


def block_kernels(workload: Workload) -> int:
    """Kernels that one pass through a block launches, roughly: ours."""
    adapters = 0 if workload.lora is None else len(workload.lora.targets)
    return _KERNELS[workload.kernels] + _KERNELS_OF_ADAPTER * adapters


def unpacked_bytes(workload: Workload) -> float:
    """Bytes read and written for a block's packed weights in one pass: the mean block's.

    Those in 4 bits are unpacked to bf16. Those in fp8 are rounded from bf16 by a rank that has them
    whole; what a rank of many rounds of them to send is not counted.
    """
    packing, written = workload.packing, float(workload.element_bytes)
    if packing is None:
        return 0.0
    if workload.frozen_dtype == "fp8":
        if workload.schedule.shards != "rank":
            return 0.0
        written = packing.gathered
    moved = packing.sharded + packing.on_each_rank + written
    return workload.packed_weights / workload.model.layers * moved


def token_work(workload: Workload) -> Work:
    """All computation of one token, recomputation included."""
    # It depends neither on these nor on the strategy, and a search tries many.
    return _token_work(workload.changed(strategy="ddp", micro_batch=1, accumulation=1))


@lru_cache(maxsize=_REMEMBERED)
def _token_work(workload: Workload) -> Work:
    def of_block(part: Workload) -> Work:
        forward, backward = block_work(part)
        return forward + backward + recomputed_work(part) * workload.recomputed

    head_forward, head_backward = head_work(workload)
    return workload.total(of_block) + head_forward + head_backward


def _moved_bytes(workload: Workload) -> tuple[float, float]:
    """Bytes of one token's forward and backward in one block."""
    model, element, lora = workload.model, workload.element_bytes, workload.lora
    of_matrices = element * sum(
        matrix.active * (matrix.inputs + matrix.outputs) for matrix in model.matrices
    )
    attention = element * 2 * (model.attention_width + model.narrow)
    forward, backward = _elementwise(workload)
    forward += of_matrices + attention
    backward += (2 if lora is None else 1) * of_matrices + 2 * attention
    if lora is not None:  # what an adapter yields is scaled and added
        adapted = [matrix for matrix in model.matrices if matrix.name in lora.targets]
        more = element * sum(matrix.inputs + 4 * matrix.outputs for matrix in adapted)
        forward, backward = forward + more, backward + 2 * more
    return float(forward), float(backward)


def _elementwise(workload: Workload) -> tuple[float, float]:
    """Bytes of norms, residuals, rotations and activation functions, and of written-out scores."""
    model, element, kernels = workload.model, workload.element_bytes, workload.kernels
    width, inner = model.width, model.inner
    rotated = model.attention_width + model.narrow
    fused = kernels == "fused"
    if model.family == "gpt2":
        eager = kernels == "eager"  # an approximate GELU is written out
        forward = 10 * width + (18 if eager else 2) * inner
        backward = 12 * width + (27 if eager else 3) * inner
    elif fused:
        forward = 10 * width + 2 * rotated + 3 * inner
        backward = 12 * width + 2 * rotated + 5 * inner
    else:  # norms work in fp32, an operation at a time
        forward = 42 * width + 10 * rotated + 5 * inner
        backward = 60 * width + 10 * rotated + 8 * inner
    scores = model.heads * workload.sequence_length if kernels == "eager" else 0
    return (
        float(element * forward + _SCORES_FORWARD * scores),
        float(element * backward + _SCORES_BACKWARD * scores),
    )


def block_bytes(workload: Workload) -> float:
    """Bytes of one token's activations in one block, kept for backward without recomputation.

    GPT-2: norms' and matrices' inputs, Q, K, V, attention's output, and five tensors of the MLP's
    width, as its approximate GELU is written out; two where it is fused. Llama: norms work in fp32.
    What is frozen does not keep its input unless adapters need it.
    """
    model, lora, element = workload.model, workload.lora, workload.element_bytes
    width, inner = model.width, model.inner
    queries, narrow = model.attention_width, model.narrow
    fused = workload.kernels == "fused"
    inputs = _scores(workload)
    if model.experts > 1:  # a token's copies on the way to its experts
        inputs += element * model.active_experts * width
    if lora is not None and len(lora.targets) > len(model.lora(lora.rank).targets):
        inputs += element * lora.rank * len(lora.targets)
        lora = None  # adapters on all matrices need all inputs, as matrices that are trained do
    if model.family == "gpt2":
        if lora is None:
            return inputs + element * (8 * width + (2 if fused else 5) * inner)
        return inputs + element * (7 * width + (1 if fused else 4) * inner)
    norms = 2 * (element if fused else FP32) * width
    attention = element * (width + 2 * queries + 2 * narrow)
    if lora is None:
        return inputs + norms + attention + element * (3 * width + (3 if fused else 4) * inner)
    return inputs + norms + attention + element * (2 if fused else 3) * inner


def checkpointed_bytes(workload: Workload) -> float:
    """Bytes that a block keeps of one token where its activations are recomputed.

    That is its input; with selective checkpointing also outputs of attention and half the matrices.
    """
    model = workload.model
    width = model.width
    if workload.checkpointing == "full":
        return workload.element_bytes * width
    outputs = sum(matrix.active * matrix.outputs for matrix in model.matrices) / 2 + width
    return workload.element_bytes * (width + outputs) + _scores(workload)


def output_bytes(workload: Workload) -> float:
    """Bytes of one token's gradients of what trained parameters yield, norms and the head too."""
    element = workload.element_bytes

    def of_block(part: Workload) -> int:
        model, lora = part.model, part.lora
        if lora is not None:
            adapted = [matrix for matrix in model.matrices if matrix.name in lora.targets]
            return sum(lora.rank + matrix.outputs for matrix in adapted)
        return sum(m.active * m.outputs for m in model.matrices) + model.norms * model.width

    of_head = workload.model.vocabulary if workload.lora is None else 0
    return float(element * (workload.total(of_block) + of_head))


def loss_bytes(workload: Workload) -> int:
    """Bytes per token and word of the vocabulary when the loss is differentiated."""
    # A fused loss keeps the logits and their gradient.
    return 2 * workload.element_bytes if workload.kernels == "fused" else _LOSS_BYTES


def _scores(workload: Workload) -> int:
    """Bytes of one token's attention to all others, where it is written out.

    GPT-2 keeps the softmax; Llama computes it in fp32 and keeps what it is cast to as well.
    """
    if workload.kernels != "eager":
        return 0
    pairs = workload.model.heads * workload.sequence_length
    element = workload.element_bytes
    cast = element < FP32 and workload.model.family == "llama"
    return pairs * (element + (FP32 if cast else 0))
