"""Small models, the topologies that shard them, and what of them is trained.

Each is there twice: as the simulator's workload, and as the real modules.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from experiments.worker import frozen
from fcdp.blocks import find_blocks
from simulation.models import PUBLIC_MODELS, from_config
from simulation.transformer import Targets
from simulation.workload import FrozenDtype, Workload
from tests.experiments.families import configuration

LENGTH = 64
_JAMBA = {"num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 2}
_EXPERTS = {"num_experts": 8, "moe_intermediate_size": 48}
#: Small models. Of Jamba's blocks one in four has attention, and so adapters.
CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    **{name: configuration(name) for name in ("gpt2", "llama")},
    "mixtral": configuration("mixtral") | {"num_experts_per_tok": 2},
    "qwen3_moe": configuration("qwen2") | {"model_type": "qwen3_moe"} | _EXPERTS,
    "jamba": configuration("qwen2") | {"model_type": "jamba", "num_experts": 4} | _JAMBA,
}


@dataclass(frozen=True)
class Case:
    """A model, what of it is trained, and the nodes and ranks per node that shard it."""

    model: str
    rank: int | None = None
    targets: Targets = "attention"
    frozen: FrozenDtype = "fp32"
    shape: tuple[int, int] = (2, 2)

    def __str__(self) -> str:
        tuning = "full" if self.rank is None else f"r{self.rank}-{self.targets}-{self.frozen}"
        return "{}-{}-{}x{}".format(self.model, tuning, *self.shape)

    @property
    def config(self) -> Mapping[str, Any]:
        if (public := PUBLIC_MODELS.get(self.model)) is not None:
            return public.config
        return CONFIGURATIONS[self.model]

    @property
    def workload(self) -> Workload:
        model = from_config(self.config, LENGTH)
        return Workload(
            strategy="fcdp",
            model=model,
            lora=None if self.rank is None else model.lora(self.rank, self.targets),
            sequence_length=LENGTH,
            micro_batch=1,
            frozen_dtype=self.frozen,
        )


def built(case: Case) -> tuple[nn.Module, list[nn.Module]]:
    """The real modules and their blocks, on the default device."""
    import peft
    import transformers

    fields, lora = dict(case.config), case.workload.lora
    kind = fields.pop("model_type")
    auto: Any = transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.for_model(kind, **fields)
    # By plain operations, which run on devices of tests too.
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model: Any = auto.from_config(config, dtype=torch.float32, **plain)
    blocks = find_blocks(model)
    if lora is not None:
        adapters = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.rank,
            target_modules=[*lora.targets],
            fan_in_fan_out=kind == "gpt2",
        )
        model = peft.get_peft_model(model, adapters)
        if case.frozen == "bf16":
            frozen.cast(model, torch.bfloat16)
    return model, blocks
