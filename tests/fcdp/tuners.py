"""Every method of PEFT's on a small Llama: its configuration, and how FSDP2 can train it."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn as nn
from transformers import LlamaConfig, LlamaForCausalLM

LINEAR = ["q_proj", "v_proj"]


def small_llama(**options: Any) -> Any:
    """A Llama of two blocks, alike on all ranks; ``options`` are its configuration's."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            **options,
        )
    )


@dataclass(frozen=True)
class Tuner:
    """A method, and what it asks of a model, of a batch and of FSDP2."""

    config: Callable[[], Any]
    #: Options of the model's configuration.
    base: Mapping[str, Any] = field(default_factory=dict)
    #: Inputs of a batch beside tokens.
    inputs: Mapping[str, Any] = field(default_factory=dict)
    #: Part of the names of parameters that are trained; none: those that PEFT trains.
    only: str = ""
    #: Why FSDP2 trains it with the whole model in one unit alone; none: with a unit per block.
    whole: str = ""
    #: Parameters of the base model itself that it trains, by the ends of their names.
    of_base: str = ""
    #: Why FSDP2 computes with other values than its shards have, which are those that are written.
    unseen: str = ""
    #: A package that it imports.
    needs: str = "peft"


def _tuner(kind: Any, /, **config: Any) -> Tuner:
    own = {each.name: config.pop(each.name) for each in fields(Tuner) if each.name in config}
    return Tuner(lambda: kind(task_type="CAUSAL_LM", **config), **own)


def _linear(kind: Any, /, **config: Any) -> Tuner:
    return _tuner(kind, target_modules=LINEAR, **config)


#: Why FSDP2 does not take a unit per block.
SHARED = "blocks share parameters"
AFTERWARDS = "the loss reads parameters of blocks after they have run"
ELSEWHERE = "a block reads parameters of others"
BIAS: Mapping[str, Any] = {"base": {"attention_bias": True}, "of_base": ".bias"}


