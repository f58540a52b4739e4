"""Adapters over bases in 4 bits, and gathers in float8, with FSDP2 and with FCDP.

Reductions add up in float64, so that sums of any order are one.
"""

import functools
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from peft import get_peft_model
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import fcdp
from fcdp.engine import engine_of
from fcdp.extensions import held, is_packed, names_inside, opened
from tests.clients import tiny

STEPS = 4
EXACT = MixedPrecisionPolicy(reduce_dtype=torch.float64)


def bitsandbytes(storage: torch.dtype, folder: str) -> nn.Module:
    """QLoRA by transformers and PEFT; packed weights are said to be of ``storage``."""
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=storage,
    )
    base = AutoModelForCausalLM.from_pretrained(
        tiny.saved(folder), quantization_config=four_bits, dtype=torch.float32, device_map="cpu"
    )
    return adapted(base)


def nf4(folder: str) -> nn.Module:
    """The same by torchao's tensor class, which FSDP2 gathers by an extension."""
    base = tiny.llama()
    for name, module in base.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            packed = to_nf4(module.weight.detach(), block_size=64, scaler_block_size=8)
            module.weight = nn.Parameter(packed, requires_grad=False)
    return adapted(base)


def float8(folder: str) -> nn.Module:
    """All is trained, and matrices cross as float8, by scales that follow each step."""
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(
        tiny.llama(), config=config, module_filter_fn=lambda _, name: name != "lm_head"
    )


def adapted(base: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return get_peft_model(base, tiny.lora())  # type: ignore[arg-type]


def blocks_of(model: Any) -> list[nn.Module]:
    return [each for each in model.modules() if type(each).__name__ == "LlamaDecoderLayer"]


def train(model: Any, after_step: Callable[[int], None] = lambda step: None) -> list[float]:
    """Losses of some steps, and of an evaluation after the first."""
    optimizer = optimizer_of(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(STEPS):
        rows = torch.randint(3, 128, (2, 16), generator=generator)
        if step == 1:
            with torch.no_grad():
                losses.append(model(input_ids=rows, labels=rows).loss.item())
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after_step(step)
    return losses


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def bits_of(model: Any) -> dict[str, bytes]:
    """Return the tensors that frozen parameters hold now: whole, or this rank's part."""
    return {
        name: b"".join(map(bytes_of, held(local, names_inside(local))))
        for name, param in model.named_parameters()
        if not param.requires_grad
        for local in [param._local_tensor if isinstance(param, DTensor) else param]
    }


def codes_of(model: nn.Module) -> dict[str, bytes]:
    """The largest tensor of each that a whole model's frozen parameter holds."""
    return {
        name: largest(held(param, names_inside(param)))
        for name, param in model.named_parameters()
        if not param.requires_grad
    }


def published_codes(
    model: nn.Module, folder: str, names: Iterable[str], dtype: torch.dtype | None = None
) -> dict[str, bytes]:
    """The same as a reader of a publication of the model, whose numbers have ``dtype``, has it."""
    fcdp.publish(model, folder, dtype=dtype)
    reader = fcdp.Subscriber(folder)
    reader.update()
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for key, part in reader.state.items():
        if (name := key.partition(":")[0]) in parts:
            parts[name].append(part)
    return {name: largest(each) for name, each in parts.items()}


def largest(tensors: Iterable[torch.Tensor]) -> bytes:
    return max(map(bytes_of, tensors), key=len)


def nans_in(model: nn.Module) -> int:
    """Count the packed codes that are NaNs by the dtype that they are said to be of."""
    return sum(
        int(param.detach().isnan().sum())
        for param in model.parameters()
        if hasattr(param, "quant_state") and param.is_floating_point()
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    # A copy: memory that numpy has seen cannot be freed as FSDP2 does.
    return tensor.detach().clone().view(-1).view(torch.uint8).numpy().tobytes()


def gathered_bits_of(model: nn.Module) -> dict[str, bytes]:
    sharded = [each for each in model.modules() if isinstance(each, FSDPModule)]
    for module in sharded:
        module.unshard()
    bits = bits_of(model)
    for module in sharded:
        module.reshard()
    return bits


def trained_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: opened(name, param)[name].full_tensor()  # type: ignore[attr-defined]
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def compared(topology: fcdp.Topology, make: Callable[[str], Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as private:
        folders = [private]
        dist.broadcast_object_list(folders)
        result = _compared(topology, make, folders[0])
        dist.barrier()
    return result


def _compared(topology: fcdp.Topology, make: Callable[[str], Any], folder: str) -> dict[str, Any]:
    theirs = make(folder)
    for module in [*blocks_of(theirs), theirs]:
        fully_shard(module, mesh=topology.mesh, mp_policy=EXACT)
    expected, parameters = train(theirs), trained_of(theirs)

    ours = make(folder)
    quantised, codes, nans = bits_of(ours), codes_of(ours), nans_in(ours)
    packed = [
        name
        for name, param in ours.named_parameters()
        if hasattr(param, "quant_state") or (is_packed(param) and not param.requires_grad)
    ]
    fcdp.shard(ours, topology, mp_policy=EXACT)
    ledger, units = fcdp.ledger(ours), engine_of(ours).units
    crossed: list[int] = []

    def count(step: int) -> None:
        crossed.append(ledger.snapshot()["inter_node"]["forward"])
        ledger.reset()

    history = train(ours, count)
    ends = trained_of(ours)
    gathered = gathered_bits_of(ours)

    local, optimizer = bits_of(ours), optimizer_of(ours)
    fcdp.save(ours, optimizer, f"{folder}/checkpoint").result()
    for param in ours.parameters():
        for each in held(param._local_tensor, names_inside(param._local_tensor)):
            each.zero_()
    fcdp.load(ours, optimizer, f"{folder}/checkpoint")
    published = published_codes(ours, f"{folder}/published", codes)
    rounded = published_codes(ours, f"{folder}/rounded", packed, torch.bfloat16)
    refusal = ""
    if quantised:
        fcdp.save_adapters(ours, f"{folder}/adapters")
        try:
            fcdp.export(ours, f"{folder}/model")
        except ValueError as error:
            refusal = str(error)
    others = topology.nodes - 1
    parts = {
        kind: sum(unit.shard_bytes for unit in units if unit.trainable == (kind == "trained"))
        for kind in ("trained", "frozen")
    }
    return {
        "same_history": history == expected,
        "apart": max((ends[name] - each).abs().max().item() for name, each in parameters.items()),
        "same_bits": gathered == quantised,
        "same_saved": bits_of(ours) == local,
        "same_published": published == codes and rounded == {name: codes[name] for name in packed},
        "nans": nans,
        "crossed": crossed,
        "adapters": others * parts["trained"],
        "frozen": others * parts["frozen"],
        "packed": sum(map(len, quantised.values())),
        "cached": ledger.host_cache_bytes,
        "units": len(units),
        "refusal": refusal,
    }


CASES: dict[str, Callable[[fcdp.Topology], dict[str, Any]]] = {
    **{
        f"bitsandbytes-{storage}": functools.partial(
            compared, make=functools.partial(bitsandbytes, getattr(torch, storage))
        )
        for storage in ("uint8", "bfloat16", "float32")
    },
    "nf4": functools.partial(compared, make=nf4),
    "float8": functools.partial(compared, make=float8),
}
