"""Out of core is bit for bit AdamW in memory, within its budgets, whatever the form."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from baselines.fuyou.optimizer import BUFFERS
from baselines.fuyou.train import Fuyou, build
from baselines.generations import STATE
from baselines.ssd import open_alone
from baselines.strategy import load
from tests.baselines.fuyou.training import in_memory, made, same, settings, state, steps
from tests.baselines.training import batches_of
from tests.ranks import on_ranks

STEPS = 4
#: Settings and model of each case; several things differ between cases.
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"update": "after", "swap": "none"}, {}),
    ({"update": "overlapped", "swap": "all"}, {"dtype": torch.bfloat16, "k": 2}),
    ({"update": "delayed", "swap": "auto", "blocks_on_device": 2}, {"family": "llama"}),
    ({"update": "delayed", "swap": "100 kB"}, {"family": "llama", "tuning": "lora"}),
    ({"update": "after", "swap": "all"}, {"dtype": torch.bfloat16, "k": 3, "layers": 1}),
    # Host memory has room for little else than what passes: activations go to SSD, and no state is
    # read ahead.
    ({"update": "overlapped", "swap": "all", "dram_budget": "600 kB"}, {"layers": 6}),
]


@pytest.mark.parametrize(("chosen", "model"), CASES)
@on_ranks(1)
def test_it_is_adam_in_memory_bit_for_bit(
    tmp_path: Path, chosen: dict[str, Any], model: dict[str, Any]
) -> None:
    expected_losses, expected = in_memory(STEPS, **model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Fuyou(*made(settings(**chosen), **model), tmp_path)
        losses = steps(trainer, STEPS, batches_of())
    assert losses == expected_losses
    same(state(trainer), expected)
    metrics: dict[str, Any] = trainer.take_metrics()
    trainer.close()
    if chosen["swap"] in ("all", "100 kB"):
        assert metrics["chosen_bytes"] > 0
    texts = [str(w.message) for w in caught if "buffers of optimizer state" in str(w.message)]
    if "dram_budget" in chosen:
        assert "has room for 1 of 2 buffers" in texts[0]
        assert metrics["state_buffers"] == 1
        assert metrics["kept_on_ssd_bytes"] > 0
    else:
        assert not texts
        assert metrics["state_buffers"] == BUFFERS[chosen["update"]]


@on_ranks(1)
def test_folders_of_runs_that_were_killed_go_with_the_next_run(tmp_path: Path) -> None:
    names = ("fuyou-run-killed", "fuyou-run-going-on", "my-own")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / STATE).touch()
    going_on = open_alone(tmp_path / "fuyou-run-going-on" / STATE, "ssd")
    trainer = build(*made(settings(ssd=str(tmp_path))))
    there = {folder.name for folder in tmp_path.iterdir()}
    assert not (tmp_path / "fuyou-run-killed").exists()
    assert {*names[1:]} < there
    trainer.close()
    del going_on


LARGE_DRAM, LARGE_DEVICE = 3_000_000, 45_000_000


@on_ranks(1)
def test_a_model_four_times_its_host_memory_trains_within_its_budgets(tmp_path: Path) -> None:
    chosen = settings(
        dram_budget=f"{LARGE_DRAM}B", device_budget=f"{LARGE_DEVICE}B", update="overlapped"
    )
    model, job = made(chosen, layers=64, width=64)
    assert sum(param.nbytes for param in model.parameters()) > 4 * LARGE_DRAM
    trainer = Fuyou(model, job, tmp_path)
    steps(trainer, 2, batches_of())
    metrics: dict[str, Any] = trainer.take_metrics()
    assert metrics["dram_peak_bytes"] <= LARGE_DRAM
    assert metrics["peak_device_bytes"] <= LARGE_DEVICE


@on_ranks(1)
def test_what_does_not_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    for number, (chosen, expected) in enumerate(
        (
            ({"dram_budget": "100 kB"}, r"dram = 10\dkB|dram = .*takes .* allowed is at least"),
            ({"device_budget": "100 kB"}, "device_budget = 100 kB: .* allowed is more than"),
            ({"ssd_limit": 10**6}, "ssd_limit"),
        )
    ):
        path = tmp_path / str(number)
        path.mkdir()
        if "ssd_limit" in chosen:
            path = Path("/dev/shm")  # on no block device
        with pytest.raises(ValueError, match=expected):
            Fuyou(*made(settings(**chosen)), path)
    with pytest.raises(ValueError, match="ssd = '/nowhere': must be a folder that can be written"):
        build(*made(settings(ssd="/nowhere")))
    trainer = Fuyou(*made(settings(device_budget="1 MB")), tmp_path)
    with pytest.raises(torch.OutOfMemoryError, match="device_budget = 1 MB: a step took"):
        steps(trainer, 1, batches_of())
    with pytest.raises(RuntimeError, match="a step failed; open the folder anew"):
        steps(trainer, 1, batches_of())


@on_ranks(2)
def test_it_is_for_one_device() -> None:
    with pytest.raises(ValueError, match="ranks = 2: allowed is 1, one device, for fuyou"):
        load("fuyou")(*made(settings(), nodes=2))
