"""What one token's activations take, by the kernels that make them, in bytes.

Counted by hand from the layers of ``transformers``; a test compares them with real modules. Fused
kernels are those of published runs, all of which fit by these figures: a test holds that.
"""

from __future__ import annotations

from simulation.workload import Workload

_FP32 = 4
#: Bytes per token and word when the loss's backward begins, in fp32 whatever the logits are in:
#: their log-softmax, its gradient and theirs.
_LOSS_BYTES = 12


def block_bytes(workload: Workload) -> float:
    """Bytes of one token's activations in one block, kept for backward without recomputation.

    GPT-2: norms' and matrices' inputs, Q, K, V, attention's output, and five tensors of the MLP's
    width, as its approximate GELU is written out; two where it is fused. Llama: norms work in fp32.
    What is frozen does not keep its input unless adapters need it; replicated ones need it in fp32,
    each its own.
    """
    model, lora, element = workload.model, workload.lora, workload.element_bytes
    width, inner = model.width, model.inner
    queries, narrow = model.attention_width, model.narrow
    fused = workload.kernels == "fused"
    inputs = 0
    if lora is not None and workload.adapters == "replicated" and element < _FP32:
        adapted = [matrix for matrix in model.matrices if matrix.name in lora.targets]
        inputs = _FP32 * sum(matrix.inputs for matrix in adapted) - element * width
    inputs += _scores(workload)
    if model.experts > 1:  # a token's copies on the way to its experts
        inputs += element * model.active_experts * width
    if lora is not None and len(lora.targets) > len(model.attention_lora(lora.rank).targets):
        inputs += element * lora.rank * len(lora.targets)
        lora = None  # adapters on all matrices need all inputs, as matrices that are trained do
    if model.family == "gpt2":
        if lora is None:
            return inputs + element * (8 * width + (2 if fused else 5) * inner)
        return inputs + element * (7 * width + (1 if fused else 4) * inner)
    norms = 2 * (element if fused else _FP32) * width
    attention = element * (width + 2 * queries + 2 * narrow)
    if lora is None:
        return inputs + norms + attention + element * (3 * width + (3 if fused else 4) * inner)
    return inputs + norms + attention + element * (2 if fused else 3) * inner


def kept_bytes(workload: Workload) -> float:
    """Bytes that a block keeps of one token where its activations are recomputed.

    Its input; and, if checkpointing is selective, what matrices and attention have given.
    """
    model = workload.model
    width = model.width
    if workload.checkpointing == "full":
        return workload.element_bytes * width
    given = sum(matrix.active * matrix.outputs for matrix in model.matrices) + width
    return workload.element_bytes * (width + given) + _scores(workload)


def loss_bytes(workload: Workload) -> int:
    """Bytes per token and word of the vocabulary when the loss is differentiated."""
    if workload.kernels == "fused":
        return 2 * workload.element_bytes  # logits and their gradient
    return _LOSS_BYTES


def _scores(workload: Workload) -> int:
    """Bytes of one token's attention to all others, where it is written out.

    GPT-2 keeps the softmax; Llama computes it in fp32 and keeps what it is cast to as well.
    """
    if workload.kernels != "eager":
        return 0
    pairs = workload.model.heads * workload.sequence_length
    element = workload.element_bytes
    cast = element < _FP32 and workload.model.family == "llama"
    return pairs * (element + (_FP32 if cast else 0))
