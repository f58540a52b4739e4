"""The shape of any causal language model of ``transformers``, counted from its modules.

The model is built from its configuration on the meta device: no weights, and no code of the
model's repository. Blocks are the modules that repeat; their matrices, experts and vectors are
read from their parameters. Any other parameter is refused by name.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn

from simulation.transformer import Matrix, Transformer

#: Keys of the number of experts, and of those that a token passes.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k")
#: Keys of attention other than scores between queries and keys of all heads.
_NOT_MODELLED = ("kv_lora_rank", "q_lora_rank", "ssm_cfg", "mamba_d_state", "state_size")
_EXPERT = re.compile(r"(.*experts)\.\d+\.(.*)")
_ATTENTION = re.compile(r"att(entio)?n")
#: Models without weights by configuration: a search asks for the same one many times.
_BUILT: dict[str, tuple[Any, Any]] = {}


def count(name: str, config: Mapping[str, Any], sequence_length: int) -> Transformer:
    """The shape of the model that the configuration describes.

    Raises ``ValueError`` for what ``transformers`` cannot build, and for what is not modelled.
    """
    model, made = _built(name, config)
    refused = [key for key in _NOT_MODELLED if getattr(made, key, None)]
    if refused:
        raise ValueError(f"{refused[0]} of {name}: attention of this kind is not modelled")
    prefix, blocks = _blocks(name, model)
    limit = getattr(made, "max_position_embeddings", None) or sequence_length
    if sequence_length > limit:
        raise ValueError(f"sequence_length = {sequence_length}: {name} allows up to {limit}")
    matrices, vectors = _parts(name, blocks[0], made)
    width, heads = _number(name, made, "hidden_size"), _number(name, made, "num_attention_heads")
    outside = [p for path, p in model.named_parameters() if not path.startswith(f"{prefix}.")]
    attention = tuple(m.name for m in matrices if _ATTENTION.search(m.name))
    inside = [matrix for matrix in matrices if matrix.name not in attention]
    most = max((m.experts for m in inside if m.outputs == width), default=None)
    if most is None:
        raise ValueError(f"model = {name!r}: its blocks have no MLP that is known")
    *_, down = (m for m in inside if m.outputs == width and m.experts == most)
    ups = [m for m in inside if m.inputs == width and m.experts == most and m is not down]
    gated = sum(m.outputs for m in ups) > 1.5 * down.inputs
    output = model.get_output_embeddings()
    if output is None:
        raise ValueError(f"model = {name!r}: has no matrix that gives logits; a language model has")
    return Transformer(
        name=name,
        family="llama" if gated else "gpt2",
        layers=len(blocks),
        width=width,
        heads=heads,
        vocabulary=int(output.weight.shape[0]),
        mlp_width=down.inputs,
        key_value_heads=int(getattr(made, "num_key_value_heads", None) or heads),
        tied=output.weight is model.get_input_embeddings().weight,
        head_width=getattr(made, "head_dim", None),
        vectors=tuple(vectors),
        experts=down.experts,
        active_experts=down.active,
        counted_matrices=tuple(matrices),
        counted_attention=attention,
        counted_root=tuple((p.shape[0], p[0].numel()) for p in outside),
    )


def _number(name: str, made: Any, key: str) -> int:
    number = getattr(made, key, None)
    if not isinstance(number, int):
        raise ValueError(f"{key} of {name} = {number!r}: must be a whole number")
    return number


def _built(name: str, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The model without weights, and its whole configuration; built once."""
    key = repr(sorted(config.items()))
    if key in _BUILT:
        return _BUILT[key]
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    fields = dict(config)
    kind: Any = fields.pop("model_type", None)
    try:
        made = AutoConfig.for_model(kind, **fields)
        with torch.device("meta"):
            _BUILT[key] = auto.from_config(made), made
    except Exception as error:  # each family refuses what it cannot build in its own way
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"model_type = {kind!r} of {name}: transformers builds no causal language model of it: "
            f"{first[:200]}"
        ) from error
    return _BUILT[key]


def _blocks(name: str, model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of modules with most parameters, which must be alike, after its path."""
    lists = [
        (sum(parameter.numel() for parameter in module.parameters()), path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    ]
    if not lists:
        raise ValueError(f"model = {name!r}: has no blocks: no list of modules")
    _, path, blocks = max(lists, key=lambda candidate: candidate[0])
    shapes = [{key: value.shape for key, value in block.named_parameters()} for block in blocks]
    unlike = next((index for index, shape in enumerate(shapes) if shape != shapes[0]), None)
    if unlike is not None:
        raise ValueError(
            f"model = {name!r}: blocks 0 and {unlike} of {path} differ; models of equal blocks "
            "are modelled alone"
        )
    return path, blocks


def _parts(name: str, block: nn.Module, config: Any) -> tuple[list[Matrix], list[int]]:
    """The matrices of a block, experts' folded into one each, and sizes of its vectors."""
    experts, active = _first(config, _EXPERTS), _first(config, _ACTIVE)
    alone: dict[str, int] = {}
    matrices: dict[str, Matrix] = {}
    vectors: list[int] = []
    for path, parameter in block.named_parameters():
        owner = block.get_submodule(path.rpartition(".")[0])
        title = path.removesuffix(".weight")
        if parameter.dim() == 1:
            vectors.append(parameter.numel())
        elif parameter.dim() == 3 and experts and parameter.shape[0] == experts:
            _, outputs, inputs = parameter.shape
            matrices[title] = Matrix(title, inputs, outputs, False, experts, active or experts)
        elif parameter.dim() == 2 and not isinstance(owner, nn.Embedding):
            outputs, inputs = parameter.shape
            if type(owner).__name__ == "Conv1D":  # GPT-2's, which has them the other way round
                inputs, outputs = outputs, inputs
            match = _EXPERT.fullmatch(title)
            if match:
                title = f"{match[1]}.{match[2]}"
                alone[title] = alone.get(title, 0) + 1
            matrices[title] = Matrix(title, inputs, outputs)
        else:
            raise ValueError(
                f"model = {name!r}: {path} of {type(owner).__name__} with shape "
                f"{tuple(parameter.shape)} is not modelled"
            )
    for title, copies in alone.items():
        matrices[title] = replace(matrices[title], experts=copies, active=active or copies)
    return list(matrices.values()), vectors


def _first(config: Any, keys: tuple[str, ...]) -> int | None:
    """The first of these keys that the configuration has."""
    return next((int(getattr(config, key)) for key in keys if getattr(config, key, None)), None)
