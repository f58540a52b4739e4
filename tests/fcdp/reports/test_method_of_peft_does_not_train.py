"""A method of PEFT's trains as with FSDP2, sends its adapter alone, and is saved and read again.

Each method is, of the release that is pinned: where FSDP2 asks for one unit of the whole model,
``tests.fcdp.tuners`` says why.
"""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn as nn
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fcdp
from fcdp.engine import engine_of
from tests.fcdp.training import take_step, topology_of
from tests.fcdp.tuners import SHARED, TUNERS, adapted, small_llama
from tests.ranks import Pools

STEPS = 3
TOKENS = torch.arange(1, 9).view(1, 8)


class Adapted:
    """A training of one method's adapter; ``how`` is FSDP2, or FCDP's way to set it up."""

    def __init__(self, name: str, how: str) -> None:
        self.how, self.tuner = how, TUNERS[name]
        topology, self.model = topology_of(2, 1), adapted(name)
        blocks: list[nn.Module] = []
        if not self.tuner.whole:
            blocks = [*self.model.get_base_model().model.layers]
        cache = fcdp.CacheOptions(detect_writes=how != "undetected")
        if how in ("shard", "undetected"):
            fcdp.shard(self.model, topology, units=blocks, cache=cache)
        else:
            for module in [*blocks, self.model]:
                fully_shard(module, mesh=topology.mesh)
        if how == "cache_parameters":
            fcdp.cache_parameters(self.model, topology, cache=cache)
        params = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.SGD(params, lr=0.5)
        self.tokens = torch.Generator().manual_seed(topology.rank)
        device = torch.get_default_device()
        self.inputs = {name: value.to(device) for name, value in self.tuner.inputs.items()}
        torch.manual_seed(topology.rank)  # of methods that draw

    def step(self) -> tuple[float, int]:
        """Take one step; return its loss, and the bytes that its gathers sent between nodes."""
        tokens = torch.randint(64, (2, 9), generator=self.tokens)
        inputs = {name: value.expand(2) for name, value in self.inputs.items()}
        loss = self.model(input_ids=tokens, labels=tokens, use_cache=False, **inputs).loss
        value = take_step(loss, self.optimizer)
        if self.how == "fsdp2":
            return value, 0
        counts = fcdp.ledger(self.model).snapshot()["inter_node"]
        fcdp.ledger(self.model).reset()
        return value, counts["forward"] + counts.get("backward", 0)

    def logits(self, model: Any) -> torch.Tensor:
        model.eval()
        tokens = TOKENS.to(torch.get_default_device())
        with torch.no_grad():
            out: torch.Tensor = model(input_ids=tokens, use_cache=False, **self.inputs).logits
        model.train()
        return out.clone()

    def read(self, directory: Path) -> Any:
        """The adapter that was written, on a new model."""
        with torch.random.fork_rng(devices=[]):
            base = small_llama(**self.tuner.base)
            torch.manual_seed(1)  # what is not in the files would be another
            return peft.PeftModel.from_pretrained(base, str(directory))


def is_refused(name: str) -> None:
    """With a unit per block, before anything is sharded; FSDP2 has sharded some blocks by then."""
    model = adapted(name)
    with pytest.raises(ValueError, match="one parameter, in .* units"):
        fcdp.shard(model, topology_of(2, 1))
    assert not any(isinstance(param, DTensor) for param in model.parameters())


def trains(name: str, directory: Path) -> None:
    run = Adapted(name, "fsdp2")
    losses = [run.step()[0] for _ in range(STEPS + 1)]
    assert len({*losses}) == STEPS + 1
    for how in ("shard", "undetected", "cache_parameters"):
        run, folder = Adapted(name, how), directory / how
        steps = [run.step() for _ in range(STEPS)]
        if how != "cache_parameters":  # its units are the user's
            units = engine_of(run.model).units
            adapter = sum(unit.shard_bytes for unit in units if unit.trainable)
            assert steps[-1][1] == steps[-2][1] == adapter < steps[0][1], how
        logits = run.logits(run.model)
        fcdp.save_adapters(run.model, folder)
        assert torch.equal(run.logits(run.model), logits), "writing changes nothing"
        again = run.logits(run.read(folder))
        assert torch.equal(again, logits) != bool(run.tuner.unseen), how
        steps.append(run.step())
        assert [loss for loss, _ in steps] == losses, how
    fcdp.export(run.model, directory / "base")
    written = load_file(directory / "base" / "model.safetensors")
    base = small_llama(**run.tuner.base).state_dict()
    assert written.keys() == base.keys()
    changed = {each for each in base if not torch.equal(written[each], base[each].cpu())}
    assert all(run.tuner.of_base and each.endswith(run.tuner.of_base) for each in changed)
    if run.tuner.whole == SHARED:
        is_refused(name)


@pytest.mark.parametrize("name", TUNERS)
def test_a_method_trains_sends_its_adapter_and_is_saved(
    name: str, ranks: Pools, tmp_path: Path
) -> None:
    pytest.importorskip(TUNERS[name].needs)
    ranks.run(2, trains, name, tmp_path)


def test_the_table_has_every_method() -> None:
    assert {kind.lower() for kind in peft.PeftType} <= TUNERS.keys()
