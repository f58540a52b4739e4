"""Types that a cell's frozen parameters are held in: a narrower one, or a library's packed one."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn

from experiments.records.cell import Cell, FrozenDType

#: Weights in four bits that share a scale.
_SCALED = 64


def hold(model: nn.Module, blocks: Sequence[nn.Module], cell: Cell) -> None:
    """Hold what is frozen as the cell says; adapters, which the optimizer steps, stay in float32.

    Raises ``ValueError`` for blocks without weights that can be packed, and for weights of sizes
    that cannot be.
    """
    if cell.frozen_dtype == "float32":  # as the model has it
        return
    cast(model, torch.bfloat16)
    if (pack := _PACK.get(cell.frozen_dtype)) is None:
        return
    layers = [*_linear(blocks)]
    if not layers:
        raise ValueError(
            f"frozen_dtype = {cell.frozen_dtype!r}: is for models whose blocks have linear layers "
            "(nn.Linear), as those of family llama have; allowed with this one are float32 and "
            "bfloat16"
        )
    for parent, name, layer in layers:
        setattr(parent, name, pack(layer, cell.cluster.nodes * cell.cluster.ranks_per_node))


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast frozen parameters. Whole numbers, such as codes of a packed base, stay as they are."""
    for param in model.parameters():
        if not param.requires_grad and param.is_floating_point():
            param.data = param.data.to(dtype)


def keep_scales(model: nn.Module) -> None:
    """Compute the scales of float8 weights once: each gather would add an all-reduce for each.

    Call it on all ranks, after sharding. Frozen weights, and so their scales, stay as they are.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def weights(param: torch.Tensor) -> int:
    """Count the weights that a parameter has: bitsandbytes packs two in an element."""
    packed = getattr(param, "quant_state", None)
    return param.numel() if packed is None else math.prod(packed.shape)


def _linear(blocks: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Linear layers of the blocks with a frozen weight: the module that has it, name and layer."""
    for block in blocks:
        for parent in block.modules():
            for name, layer in parent.named_children():
                if isinstance(layer, nn.Linear) and not layer.weight.requires_grad:
                    yield parent, name, layer


def _nf4(layer: nn.Linear, ranks: int) -> nn.Module:
    """Hold the weight in four bits, as torchao's NF4 tensor.

    FSDP2 gathers its codes and scales by an extension, and unpacks what has arrived. Each rank's
    part has whole blocks of scales, of at most 256, as torchao has them.
    """
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    scales, rest = divmod(layer.weight.numel(), _SCALED * ranks)
    if rest:
        each = f"each of {ranks} ranks must have a multiple of {_SCALED} elements"
        raise ValueError(_unfit("nf4", layer, each))
    packed = to_nf4(layer.weight.detach(), _SCALED, scaler_block_size=math.gcd(scales, 256))
    layer.weight = nn.Parameter(packed, requires_grad=False)
    return layer


def _bitsandbytes(layer: nn.Linear, ranks: int) -> nn.Module:
    """Hold the weight in four bits, as QLoRA has it by bitsandbytes: a parameter of bytes.

    FSDP2 gathers its codes as they are. Its scales are with the module, on each rank.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    kind: Any = {"quant_type": "nf4", "compress_statistics": True}
    shape = layer.in_features, layer.out_features
    dtype = layer.weight.dtype
    packed: nn.Module = Linear4bit(*shape, False, compute_dtype=dtype, device="meta", **kind)
    whole = Params4bit(layer.weight.detach(), requires_grad=False, module=packed, **kind)
    packed.weight = whole.to(layer.weight.device)  # packs it
    packed.bias = layer.bias
    return packed


def _float8(layer: nn.Linear, ranks: int) -> nn.Module:
    """Gather the weight, and multiply, in float8 with a scale per tensor, by torchao's training.

    Ranks hold their parts in bfloat16, and round them for each gather. GPUs without float8, and
    CPUs, whose products in it are slow, multiply the rounded values in bfloat16.
    """
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear
    from torchao.utils import is_sm_at_least_89

    if layer.out_features % ranks:
        raise ValueError(_unfit("float8", layer, f"{ranks} ranks must have equal parts of rows"))
    emulate = not is_sm_at_least_89()
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate)
    converted: nn.Module = Float8Linear.from_float(layer, config)
    return converted


def _unfit(kind: FrozenDType, layer: nn.Linear, why: str) -> str:
    shape = (*layer.weight.shape,)
    return f"frozen_dtype = {kind!r}: does not fit a weight of shape {shape}; {why}"


#: By type, what makes a layer with a packed weight of a linear layer, for so many ranks.
_PACK: Mapping[FrozenDType, Callable[[nn.Linear, int], nn.Module]] = {
    "float8": _float8,
    "nf4": _nf4,
    "bnb-4bit": _bitsandbytes,
}
