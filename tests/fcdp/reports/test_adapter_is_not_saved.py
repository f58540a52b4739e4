"""A trained adapter is written whole, whatever peft looks at to write it, and is read again."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from transformers import AutoModelForCausalLM, LlamaConfig

import fcdp
from tests.fcdp.training import take_step, topology_of
from tests.ranks import Pools, on_ranks
from tests.tiers import in_ci

LINEAR = ["q_proj", "v_proj"]
CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}
#: AdaLoRA and VB-LoRA, whose parameters are read outside of the unit that holds them, fail when
#: they are trained already.
METHODS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=LINEAR, **CAUSAL),
    "lora_without_task": lambda: peft.LoraConfig(r=2, target_modules=LINEAR),
    "lora_bias": lambda: peft.LoraConfig(r=2, target_modules=LINEAR, bias="lora_only", **CAUSAL),
    "lora_and_modules": lambda: peft.LoraConfig(
        r=2, target_modules=LINEAR, modules_to_save=["norm"], **CAUSAL
    ),
    "lora_and_tokens": lambda: peft.LoraConfig(
        r=2, target_modules=LINEAR, trainable_token_indices=[1, 3], **CAUSAL
    ),
    "lora_on_embedding": lambda: peft.LoraConfig(r=2, target_modules=["embed_tokens"], **CAUSAL),
    "lora_with_a_frozen_factor": lambda: peft.LoraConfig(r=2, target_modules=LINEAR, **CAUSAL),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=LINEAR, use_dora=True, **CAUSAL),
    "ia3": lambda: peft.IA3Config(
        target_modules=[*LINEAR, "down_proj"], feedforward_modules=["down_proj"], **CAUSAL
    ),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=LINEAR, **CAUSAL),
    "lokr": lambda: peft.LoKrConfig(r=2, target_modules=LINEAR, **CAUSAL),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"], **CAUSAL),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=8, target_modules=LINEAR, **CAUSAL),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, target_modules=LINEAR, **CAUSAL),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=LINEAR, **CAUSAL),
    "randlora": lambda: peft.RandLoraConfig(r=4, target_modules=["q_proj"], **CAUSAL),
    "shira": lambda: peft.ShiraConfig(r=2, target_modules=["q_proj"], **CAUSAL),
    "hra": lambda: peft.HRAConfig(r=2, target_modules=LINEAR, **CAUSAL),
    "layer_norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"], **CAUSAL),
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 3], **CAUSAL),
    "prompt_tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **CAUSAL),
    "prefix_tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **CAUSAL),
    "prefix_projection": lambda: peft.PrefixTuningConfig(
        num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8, **CAUSAL
    ),
    "p_tuning": lambda: peft.PromptEncoderConfig(
        num_virtual_tokens=3, encoder_hidden_size=8, **CAUSAL
    ),
}
#: What a quick run has; the others look like one of these to the writer.
QUICK = ("prompt_tuning", "prefix_tuning", "vera", "lora_and_tokens", "lora_with_a_frozen_factor")
TOKENS = torch.arange(1, 9).view(1, 8)


def base_model() -> Any:
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    return make(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=32,
            tie_word_embeddings=False,
        )
    )


def adapted(method: str) -> Any:
    model = peft.get_peft_model(base_model(), METHODS[method]())
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:  # zeros, as peft begins with, would hide a loss of them
                param.add_(torch.randn_like(param) * 0.1)
    if method == "lora_with_a_frozen_factor":
        for name, param in model.named_parameters():
            param.requires_grad_("lora_B" in name)
    return model


def set_up(method: str, how: str) -> Any:
    model, topology = adapted(method), topology_of(2, 1)
    blocks = list(model.get_base_model().model.layers)
    if how == "shard":
        return fcdp.shard(model, topology, units=blocks)
    for module in [*blocks, model]:
        fully_shard(module, mesh=topology.mesh)
    return fcdp.cache_parameters(model, topology)


def logits_of(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits.clone()
    model.train()
    return logits


def step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    return take_step(loss, optimizer)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)


def is_saved(method: str, how: str, directory: Path) -> None:
    model = set_up(method, how)
    optimizer = optimizer_of(model)
    step(model, optimizer)
    logits = logits_of(model)
    fcdp.save_adapters(model, directory)
    assert torch.equal(logits_of(model), logits), "writing changes nothing"
    step(model, optimizer)
    assert not torch.equal(logits_of(model), logits), "training goes on"
    read = peft.PeftModel.from_pretrained(base_model(), str(directory))
    torch.testing.assert_close(logits_of(read), logits, rtol=1e-4, atol=1e-5)
    if how == "shard":
        fcdp.export(model, directory / "whole")
        whole = AutoModelForCausalLM.from_pretrained(directory / "whole").state_dict()
        base = base_model().state_dict()
        assert whole.keys() == base.keys()
        for name, value in base.items():
            assert torch.equal(whole[name], value) or method in CHANGES_THE_BASE, name


#: Methods that train the base model's own parameters.
CHANGES_THE_BASE = ("lora_bias",)


@pytest.mark.parametrize(
    ("method", "how"),
    [
        (method, how) if how == "shard" and method in QUICK else in_ci(method, how)
        for method in METHODS
        for how in ("shard", "cache_parameters")
    ],
)
def test_an_adapter_is_saved_and_read_again(
    method: str, how: str, ranks: Pools, tmp_path: Path
) -> None:
    ranks.run(2, is_saved, method, how, tmp_path)


def broken(*_: object, **__: object) -> None:
    raise OSError("the disk is full")


@on_ranks(2)
def test_an_error_while_peft_writes_reaches_all_ranks_and_training_goes_on(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    model = set_up("prompt_tuning", "shard")
    optimizer = optimizer_of(model)
    losses = [step(model, optimizer)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.PeftConfig, "save_pretrained", broken)
        with pytest.raises(OSError if rank == 0 else RuntimeError, match="the disk is full"):
            fcdp.save_adapters(model, tmp_path)
    assert not model.peft_config["default"].inference_mode, "peft's own state is as it was"
    losses.append(step(model, optimizer))
    other = set_up("prompt_tuning", "shard")
    optimizer = optimizer_of(other)
    assert losses == [step(other, optimizer) for _ in range(2)]
    fcdp.save_adapters(model, tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()


@on_ranks(2)
def test_too_little_host_memory_on_rank_0_reaches_all_ranks(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    model = set_up("lora", "shard")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(
                torch.Tensor, "cpu", lambda self: (_ for _ in ()).throw(MemoryError("no room"))
            )
        with pytest.raises(MemoryError if rank == 0 else RuntimeError, match="no room"):
            fcdp.save_adapters(model, tmp_path)
    fcdp.save_adapters(model, tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()


class Curious(nn.Module):
    """A model whose own writer reads parameters, calls itself, and changes what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def save_pretrained(self, directory: Path, state_dict: dict[str, torch.Tensor]) -> None:
        assert re.fullmatch("Curious", type(self).__name__)
        for name, value in self.state_dict().items():
            assert type(value) is torch.Tensor
            assert torch.equal(value, state_dict[name])
        out = self(torch.ones(1, 8))
        self.half().requires_grad_(False)
        torch.save(out, Path(directory) / "out.pt")


