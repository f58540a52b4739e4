"""Stages as the executor cuts real models; a rank's memory of them, and its bytes per slot."""

from itertools import product
from typing import Literal

import pytest

from baselines.cyclic.stages import chosen_runs, parameters
from baselines.part import split
from baselines.strategy import numel
from experiments.clusters.simulated import measured
from experiments.records.modelled import cluster_of, workload_of
from experiments.records.record import Record
from experiments.worker import models
from simulation.cycle import held, stages_of
from simulation.models import from_config
from simulation.prediction import needed, predict
from tests.experiments.cells import cell, model_spec
from tests.experiments.families import configuration
from tests.simulation import committed
from tests.simulation.workloads import hardware, paper_cluster, workload

RANKS = 4
WORLD = 16
FORMS = ("cyclic-ring", "cyclic-zero")


@pytest.mark.parametrize("stages", [None, 1, 3])
@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_messages_have_the_parameters_of_real_stages(
    family: Literal["gpt2", "llama"], tuning: str, stages: int | None
) -> None:
    of = cell(
        "cyclic-zero", model=model_spec(family, layers=5, width=64), tuning=tuning, stages=stages
    )
    model, blocks = models.build(of)
    runs = chosen_runs(stages, blocks, RANKS, "ranks")
    whole = parameters(model, blocks, runs, frozen=True)
    trained = [numel(params) for params in parameters(model, blocks, runs)]
    passed = [numel(split(params, blocks)[1]) for params in whole]
    cut = stages_of(workload_of(of), RANKS)
    assert cut.blocks == tuple(map(len, runs))
    assert cut.sizes(twice=True) == {
        "forward": tuple(map(numel, whole)),
        "backward": passed,
        "gradient": tuple(trained),
        "sum": tuple(trained),
    }
    assert cut.sizes(twice=False)["forward"] == tuple(trained)


def test_embeddings_of_a_counted_model_come_before_its_blocks() -> None:
    counted = from_config({**configuration("qwen2"), "tie_word_embeddings": False}, 64)
    assert counted.embedded_parameters == 256 * 32
    assert counted.root_parameters == 2 * 256 * 32 + 32


def test_a_ring_keeps_the_optimizer_of_one_stage() -> None:
    of = workload("cyclic-ring", stages=6)
    memory, ddp = held(of, WORLD), workload("ddp")
    assert memory.parameters == 4 * ddp.parameters
    largest = ddp.parameters - 5 * ddp.model.block_parameters - ddp.model.width * 2
    assert memory.states == 8 * largest
    assert needed(of, hardware()).device_bytes < needed(ddp, hardware()).device_bytes


def test_zero_keeps_its_own_stage_and_what_is_outside_of_the_blocks() -> None:
    """It keeps the stage in use too; of many equal stages that is little of the model."""
    whole, part = (held(workload(f"cyclic-{form}", stages=6), WORLD) for form in ("ring", "zero"))
    model = workload("ddp").model
    own_stage = model.block_parameters + model.embedded_parameters
    assert part.parameters == pytest.approx(4 * (own_stage + model.root_parameters))
    assert part.versions == pytest.approx(8 * own_stage)
    assert part.parameters < 0.5 * whole.parameters
    of_large = (needed(workload(name, large=True, stages=32), paper_cluster()) for name in FORMS)
    ring, zero = (footprint.device["parameters"] for footprint in of_large)
    assert zero < ring / 10


def test_the_update_rules_alone_keep_gradients_that_wait_a_step() -> None:
    """Those are all but the last stage's on the first rank by v2, and all by v1."""
    for rule, stages in product(("v1", "v2"), (1, 2, 6)):
        of = workload("cyclic", rule=rule, stages=stages)
        *_, last = stages_of(of, WORLD).trained
        late = held(of, WORLD).versions
        assert late == 4 * (of.trained - (last if rule == "v2" else 0))
        assert needed(of, hardware()).device.get("versions", 0) == late


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_micro_batches_that_take_turns_keep_half_of_what_all_at_once_do(count: int) -> None:
    """The paper's share is (N + 1) / 2N of N micro-batches, whose stages are equal."""
    of_one = needed(workload("ddp", accumulation=2), hardware()).forward["activations"]
    turns = workload("cyclic-interleaved", accumulation=count, stages=count)
    activations = needed(turns, hardware()).forward["activations"]
    assert activations / (count * of_one) == pytest.approx((count + 1) / (2 * count))


def counted() -> list[Record]:
    return [
        record
        for record in committed.records("cyclic-slots")
        if record.measurement
        and (record.measurement.bytes_by_slot or record.measurement.activation_bytes_by_slot)
    ]


@pytest.mark.parametrize("record", counted(), ids=lambda record: record.cell_id)
def test_slots_are_those_of_the_records(record: Record) -> None:
    """Bytes exactly; activations, which are counted by hand, within 4 %."""
    workload, hardware = workload_of(record.cell), cluster_of(record.cell)
    measurement = measured(workload, hardware, predict(workload, hardware))
    assert measurement.bytes_by_slot == record.measurement.bytes_by_slot
    if record.measurement.activation_bytes_by_slot is None:
        assert measurement.activation_bytes_by_slot is None
        return
    assert measurement.activation_bytes_by_slot == pytest.approx(
        record.measurement.activation_bytes_by_slot, rel=0.04
    )
    assert measurement.activation_bytes_together == pytest.approx(
        record.measurement.activation_bytes_together, rel=0.04
    )
