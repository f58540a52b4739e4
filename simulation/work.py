"""What a token's computation takes, block by block and phase by phase, by the kernels that do it.

Bytes are those that kernels read and write, with matrices' inputs and outputs but without weights;
they were counted by hand, from the code of ``transformers`` and of fused kernels.
"""

from __future__ import annotations

from simulation.rates import Work
from simulation.workload import Workload

#: Operations of attention's backward per operation of its forward: a fused kernel computes the
#: scores again.
_ATTENTION_BACKWARD = 2.5
#: Bytes per head and earlier token where the scores are written out: scaled, masked, softmax.
_SCORES_FORWARD, _SCORES_BACKWARD = 20.0, 30.0


def block_work(workload: Workload) -> tuple[Work, Work]:
    """One token's forward and backward in one block."""
    model, lora, length = workload.model, workload.lora, workload.sequence_length
    weights = float(sum(matrix.active_weights for matrix in model.matrices))
    adapters = float(workload.block_adapters)
    pairs = 4.0 * length * model.attention_width
    forward_bytes, backward_bytes = _block_bytes(workload)
    products = 2.0 * (weights + adapters)
    again = 4.0 * weights if lora is None else 2.0 * weights + 4.0 * adapters
    attention = pairs / 2
    if workload.kernels == "eager":  # all pairs, by matrix products
        products, again, attention = products + pairs, again + 2 * pairs, 0.0
    forward = Work(model.block_forward_flops(length, lora), products, attention, forward_bytes)
    backward = Work(
        model.block_backward_flops(length, lora),
        again,
        _ATTENTION_BACKWARD * attention,
        backward_bytes,
    )
    return forward, backward


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


def recomputed_work(workload: Workload) -> Work:
    """What backward computes again of a block whose activations were not kept."""
    forward, _ = block_work(workload)
    if workload.checkpointing == "full":
        return forward
    return Work(0.0, 0.0, 0.0, _elementwise(workload)[0])


def dequantised_bytes(workload: Workload) -> float:
    """Bytes that one pass through a block reads and writes to have its 4-bit weights in bf16."""
    if workload.lora is None or workload.frozen_dtype != "nf4":
        return 0.0
    weights = sum(matrix.weights for matrix in workload.model.matrices)
    return weights * (workload.frozen_bytes + workload.element_bytes)


def token_work(workload: Workload) -> Work:
    """All computation of one token, recomputation included."""
    forward, backward = block_work(workload)
    again = recomputed_work(workload) * workload.recomputed
    head_forward, head_backward = head_work(workload)
    blocks = (forward + backward + again) * workload.model.layers
    return blocks + head_forward + head_backward


def _block_bytes(workload: Workload) -> tuple[float, float]:
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
        forward = 10 * width + (2 if fused else 18) * inner
        backward = 12 * width + (3 if fused else 27) * inner
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