def _experts() -> Any:
    """X-LoRA's configuration of two adapters, which it reads from folders."""
    folder = Path(tempfile.mkdtemp())
    for name in ("0", "1"):
        torch.manual_seed(int(name))
        lora = peft.LoraConfig(
            r=2, target_modules=LINEAR, init_lora_weights=False, task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(small_llama(), lora)
        for param in model.parameters():
            nn.init.normal_(param, std=0.1 + int(name)) if param.requires_grad else None
        model.save_pretrained(folder / name)
    return peft.XLoraConfig(
        task_type="CAUSAL_LM",
        hidden_size=32,
        xlora_size=8,
        adapters={name: str(folder / name) for name in ("0", "1")},
    )


TASKS = {"task_ids": torch.tensor([0])}
TUNERS: dict[str, Tuner] = {
    "lora": _linear(peft.LoraConfig, r=2),
    "lora_without_task": Tuner(lambda: peft.LoraConfig(r=2, target_modules=LINEAR)),
    "lora_bias": _linear(peft.LoraConfig, r=2, bias="lora_only", **BIAS),
    "biases": _linear(peft.LoraConfig, r=2, bias="all", **BIAS),
    "lora_and_norms": _linear(peft.LoraConfig, r=2, modules_to_save=["norm"]),
    "lora_and_head": _linear(peft.LoraConfig, r=2, modules_to_save=["lm_head"]),
    "lora_and_tokens": _linear(peft.LoraConfig, r=2, trainable_token_indices=[1, 3]),
    "lora_on_embedding": _tuner(peft.LoraConfig, r=2, target_modules=["embed_tokens"]),
    "lora_on_parameters": _tuner(
        peft.LoraConfig, r=2, target_modules=[], target_parameters=["q_proj.weight"]
    ),
    "dora": _linear(peft.LoraConfig, r=2, use_dora=True),
    "adalora": _linear(peft.AdaLoraConfig, init_r=3, target_r=2, total_step=9, whole=AFTERWARDS),
    "adamss": _linear(peft.AdamssConfig, r=4, num_subspaces=2, needs="sklearn"),
    "adaption_prompt": _tuner(peft.AdaptionPromptConfig, adapter_len=4, adapter_layers=2),
    "beft": _tuner(peft.BeftConfig, target_modules=["v_proj"]),
    "boft": _linear(peft.BOFTConfig, boft_block_size=4),
    "c3a": _linear(peft.C3AConfig, block_size=8),
    "cartridge": _tuner(peft.CartridgeConfig, num_virtual_tokens=4, num_frozen_tokens=1),
    "cpt": _tuner(
        peft.CPTConfig,
        cpt_token_ids=[1, 2, 3, 4],
        cpt_tokens_type_mask=[1, 2, 3, 4],
        unseen="its forward gives the gathered parameter other memory, where no gather writes",
    ),
    "deft": _linear(peft.DeftConfig, r=2),
    "delora": _linear(peft.DeloraConfig, r=2),
    "fourierft": _linear(peft.FourierFTConfig, n_frequency=8),
    "frod": _linear(peft.FrodConfig, progressbar=False),
    "glora": _linear(peft.GloraConfig, r=2),
    "gralora": _linear(peft.GraloraConfig, r=4),
    "hira": _linear(peft.HiraConfig, r=2),
    "hra": _linear(peft.HRAConfig, r=2),
    "ia3": _tuner(
        peft.IA3Config, target_modules=[*LINEAR, "down_proj"], feedforward_modules=["down_proj"]
    ),
    "lily": _linear(peft.LilyConfig, r=2, stride_A=1, num_B=2, whole=SHARED),
    "loha": _linear(peft.LoHaConfig, r=2),
    "lokr": _linear(peft.LoKrConfig, r=2),
    "miss": _linear(peft.MissConfig, r=4),
    "multitask_prompt_tuning": _tuner(
        peft.MultitaskPromptTuningConfig, num_virtual_tokens=4, num_tasks=2, inputs=TASKS
    ),
    "ln_tuning": _tuner(peft.LNTuningConfig, target_modules=["input_layernorm"]),
    "oft": _linear(peft.OFTConfig, oft_block_size=4),
    "osf": _linear(peft.OSFConfig, effective_rank=28),
    "p_tuning": _tuner(peft.PromptEncoderConfig, num_virtual_tokens=3, encoder_hidden_size=8),
    "peanut": _linear(peft.PeanutConfig, r=2, depth=1),
    "poly": _linear(peft.PolyConfig, r=2, n_tasks=2, n_skills=2, inputs=TASKS),
    "prefix_projection": _tuner(
        peft.PrefixTuningConfig,
        num_virtual_tokens=3,
        prefix_projection=True,
        encoder_hidden_size=8,
    ),
    "prefix_tuning": _tuner(peft.PrefixTuningConfig, num_virtual_tokens=3),
    "prompt_tuning": _tuner(peft.PromptTuningConfig, num_virtual_tokens=3),
    "psoft": _linear(peft.PsoftConfig, r=4),
    "pvera": _linear(peft.PveraConfig, r=4),
    "randlora": _tuner(peft.RandLoraConfig, r=4, target_modules=["q_proj"]),
    "road": _linear(peft.RoadConfig, group_size=8),
    "shadow": _tuner(peft.ShadowConfig, r=2, whole=ELSEWHERE),
    "shira": _linear(peft.ShiraConfig, r=2),
    "supertuning": _linear(peft.SupertuningConfig),
    "tinylora": _linear(peft.TinyLoraConfig, r=2, u=8, whole=SHARED),
    "trainable_tokens": _tuner(peft.TrainableTokensConfig, token_indices=[1, 3]),
    "unilora": _linear(peft.UniLoraConfig, r=2, theta_d_length=16, whole=SHARED),
    "vblora": _linear(peft.VBLoRAConfig, r=2, num_vectors=4, vector_length=8, topk=2, whole=SHARED),
    "vera": _tuner(peft.VeraConfig, r=4, target_modules=["q_proj"]),
    "waveft": _linear(peft.WaveFTConfig, n_frequency=8),
    "xlora": Tuner(_experts, base={"use_cache": False}),
    "lora_with_a_frozen_factor": Tuner(
        lambda: peft.LoraConfig(r=2, target_modules=LINEAR, task_type="CAUSAL_LM"), only="lora_B"
    ),
}


def adapted(name: str) -> Any:
    """The model with the method's adapter, in which nothing that is trained is zero."""
    tuner = TUNERS[name]
    model = peft.get_peft_model(small_llama(**tuner.base), tuner.config())
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:  # zeros, as PEFT begins with, would hide a loss of them
                param.add_(torch.randn_like(param) * 0.1)
    if tuner.only:
        for of, param in model.named_parameters():
            param.requires_grad_(tuner.only in of)
    return model
