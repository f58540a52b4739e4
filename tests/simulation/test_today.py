"""Configurations of today: what is counted of them, and plans for them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import transformers
import yaml

from simulation.compute import with_rates
from simulation.cycle import stages_of
from simulation.hardware import Hardware, cluster, reported
from simulation.memory import activations
from simulation.models import from_config, language, usual_length
from simulation.planner import report
from simulation.planner.plan import plan, refusal
from simulation.planner.request import Request
from simulation.prediction import needed, predict
from simulation.transformer import Transformer
from simulation.units import layout
from simulation.workload import Workload, block_work, token_work

#: Published configurations by name, with billions of parameters.
MODELS = yaml.safe_load(Path(__file__).with_name("today.yaml").read_text("utf-8"))
LENGTH = 2048
#: Sixteen nodes of eight, as in the reports.
NODES = {"nodes": 16, "inter_bits_per_s": 400e9, "ranks_per_node": 8, "host_memory_bytes": 2e12}


def built(config: Mapping[str, Any]) -> nn.Module:
    """The real modules of a configuration's language model, without weights."""
    fields = dict(language(config))
    kind = fields.pop("model_type").replace("kimi_k2", "deepseek_v3")
    for key in ("quantization_config", "auto_map"):
        fields.pop(key, None)
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        real: nn.Module = auto.from_config(transformers.AutoConfig.for_model(kind, **fields))
    return real


def workload(model: Transformer, strategy: str = "fsdp2", **more: Any) -> Workload:
    return Workload(strategy=strategy, model=model, sequence_length=LENGTH, micro_batch=1, **more)


def hopper(**more: Any) -> Hardware:
    return with_rates(reported(cluster("h100-sxm", **(NODES | more))))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_as_published_and_as_built(name: str) -> None:
    config, published = MODELS[name]["config"], MODELS[name]["billions"]
    counted = from_config(config, LENGTH)
    assert counted.parameters / 1e9 == pytest.approx(published, rel=0.002)
    assert counted.parameters == sum(p.numel() for p in built(config).parameters())


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-235b-a22b", 22.0), ("gpt-oss-120b", 5.1), ("deepseek-v3", 37.0), ("kimi-k2", 32.0)],
)
def test_active_parameters_are_as_published(name: str, billions: float) -> None:
    model = from_config(MODELS[name]["config"], LENGTH)
    active = workload(model).total(lambda each: sum(m.active_weights for m in each.model.matrices))
    head = model.vocabulary * model.width
    assert (active + head) / 1e9 == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize(("name", "lora_rank"), [("deepseek-v3", None), ("jamba-v0.1", 16)])
def test_what_has_blocks_of_several_kinds_is_planned_for(
    name: str, lora_rank: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]["config"]), encoding="utf-8")
    request = Request(model=str(tmp_path), hardware=hopper(), lora_rank=lora_rank)
    made = plan(request)
    answer = refusal(request) if made is None else made.reason
    assert answer.startswith("nothing fits") == (made is None)
    if made is not None:
        report.table(made)


