"""The shape of any causal language model of ``transformers``, counted from its modules.

The model is built from its configuration on the meta device: no weights, and no code of the
model's repository. Blocks are the modules that repeat, of one kind or of several; their matrices,
experts and vectors are read from their parameters. A recurrent mixer, known by its ``A_log``, is a
gated MLP of its channels and a scan, of eight operations per element of its state: published code
takes five to eight.
"""

import re
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn

from simulation.transformer import ROUTER, Matrix, Shape, Transformer

#: Keys of the number of experts, and of those that a token passes.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k")
#: Keys of the elements of a channel's state.
_STATE = ("mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim", "linear_head_dim")
#: Keys of the most tokens that one attends to, by the type of a layer. Chunks are taken as windows.
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_EXPERT = re.compile(r"(.*experts)\.\d+\.(.*)")
_ATTENTION = re.compile(r"att(entio)?n")
#: Matrices that read a block's hidden state: a router, and those before an activation function.
_READS = re.compile(r"gate|router|up_proj")
#: Shapes by configuration: a search asks for the same one many times.
_COUNTED: dict[str, Transformer] = {}


def count(name: str, config: Mapping[str, Any], sequence_length: int) -> Transformer:
    """The shape of the model that the configuration describes.

    Raises ``ValueError`` for what ``transformers`` cannot build, and for what is not modelled.
    """
    key = repr(sorted(config.items()))
    if key not in _COUNTED:
        _COUNTED[key] = _shape(name, *_built(name, config))
    longest = _COUNTED[key].longest
    if sequence_length > (longest or sequence_length):
        raise ValueError(f"sequence_length = {sequence_length}: {name} allows up to {longest}")
    return replace(_COUNTED[key], name=name)


def _built(name: str, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The model without weights, and its whole configuration."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    fields = dict(config)
    kind: Any = fields.pop("model_type", None)
    try:
        if kind not in transformers.CONFIG_MAPPING:  # a name of its own for a class that is known
            known = (getattr(transformers, of, None) for of in config.get("architectures") or ())
            kind = next((of.config_class.model_type for of in known if of), kind)
        made = transformers.AutoConfig.for_model(kind, **fields)
        with torch.device("meta"):
            return auto.from_config(made), made
    except Exception as error:  # each family refuses what it cannot build in its own way
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"model_type = {kind!r} of {name}: transformers builds no causal language model of it: "
            f"{first[:200]}"
        ) from error


def _shape(name: str, model: Any, made: Any) -> Transformer:
    """The shape of a model that was built; its blocks are the modules in the largest list."""
    if (chosen := getattr(made, "index_topk", None)) is not None:
        raise ValueError(f"index_topk = {chosen} of {name}: such attention is not modelled")
    output = model.get_output_embeddings()
    if output is None:
        raise ValueError(f"model = {name!r}: has no matrix that gives logits; a language model has")
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"model = {name!r}: has no blocks: no list of modules")
    blocks = max(lists, key=lambda each: sum(of.numel() for of in each.parameters()))
    holders = Counter(id(of) for block in blocks for of in block.parameters())
    own = {of for of, holding in holders.items() if holding == 1}  # the rest are shared by blocks
    outside = [parameter for parameter in model.parameters() if id(parameter) not in own]
    whole: dict[str, Any] = {
        "name": name,
        "longest": getattr(made, "max_position_embeddings", None),
        "vocabulary": int(output.weight.shape[0]),
        "tied": output.weight is model.get_input_embeddings().weight,
        "counted_root": tuple((p.shape[0], p[0].numel()) for p in outside),
    }
    found: dict[Any, list[int]] = {}
    types = getattr(made, "layer_types", None) or [""] * len(blocks)
    for index, (block, of) in enumerate(zip(blocks, types, strict=True)):
        window = getattr(made, _WINDOWS.get(of, ""), None)
        shapes = ((path, parameter.shape) for path, parameter in block.named_parameters())
        found.setdefault((window, *shapes), []).append(index)
    kinds = [
        Transformer(**whole, **_kind(name, blocks[at[0]], made, own), layers=len(at), window=window)
        for (window, *_), at in found.items()
    ]
    if len(kinds) == 1:
        return kinds[0]
    matrices = {matrix.name: matrix for kind in kinds for matrix in kind.counted_matrices}
    attention = dict.fromkeys(each for kind in kinds for each in kind.counted_attention)
    kind_of = {index: kind for kind, at in enumerate(found.values()) for index in at}
    return replace(
        max(kinds, key=lambda kind: kind.block_parameters),
        layers=len(blocks),
        counted_matrices=tuple(matrices.values()),
        counted_attention=tuple(attention),
        kinds=tuple(kinds),
        kind_of=tuple(kind_of[index] for index in range(len(blocks))),
    )


