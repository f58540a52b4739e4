"""Models by name, path and cache; what a request asks for; ``test_refusals`` has what cannot be."""

from pathlib import Path

import pytest

from baselines.registry import simulated
from simulation.models import PAPER_MODELS, shape, usual_length
from simulation.planner.request import Request, planned
from tests.experiments.golden import tables
from tests.simulation.planner.made_up import config_file, request
from tests.simulation.workloads import paper_cluster


def test_a_model_is_a_name_a_file_or_its_folder(tmp_path: Path) -> None:
    assert shape("gpt-30b", 512).width == PAPER_MODELS["gpt-30b"].width
    with pytest.raises(ValueError, match=r"model = .*: the folder has no config.json"):
        shape(str(tmp_path), 512)
    file = config_file(tmp_path)
    assert shape(str(file), 512).layers == shape(str(file.parent), 512).layers == 4
    with pytest.raises(ValueError, match="sequence_length = 8192"):
        request(str(file), sequence_lengths=(512, 8192))


@pytest.mark.parametrize(("typed", "name"), tables(__file__).items())
def test_models_by_the_names_that_people_type(
    typed: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shape(typed, 512) == shape(name, 512)
    assert usual_length(typed) == usual_length(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / typed).mkdir(parents=True)
    config_file(tmp_path / typed)
    assert shape(typed, 512).layers == 4, "a folder of that name goes first"


def test_a_name_on_the_hub_is_taken_from_the_cache_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    known = {"made/up": str(config_file(tmp_path))}
    look = "try_to_load_from_cache"
    monkeypatch.setattr(huggingface_hub, look, lambda name, file: known.get(name))
    assert shape("made/up", 512).layers == 4
    with pytest.raises(ValueError, match="model = 'made/down': allowed are gpt-10b, .*local cache"):
        shape("made/down", 512)


def test_cycles_the_papers_own_and_what_is_for_cpus_are_simulated_and_not_planned() -> None:
    assert set(simulated()) - set(planned()) == {
        name
        for name in simulated()
        if name.startswith(("cyclic", "fcdp-paper", "fcdp-sched", "fsdp2-hierarchical"))
    }
    assert request(strategies=("fcdp-paper",)).strategies == ("fcdp-paper",)  # asked for
    assert Request(model="gpt-30b", hardware=paper_cluster()).strategies == planned()


def test_the_grid_is_the_product_with_choices_for_fcdp_only() -> None:
    axes = {"strategies": ("fsdp2", "fcdp"), "sequence_lengths": (256, 512)}
    points = request(**axes, policies=("host", "auto")).workloads()
    assert len(points) == 2 * 2 * (1 + 2)
    assert {p.policy for p in points if p.strategy == "fsdp2"} == {"host"}
    assert {p.policy for p in points if p.strategy == "fcdp"} == {"host", "auto"}


def test_a_pipeline_has_sums_of_one_micro_batch_of_each_group_too() -> None:
    """The others have no sums where a rank has one micro-batch."""
    points = request(strategies=("fcdp", "pipeline"), global_batch=32).workloads()
    kinds = {(point.strategy, point.nodes_per_stage, point.partial_gradients) for point in points}
    of_pipelines = {("pipeline", 1, "device"), ("pipeline", 2, "device"), ("pipeline", 2, "host")}
    assert kinds == {("fcdp", 1, "device"), *of_pipelines}


def test_what_is_usual_is_half_a_million_tokens_or_128_sequences_of_all_ranks() -> None:
    for more, length, sequences in (
        ({}, 2048, 2**19 // 2048),
        ({}, 2000, 288),  # 263, in whole sequences of 32 ranks
        ({"lora_rank": 8}, 2048, 128),
        ({"micro_batches": (3,)}, 2048, 288),  # 8 of a rank are no whole micro-batches
        ({"nodes": 64}, 8192, 512),  # one for each rank
    ):
        asked = request(global_batch="usual", sequence_lengths=(length,), **more)
        whole = asked.sequences_per_rank(length)
        assert whole * asked.hardware.world_size == sequences
    assert request(lora_rank=8).sequences_per_rank(512) is None


def test_pipelines_are_of_fsdp2_on_nodes_and_of_fcdp_on_groups_of_them() -> None:
    points = request(strategies=("pipeline",), recomputed=(0.0, "selective", 1.0)).workloads()
    shards = {("sharded", 1), ("fcdp", 1), ("fcdp", 2)}
    assert {(point.within_stage, point.nodes_per_stage) for point in points} == shards
    zero = [point for point in points if point.pipeline_schedule == "zb"]
    assert {(point.within_stage, point.nodes_per_stage) for point in zero} == shards
    assert {point.recomputed for point in zero} == {0.0}
    assert "pipeline" not in request(strategies=("pipeline", "ddp"), nodes=1).answered
