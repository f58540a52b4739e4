"""The models of cells: those built in, by ``transformers``' configurations, and users' own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn

from experiments.records.cell import Cell
from experiments.records.workload import (
    AnyModel,
    ConfiguredModel,
    Convolutional,
    ImageModel,
    Images,
    OwnModel,
)
from experiments.worker import convolutional, frozen, images
from fcdp import Topology
from fcdp.arguments import blocks_of
from fcdp.blocks import find_blocks
from fcdp.cache.named import imported
from fcdp.checksum import checksum
from fcdp.extensions import held, names_inside
from simulation.transformer import ATTENTION, ModelSpec, Transformer

#: Characters of a library's error that are quoted.
_LONGEST = 300


def build(cell: Cell) -> tuple[nn.Module, Sequence[nn.Module]]:
    """The cell's model and its transformer blocks, with equal weights on every rank.

    Raises ``ValueError`` naming line and key for a model that cannot be had.
    """
    torch.manual_seed(cell.seed)
    model, blocks = _made(cell.model, cell)
    if cell.tuning == "lora":
        model = _add_adapters(model, blocks, cell)
        frozen.hold(model, blocks, cell)
    return model, list(blocks)


def _made(spec: AnyModel, cell: Cell) -> tuple[nn.Module, Sequence[nn.Module]]:
    if isinstance(spec, ConfiguredModel):
        return _configured(spec, cell)
    if isinstance(spec, OwnModel):
        return _own(spec, cell)
    if isinstance(spec, ModelSpec):
        return _configured(_built_in(spec, cell.sequence_length), cell)
    assert isinstance(cell.data, Images), "the reader refuses other cells"
    source = images.SOURCES[cell.data.images]
    (channels, size, _), classes = source.shape, source.classes
    if isinstance(spec, Convolutional):
        network = convolutional.small(channels, classes, layers=spec.layers, width=spec.width)
    else:
        network = convolutional.resnet(channels, classes, size, layers=spec.layers)
    return network, list(network.blocks)


def small_llama(layers: int) -> Any:
    """The Llama of the examples, of width 64, with random weights: nothing is downloaded."""
    spec = ModelSpec(name="small", family="llama", layers=layers, width=64, heads=4)
    return _auto().from_config(_configuration(_built_in(spec, 64), spec.name))


def _auto() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def _built_in(spec: ModelSpec, sequence_length: int) -> ConfiguredModel:
    """The configuration of a built-in family."""
    shapes: dict[str, dict[str, Any]] = {
        "gpt2": {
            "n_positions": sequence_length,
            "n_embd": spec.width,
            "n_layer": spec.layers,
            "n_head": spec.heads,
        },
        "llama": {
            "max_position_embeddings": sequence_length,
            "hidden_size": spec.width,
            "intermediate_size": Transformer.of(spec, sequence_length).mlp_width,
            "num_hidden_layers": spec.layers,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.heads,
        },
    }
    fields = {"model_type": spec.family, "vocab_size": spec.vocabulary, **shapes[spec.family]}
    return ConfiguredModel(name=spec.name, config=spec.name, configuration=fields)


def _configured(spec: ConfiguredModel, cell: Cell) -> tuple[nn.Module, Sequence[nn.Module]]:
    """The model that ``transformers`` makes of the configuration, and its blocks, in float32.

    Raises ``ValueError`` naming line and key for a configuration that it does not know or cannot
    build, for weights that are not there, and for a model without blocks.
    """
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    where = cell.origin.key("model", "config")
    config = _configuration(spec, where)
    # Tokens of these, such as BERT, see those after them too, unless their configuration says so.
    causal = config.is_encoder_decoder or any(
        getattr(config, name, False) for name in ("is_decoder", "causal")
    )
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not causal:
        raise ValueError(
            f"{where}: {spec.config} is of model_type {spec.model_type!r}, whose tokens see those "
            "that they are to predict; allowed are causal families, such as gpt2, and this one "
            "with is_decoder: true"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and cell.sequence_length > longest:
        raise ValueError(
            f"{where}: {spec.config} allows sequences of up to {longest} tokens, and "
            f"sequence_length is {cell.sequence_length}"
        )
    if spec.weights == "pretrained":
        model = _pretrained(spec, config, cell)
    else:
        what = f"{spec.config}, of model_type {spec.model_type!r}, as a causal language model"
        gpu = _drawing_gpu(cell)
        with telling(f"{where}: transformers cannot build {what}"), gpu or nullcontext():
            model = _auto().from_config(config, dtype=torch.float32)
        if gpu is not None:
            model.cpu()
    try:
        return model.train(), find_blocks(model)
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).removeprefix('units: ')}") from error


def _drawing_gpu(cell: Cell) -> torch.device | None:
    """The GPU that draws a model's random weights; ``None``: they are made where the caller says.

    A core takes ten seconds for a billion. Models of rented nodes may be larger than their GPUs.
    """
    draws = torch.cuda.is_available() and cell.cluster.can.make_nodes
    return torch.device("cuda") if draws else None


def _own(spec: OwnModel, cell: Cell) -> tuple[nn.Module, Sequence[nn.Module]]:
    """Call the user's function: it makes the model and its blocks.

    Raises ``ValueError`` naming line and key for a function that is not there or returns anything
    else. What it raises itself passes through.
    """
    where = cell.origin.key("model", "function")
    must = f"{spec.function} must return a tuple of the model and its blocks, at least 1"
    try:
        made = find_function(spec.function, where)(cell.sequence_length)
    except SystemExit as error:
        raise ValueError(f"{where}: {must}; it has ended the program") from error
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise ValueError(f"{where}: {must}; it returned a {type(made).__name__}")
    model, blocks = made
    try:
        units = [] if blocks is None else blocks_of(model, blocks)
    except ValueError as error:
        raise ValueError(f"{where}: {must}; {str(error).replace('units', 'blocks')}") from error
    if not units:
        raise ValueError(f"{where}: {must}; it returned none")
    return model, [module for unit in units for module in unit]


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Raise ``ValueError`` about ``what`` for any error of a library: each has its own.

    The error is quoted on one line, and cut short: some list all that there is.
    """
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
        raise ValueError(f"{what}: {text}") from error