@on_ranks(2)
def test_a_writer_of_ones_own_may_use_the_model_as_if_it_were_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Curious()
    expected = plain(torch.ones(1, 8)).detach()
    model = fcdp.shard(plain, topology_of(2, 1))
    model(torch.ones(1, 8)).sum().backward()
    fcdp.export(model, tmp_path)
    model(torch.ones(1, 8)).sum().backward()
    assert all(param.requires_grad and param.dtype == torch.float32 for param in model.parameters())
    if torch.distributed.get_rank() == 0:
        torch.testing.assert_close(torch.load(tmp_path / "out.pt"), expected)


class Holding(Curious):
    """A model whose writer calls an attribute."""

    held: Callable[[Any], object]

    def save_pretrained(self, directory: Path, state_dict: dict[str, torch.Tensor]) -> None:
        (Path(directory) / "begun").touch()
        self.held(self)


def by_bound_method(model: Any) -> Callable[[Any], object]:
    forward = model.forward
    return lambda plain: forward(INPUT)


def by_parent(model: Any) -> Callable[[Any], object]:
    vars(model.blocks[0])["parent"] = model
    return lambda plain: plain.blocks[0].parent(INPUT)


def by_list(model: Any) -> Callable[[Any], object]:
    blocks = [*model.blocks]
    return lambda plain: blocks[1](INPUT)


def by_list_of_gathered(model: Any) -> Callable[[Any], object]:
    blocks = [*model.blocks]
    return lambda plain: blocks[1].unshard()


def by_parameters(model: Any) -> Callable[[Any], object]:
    params = [*model.parameters()]
    return lambda plain: [param.full_tensor() for param in params]


def by_registered_method(model: Any) -> Callable[[Any], object]:
    register_fsdp_forward_method(model, "generate")
    return lambda plain: plain.generate(INPUT)


INPUT = torch.ones(1, 8)
#: How a writer reaches the sharded model, as a function of it.
REACHES: dict[str, Callable[[Any], Callable[[Any], object]]] = {
    "bound method": by_bound_method,
    "partial": lambda model: functools.partial(lambda m, plain: m(INPUT), model),
    "list": by_list,
    "list, by hand": by_list_of_gathered,
    "parent": by_parent,
    "registered method": by_registered_method,
    "parameters": by_parameters,
    "a collective of its own": lambda model: lambda plain: torch.distributed.barrier(),
}


def lossy(wrote: bool, reach: str, directory: Path) -> list[float]:
    """Losses of a training in which writers fail."""
    torch.manual_seed(0)
    plain = Holding()
    Holding.generate = Curious.forward  # type: ignore[attr-defined]
    model: Any = fcdp.shard(plain, topology_of(2, 1))
    held = REACHES[reach](model)
    optimizer, losses = optimizer_of(model), []
    for step in range(4):
        if wrote and step in (1, 2):
            model.held = held
            with pytest.raises(RuntimeError, match="runs on rank 0 alone"):
                fcdp.export(model, directory)
            assert not [*directory.iterdir()]
        losses.append(take_step(model(INPUT * step).square().mean(), optimizer))
        with torch.no_grad():
            losses.append(float(model(INPUT).sum()))
    model.held = lambda plain: plain(INPUT)
    fcdp.export(model, directory)
    assert [path.name for path in directory.iterdir()] == ["begun"]
    return losses


@pytest.mark.parametrize("reach", REACHES)
@on_ranks(2)
def test_a_writer_that_reaches_the_sharded_model_is_an_error_on_all_ranks(
    reach: str, tmp_path: Path
) -> None:
    """At once, and training goes on as if nothing had been written."""
    losses = [lossy(wrote, reach, tmp_path / str(wrote)) for wrote in (False, True)]
    assert losses[0] == losses[1]
    assert len({*losses[0]}) == len(losses[0])