def _kind(name: str, block: nn.Module, made: Any, own: Set[int]) -> dict[str, Any]:
    """Fields of the shape of a model of one such block.

    Heads of latent attention (MLA) have the mean of queries' and values' widths: that many
    operations, and elements of tensors.
    """
    width = _number(name, made, "hidden_size")
    matrices, vectors = _parts(block, made, width, own)
    scans = tuple(f"{path}." for path, each in block.named_modules() if hasattr(each, "A_log"))
    mixing = [matrix for matrix in matrices if matrix.name.startswith(scans)]
    attending = [m for m in matrices if m not in mixing and _ATTENTION.search(m.name)]
    rest = [m for m in matrices if m not in mixing and m not in attending]
    downs = [m for m in rest if m.outputs == width and not _READS.search(m.name)]
    if rest and not downs:
        raise ValueError(f"model = {name!r}: its blocks have no MLP that is known")
    # Experts have the MLP, or else the matrix that most of a token's elements go through.
    most = sorted(downs, key=lambda m: (m.experts > 1, m.active * m.inputs), reverse=True)
    down, *others = most or [Matrix("none", 0, 0)]
    ups = [m for m in rest if m.inputs == width and m.experts == down.experts and m is not down]
    channels = sum(matrix.inputs for matrix in mixing if matrix.outputs == width)
    state = next((key for key in _STATE if hasattr(made, key)), _STATE[0])
    heads = _number(name, made, "num_attention_heads") if attending else 1
    outputs = [matrix.inputs for matrix in attending if matrix.outputs == width]
    head, groups = (outputs or [0])[-1] // heads, getattr(made, "num_key_value_heads", None)
    if attending and getattr(made, "kv_lora_rank", None):
        head, groups = (_number(name, made, "qk_head_dim") + head) // 2, heads
    return {
        "family": "llama" if sum(m.outputs for m in ups) >= 1.5 * down.inputs else "gpt2",
        "width": width,
        "heads": heads,
        "key_value_heads": int(groups or heads) if attending else 1,
        "head_width": head,
        "mlp_width": down.inputs,
        "vectors": tuple(vectors),
        "experts": max(1, down.experts),
        "active_experts": down.active,
        "beside": channels + sum(matrix.active * matrix.inputs for matrix in others),
        "scanned": channels * _number(name, made, state) if channels else 0,
        "counted_matrices": tuple(matrices),
        "counted_attention": tuple(matrix.name for matrix in attending),
    }


def _number(name: str, made: Any, key: str) -> int:
    number = getattr(made, key, None)
    if not isinstance(number, int):
        raise ValueError(f"{key} of {name} = {number!r}: must be a whole number")
    return number


def _parts(
    block: nn.Module, made: Any, width: int, own: Set[int]
) -> tuple[list[Matrix], list[Shape]]:
    """The matrices of a block, experts' folded into one each, and shapes of what else it has."""
    experts, active = _first(made, _EXPERTS), _first(made, _ACTIVE)
    alone: dict[str, int] = {}
    matrices: dict[str, Matrix] = {}
    vectors: list[Shape] = []
    for path, parameter in block.named_parameters():
        owner = block.get_submodule(path.rpartition(".")[0])
        title = path.removesuffix(".weight")
        if parameter.dim() == 3 and experts and parameter.shape[0] == experts:
            _, outputs, inputs = parameter.shape
            down = title.endswith("down_proj")
            if width in (outputs, inputs) and width != (outputs if down else inputs):
                inputs, outputs = outputs, inputs  # some families keep them the other way round
            several = experts, active or experts
            matrices[title] = Matrix(title, inputs, outputs, False, *several, fused=True)
        elif parameter.dim() == 2 and path != title and not isinstance(owner, nn.Embedding):
            outputs, inputs = parameter.shape
            if type(owner).__name__ == "Conv1D":  # GPT-2's, which has them the other way round
                inputs, outputs = outputs, inputs
            match = _EXPERT.fullmatch(title)
            if match:
                title = f"{match[1]}.{match[2]}"
                alone[title] = alone.get(title, 0) + 1
            elif outputs == experts and _READS.search(title):
                title = ROUTER
            matrices[title] = Matrix(title, inputs, outputs, False, int(id(parameter) in own))
        elif id(parameter) in own:
            vectors.append((*parameter.shape, 1))
    for title, copies in alone.items():
        matrices[title] = replace(matrices[title], experts=copies, active=active or copies)
    return list(matrices.values()), vectors


def _first(config: Any, keys: tuple[str, ...]) -> int | None:
    """The first of these keys that the configuration has."""
    return next((int(getattr(config, key)) for key in keys if getattr(config, key, None)), None)