def test_what_a_part_leaves_out_is_as_its_class_has_it(tmp_path: Path) -> None:
    """Published parts list what differs from the class's defaults; a tie is said outside."""
    config = {"model_type": "mistral3", "text_config": {"model_type": "mistral"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert usual_length(str(tmp_path)) == 8192
    apart = from_config(config, LENGTH)
    assert apart.parameters == sum(p.numel() for p in built(config).parameters())
    tied = from_config(config | {"tie_word_embeddings": True}, LENGTH)
    assert apart.parameters - tied.parameters == apart.vocabulary * apart.width


def test_latent_attention_takes_its_own_operations() -> None:
    """Scores over 192 elements of a head, values of 128, as DeepSeek-V3's own heads are."""
    model = from_config(MODELS["deepseek-v3"]["config"], LENGTH)
    dense, _ = workload(model).parts
    products = 2 * sum(matrix.active_weights for matrix in dense.model.matrices)
    scores = block_work(dense)[0].flops - products
    assert scores == 2 * LENGTH * 128 * (192 + 128)
    assert dense.model.narrow == dense.model.attention_width


def test_mixers_without_attention_do_not_grow_with_the_sequence() -> None:
    model = from_config(MODELS["jamba-v0.1"]["config"], LENGTH)
    for part in workload(model).parts:
        short, long = (block_work(replace(part, sequence_length=n))[0].flops for n in (512, 4096))
        attends = any("self_attn" in matrix.name for matrix in part.model.matrices)
        assert (long > short) == attends
        assert (part.model.scanned == 8192 * 16) != attends
    assert [kind.layers for kind in model.kinds] == [12, 16, 4]
    assert [at for at, kind in enumerate(model.order) if kind == 2] == [4, 12, 20, 28]


def test_local_layers_attend_to_their_window() -> None:
    kinds = {k.window: k.layers for k in from_config(MODELS["gemma-3-27b"]["config"], LENGTH).kinds}
    assert kinds == {1024: 52, None: 10}


def test_blocks_that_share_a_transformer_compute_it_and_do_not_store_it() -> None:
    model = from_config(MODELS["zamba2-7b"]["config"], LENGTH)
    shared = [m for kind in model.kinds for m in kind.counted_matrices if m.experts == 0]
    assert shared
    assert all(matrix.weights == 0 < matrix.active_weights for matrix in shared)
    units = layout(workload(model, "deepspeed-zero3"), 2, 8)
    alone = [segment for segment in units.segments if not segment.units]
    assert len(alone) == sum(
        kind.layers * sum(m.experts == 0 for m in kind.counted_matrices) for kind in model.kinds
    )
    assert sum(unit.parameters for unit in units.units) + units.replicated == model.parameters


@pytest.mark.parametrize(
    ("strategy", "rank"), [("fsdp2", None), ("deepspeed-zero3", 8), ("fcdp", 8), ("luwu", None)]
)
def test_a_model_of_two_kinds_lies_between_models_of_one(strategy: str, rank: int | None) -> None:
    model = from_config(MODELS["deepseek-v3"]["config"], LENGTH)
    seconds, memory = [], []
    for shape in (
        replace(model.kinds[0], layers=model.layers),
        model,
        replace(model.kinds[1], layers=model.layers),
    ):
        of = workload(shape, strategy, lora=None if rank is None else model.lora(rank).on(shape))
        seconds.append(predict(of, hopper()).step_seconds)
        memory.append(needed(of, hopper()).device_bytes)
        assert activations(of)[1] > 0
        assert token_work(of).flops > 0
    assert seconds == sorted(seconds)
    assert memory[0] < memory[2]
    assert memory[1] == pytest.approx(memory[2], rel=0.06)


def test_kinds_that_are_equal_are_as_one() -> None:
    """Predictions do not depend on the division into kinds where the kinds are the same."""
    model = replace(from_config(MODELS["qwen3-235b-a22b"]["config"], LENGTH), layers=4)
    halves = replace(
        model, kinds=(replace(model, layers=1), replace(model, layers=3)), kind_of=(1, 0, 1, 1)
    )
    for strategy in ("fsdp2", "fcdp", "deepspeed-zero3", "luwu"):
        for lora in (None, model.lora(8)):
            one, two = (
                predict(workload(each, strategy, lora=lora), hopper()) for each in (model, halves)
            )
            assert two.step_seconds == pytest.approx(one.step_seconds)
            assert two.footprint.device_bytes == pytest.approx(one.footprint.device_bytes)
            assert two.moved_bytes == one.moved_bytes


def test_fused_experts_are_one_unit_of_a_vendor_that_gathers_matrices() -> None:
    model = from_config(MODELS["gpt-oss-120b"]["config"], LENGTH)
    units = layout(workload(model, "deepspeed-zero3"), 16, 8)
    assert len(units.segments) == model.layers * len(model.counted_matrices)
    apart = replace(
        model.kinds[0],
        layers=1,
        counted_matrices=tuple(replace(matrix, fused=False) for matrix in model.counted_matrices),
    )
    alone = layout(workload(apart, "deepspeed-zero3"), 16, 8)
    assert len(alone.segments) == 4 + 1 + 2 * 128


def test_cycles_are_of_equal_blocks() -> None:
    model = from_config(MODELS["deepseek-v3"]["config"], LENGTH)
    with pytest.raises(ValueError, match="its blocks differ; cycles are of equal blocks"):
        stages_of(workload(model, "cyclic"), 8)
