"""TRL's trainers and the Trainer, with FSDP2 and with FCDP, on the ranks of one process group."""

import contextlib
import functools
import gc
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import fcdp
from fcdp.integrations import hugging_face
from tests.clients import tiny

STEPS = 3
#: Keys of trainers' logs that do not depend on time.
SHOWN = ("loss", "grad_norm", "eval_loss", "rewards/margins", "reward", "kl")


def settings(kind: Any, output: str, **others: Any) -> Any:
    return kind(
        **{
            "output_dir": output,
            "use_cpu": True,
            "bf16": False,
            "fsdp": True,
            "fsdp_config": {
                "version": 2,
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                **others.pop("fsdp_config", {}),
            },
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            **others,
        }
    )


def sft(output: str, adapters: bool, model: Any = None, **others: Any) -> Any:
    return SFTTrainer(
        model or tiny.llama(),
        settings(SFTConfig, output, max_length=16, **others),
        train_dataset=tiny.texts(),
        processing_class=tiny.tokenizer(),
        peft_config=tiny.lora() if adapters else None,
    )


def dpo(output: str, adapters: bool, **others: Any) -> Any:
    return DPOTrainer(
        tiny.llama(),
        ref_model=None if adapters else tiny.llama(),
        args=settings(DPOConfig, output, **others),
        train_dataset=tiny.pairs(),
        processing_class=tiny.tokenizer(),
        peft_config=tiny.lora() if adapters else None,
    )


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def grpo(output: str, adapters: bool, tokens: int = 8, **others: Any) -> Any:
    return GRPOTrainer(
        tiny.saved(output),
        reward_funcs=_reward,
        args=settings(
            GRPOConfig,
            output,
            model_init_kwargs={"dtype": "float32"},
            num_generations=2,
            max_completion_length=tokens,
            beta=0.1,
            **others,
        ),
        train_dataset=tiny.prompts(),
        processing_class=tiny.tokenizer(),
        peft_config=tiny.lora() if adapters else None,
    )


def plain(output: str, adapters: bool, model: Any = None, **others: Any) -> Any:
    rows = [
        {"input_ids": each, "labels": each}
        for each in (torch.arange(1, 17) * (1 + index) % 128 for index in range(64))
    ]
    arguments = settings(TrainingArguments, output, **others)
    return Trainer(model or tiny.llama(), arguments, train_dataset=rows)


