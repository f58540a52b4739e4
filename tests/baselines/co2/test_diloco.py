"""DiLoCo and Streaming DiLoCo train as their listings do, with PyTorch's outer optimizer."""

from dataclasses import replace

import pytest
import torch
import torch.nn as nn

from baselines.settings import DiLoCoSettings, StreamingSettings
from tests.baselines.co2.workers import Training, apart, batches, by_step, flat, made, model
from tests.ranks import Pools, on_ranks

DILOCO = DiLoCoSettings(interval=3)
STREAMING = StreamingSettings(interval=4, overlap=1)


def listing(training: Training) -> list[list[torch.Tensor]]:
    """The parameters of each worker after each step, by the listing in one process.

    Fragments are the model's two modules, or the whole model is one.
    """
    settings = training.settings
    count, overlap, local_share, interval = 1, 0, 0.0, settings.interval
    if isinstance(settings, StreamingSettings):
        count, overlap, local_share = settings.fragments, settings.overlap, settings.kept
    rate, momentum = settings.outer_learning_rate, settings.outer_momentum

    def fragments(of: nn.Sequential) -> list[list[nn.Parameter]]:
        return [list(part.parameters()) for part in ([of] if count == 1 else of)]

    parts = fragments(model())
    outer = [torch.optim.SGD(part, rate, momentum, nesterov=True) for part in parts]
    under_way: dict[int, list[torch.Tensor]] = {}
    parameters = []
    for step, models in enumerate(apart(training), 1):
        owned = [fragments(each) for each in models]
        with torch.no_grad():
            for at in range(count):
                due = (at + 1) * interval // count % interval
                arrives = (step - overlap) % interval == due
                if overlap and arrives and at in under_way:
                    _arrive(outer[at], parts[at], under_way.pop(at), owned, at, local_share)
                if step % interval == due:
                    ends = zip(*(parts_of[at] for parts_of in owned), strict=True)
                    under_way[at] = [
                        start - torch.stack(each).mean(0)
                        for start, each in zip(parts[at], ends, strict=True)
                    ]
                if not overlap and arrives:
                    _arrive(outer[at], parts[at], under_way.pop(at), owned, at, local_share)
        parameters.append([flat(each) for each in models])
    return parameters


def _arrive(
    outer: torch.optim.Optimizer,
    starts: list[nn.Parameter],
    means: list[torch.Tensor],
    owned: list[list[list[nn.Parameter]]],
    at: int,
    local_share: float,
) -> None:
    for start, mean in zip(starts, means, strict=True):
        start.grad = mean
    outer.step()
    for worker in owned:
        for mine, start in zip(worker[at], starts, strict=True):
            mine.copy_(local_share * mine + (1 - local_share) * start)


@pytest.mark.parametrize(
    "training",
    [
        Training(DILOCO, nodes=2),
        Training(DILOCO.model_copy(update={"worker": "node"}), nodes=2, ranks_per_node=2),
        Training(DILOCO.model_copy(update={"worker": "nodes"}), nodes=2, ranks_per_node=2),
        Training(DILOCO.model_copy(update={"outer_on": "host"}), nodes=2),
        Training(STREAMING, nodes=2),
        Training(STREAMING.model_copy(update={"overlap": 2, "kept": 0.0}), nodes=2),
        Training(STREAMING.model_copy(update={"overlap": 4}), nodes=2),
        Training(STREAMING.model_copy(update={"outer_on": "host", "kept": 0.25}), nodes=2),
        Training(STREAMING.model_copy(update={"worker": "nodes"}), nodes=2, ranks_per_node=2),
    ],
    ids=[
        *("diloco", "sharded", "over fcdp", "on the host"),
        *("streaming", "kept nothing", "a round late", "streaming on the host", "over fcdp too"),
    ],
)
def test_each_step_is_the_listings(ranks: Pools, training: Training) -> None:
    training = replace(training, steps=24)
    world_size = training.nodes * training.ranks_per_node
    per_worker = world_size // training.workers
    for rank, mine in enumerate(ranks.run(world_size, by_step, training)):
        for step, expected in zip(mine[1:], listing(training), strict=True):
            torch.testing.assert_close(step, expected[rank // per_worker], rtol=0, atol=1e-6)


@pytest.mark.parametrize("worker", ["rank", "nodes"])
def test_what_is_measured_is_what_workers_share(ranks: Pools, worker: str) -> None:
    """Where fragments arrive in turn no two workers are alike; measuring changes no training."""
    settings = STREAMING.model_copy(update={"worker": worker})
    per_node = 1 if worker == "rank" else 2
    training = Training(settings, nodes=2, ranks_per_node=per_node)
    measured, ends = zip(*ranks.run(2 * per_node, _measured, training), strict=True)
    assert len(set(measured)) == 1
    assert not ends[0].equal(ends[-1])
    for rank, expected in enumerate(ranks.run(2 * per_node, by_step, training)):
        assert ends[rank].equal(expected[-1])


def _measured(training: Training) -> tuple[float, torch.Tensor]:
    trained, workers = made(training)
    data, held_out = batches(workers.job.topology.rank), next(batches(9))
    loss = 0.0
    for _ in range(training.steps):
        workers.step([next(data)])
        loss = workers.evaluate(held_out).item()
    workers.settle()
    return loss, flat(trained)


@on_ranks(1)
def test_more_fragments_than_blocks_are_refused() -> None:
    training = Training(StreamingSettings(interval=4, fragments=3))
    with pytest.raises(ValueError, match="fragments = 3: allowed are 1 to 2"):
        made(training)