def vocabulary(model: Any) -> int | None:
    """Number of tokens that the model has embeddings for; ``None`` where it does not say."""
    try:
        return int(model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):
        return None


def _configuration(spec: ConfiguredModel, where: str) -> Any:
    """The configuration without dropout, as strategies must see the same losses."""
    from transformers import AutoConfig

    fields = {name: value for name, value in spec.configuration.items() if name != "model_type"}
    what = f"{spec.config}, of model_type {spec.model_type!r}"
    with telling(f"{where}: transformers does not know {what}"):
        config = AutoConfig.for_model(spec.model_type, **fields)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for name, value in part.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def _pretrained(spec: ConfiguredModel, config: Any, cell: Cell) -> Any:
    """The model with its weights, from safetensors alone: nothing pickled is opened."""
    where = cell.origin.key("model", "weights")
    source = cell.origin.source(spec.config, where)
    if Path(source).is_file():
        source = str(Path(source).parent)
    with telling(f"{where}: no pretrained weights of {spec.config} on this node"):
        model, loaded = _auto().from_pretrained(
            source,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    lacking = sorted([*loaded["missing_keys"], *map(str, loaded["mismatched_keys"])])
    if lacking:
        raise ValueError(
            f"{where}: {spec.config} has no weights for {len(lacking)} parameters of its "
            f"configuration, such as {lacking[0]}"
        )
    return model


def find_function(name: str, where: str) -> Callable[..., Any]:
    """The function "package.module:function" that the matrix file names at ``where``.

    Raises ``ValueError`` where there is none.
    """
    try:
        function: Any = imported(name)
    except ValueError as error:
        raise ValueError(
            f"{where}: {name} {error}; each node imports it from the folder that ranks start in, "
            "this repository's, or from installed packages"
        ) from error
    if not callable(function):
        raise ValueError(f"{where}: {name} is no function")
    return cast(Callable[..., Any], function)


def _add_adapters(model: Any, blocks: Sequence[nn.Module], cell: Cell) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    spec = cell.model
    assert not isinstance(spec, ImageModel), "the reader refuses other cells"
    family: Any = getattr(spec, "model_type", None) or getattr(spec, "family", None)
    # Attention, or what peft adapts in the family, or all linear layers of the blocks.
    inside = {module for block in blocks for module in block.modules()}
    linear = (
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module in inside
    )
    targets = ATTENTION.get(family) or KNOWN.get(family) or linear
    config = LoraConfig(
        task_type=None if isinstance(spec, OwnModel) else "CAUSAL_LM",
        r=cell.lora_rank,
        lora_alpha=2 * cell.lora_rank,
        target_modules=list(targets),
        fan_in_fan_out=family == "gpt2",  # GPT-2 stores its matrices transposed
    )
    return get_peft_model(model, config)


def check(model: nn.Module, cell: Cell, topology: Topology) -> None:
    """Raise ``ValueError`` on all ranks where pretrained weights or a user's own model differ.

    Each rank shards its own copy: shards of unequal copies would make up another model.
    """
    spec = cell.model
    if isinstance(spec, OwnModel):
        key, what = "function", f"{spec.function} makes"
    elif isinstance(spec, ConfiguredModel) and spec.weights == "pretrained":
        key, what = "weights", f"{spec.config} has"
    else:
        return
    sums = [
        checksum(each) for param in model.parameters() for each in held(param, names_inside(param))
    ]
    mine = checksum(torch.stack(sums)).item()
    checksums: list[int | None] = [None] * topology.world_size
    dist.all_gather_object(checksums, mine)
    others = [rank for rank, theirs in enumerate(checksums) if theirs != checksums[0]]
    if others:
        raise ValueError(
            f"{cell.origin.key('model', key)}: {what} other weights on rank {others[0]} than on "
            "rank 0; give all nodes the same files, and draw random numbers from torch alone, "
            "which is seeded alike on all ranks"
        )