@contextlib.contextmanager
def stock() -> Iterator[None]:
    """accelerate's own sharding, on CPUs."""
    init = AcceleratorState.__init__

    def init_here(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if kwargs.get("_from_accelerator"):
            hugging_face.allow_cpus(self, kwargs["fsdp_plugin"])

    AcceleratorState.__init__ = init_here
    try:
        yield
    finally:
        AcceleratorState.__init__ = init


def trained(
    how: Any,
    make: Callable[..., Any],
    look: Callable[[nn.Module, Any], Any],
    after: Callable[[Any, str], Any] | None = None,
    shared: bool = False,
    **options: Any,
) -> Any:
    """Train, and return what ``look`` makes of the trained model and its log.

    ``after`` is called with the trainer and its folder, which ranks may share.
    """
    try:
        with tempfile.TemporaryDirectory() as private, how:
            names = [private]
            dist.broadcast_object_list(names)
            folder = names[0] if shared else private
            torch.manual_seed(1)
            trainer = make(folder, **options)
            trainer.train()
            shown = [
                {key: value for key, value in entry.items() if key in SHOWN}
                for entry in trainer.state.log_history
            ]
            observed = look(trainer.model, shown)
            if after is not None:
                after(trainer, folder)
            dist.barrier()  # before the first rank removes its folder
            return observed
    finally:
        AcceleratorState._reset_state(reset_partial_state=False)
        GradientState._reset_state()
        from accelerate import PartialState

        if dist.is_initialized():
            PartialState._shared_state.clear()
        gc.collect()


def compared(topology: fcdp.Topology, make: Callable[..., Any], **options: Any) -> dict[str, Any]:
    theirs = trained(stock(), make, lambda model, logs: (tiny.parameters(model), logs), **options)
    return trained(
        hugging_face.use(topology), make, functools.partial(tiny.beside, *theirs), **options
    )


def at_load(topology: fcdp.Topology, make: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Compare models that transformers shards as it loads them; FCDP caches what it gathers."""

    def loaded(output: str, cached: bool, **others: Any) -> Any:
        config = DistributedConfig(fsdp_size=topology.world_size)
        model = AutoModelForCausalLM.from_pretrained(
            tiny.saved(output), distributed_config=config, dtype=torch.float32
        )
        if cached:
            mesh = next(model.parameters()).device_mesh
            fcdp.cache_parameters(model, fcdp.Topology.of_mesh(mesh, topology.ranks_per_node))
        return make(output, False, model=model, fsdp=False, **others)

    def look(model: nn.Module, logs: Any) -> Any:
        return tiny.parameters(model), logs

    theirs = trained(contextlib.nullcontext(), loaded, look, cached=False, **options)
    beside = functools.partial(tiny.beside, *theirs)
    return trained(contextlib.nullcontext(), loaded, beside, cached=True, **options)


def resumed(topology: fcdp.Topology) -> dict[str, Any]:
    """Save after two steps, go on from there in a new trainer, and save the model whole."""

    def go_on(trainer: Any, folder: str) -> None:
        trainer.save_model(f"{folder}/whole")
        AcceleratorState._reset_state(reset_partial_state=False)
        again = sft(folder, False, save_strategy="steps", save_steps=2, eval_strategy="no")
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        held = tiny.parameters(again.model)
        for name, each in tiny.parameters(trainer.model).items():
            assert torch.equal(held[name], each), f"{name}: resumed is not what was trained on"

    options = {"adapters": False, "save_strategy": "steps", "save_steps": 2, "after": go_on}
    return compared(topology, sft, shared=True, **options)


def refused(topology: fcdp.Topology) -> dict[str, Any]:
    """The errors for models and settings that cannot be taken over."""
    layers = tiny.llama()
    for layer in layers.get_submodule("model.layers").children():
        fully_shard(layer, mesh=topology.mesh)
    whole = fcdp.shard(tiny.llama(), topology)
    tries: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "no plugin": (tiny.llama(), {"fsdp": False}),
        "DDP": (DistributedDataParallel(tiny.llama()), {}),
        "fully_shard": (layers, {}),
        "fcdp.shard": (whole, {}),
    }
    sentences = {}
    for name, (model, others) in tries.items():
        try:
            trained(
                hugging_face.use(topology),
                plain,
                tiny.beside,
                adapters=False,
                model=model,
                **others,
            )
            sentences[name] = "none"
        except ValueError as error:
            sentences[name] = str(error)
    return sentences


def _case(make: Callable[..., Any], adapters: bool = False, **options: Any) -> Any:
    return lambda topology: compared(topology, make, adapters=adapters, **options)


_SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 1}

CASES: dict[str, Callable[[fcdp.Topology], dict[str, Any]]] = {
    "trainer": _case(plain),
    "sft": _case(sft),
    "sft-lora": _case(sft, True),
    "dpo": _case(dpo),
    "dpo-lora": _case(dpo, True),
    "grpo": _case(grpo),
    "grpo-lora": _case(grpo, True),
    "dpo-sync": _case(dpo, **_SYNC),
    "grpo-sync": _case(grpo, **_SYNC),
    "grpo-short": _case(grpo, tokens=2, **_SYNC),
    "grpo-long": _case(grpo, tokens=24, **_SYNC),
    "sft-bf16": _case(sft, bf16=True, fsdp_config={"activation_checkpointing": True}),
    "sft-ram": _case(sft, True, fsdp_config={"cpu_ram_efficient_loading": True}),
    "sft-offload": _case(sft, fsdp_config={"offload_params": True}),
    "sft-resume": resumed,
    "sft-recomputed": _case(sft, gradient_checkpointing=True),
    "trainer-accumulated": _case(plain, gradient_accumulation_steps=2),
    "sft-lora-accumulated": _case(sft, True, gradient_accumulation_steps=2),
    "dpo-lora-accumulated": _case(dpo, True, gradient_accumulation_steps=2),
    "grpo-lora-accumulated": _case(grpo, True, gradient_accumulation_steps=2),
    "trainer-at-load": lambda topology: at_load(topology, plain),
    "sft-at-load": lambda topology: at_load(topology, sft),
    "sft-accumulated-at-load": lambda topology: at_load(
        topology, sft, gradient_accumulation_steps=2
    ),
    "alone": tiny.alone,
    "refused": refused,
}
