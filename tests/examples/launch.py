"""torchrun's variables and an example's output, for ranks that torchrun did not start."""

import contextlib
import io
import os
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import torch.distributed as dist


@contextlib.contextmanager
def launched(ranks_per_node: int) -> Iterator[None]:
    """Set the launcher's variables; put all of the environment back afterwards."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    variables = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % ranks_per_node,
        "LOCAL_WORLD_SIZE": ranks_per_node,
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": 1,
    }
    with mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}):
        yield


@contextlib.contextmanager
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its state in the process; ranks are shared with other tests.

    Nor shall it import DeepSpeed, which takes seconds, to see that the model is none of its own.
    """
    from accelerate.state import AcceleratorState, GradientState

    try:
        with mock.patch("accelerate.utils.other.is_deepspeed_available", return_value=False):
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def printed(example: ModuleType, arguments: list[str], ranks_per_node: int) -> list[str]:
    """The lines that an example's ``main`` prints on this rank."""
    output = io.StringIO()
    with launched(ranks_per_node), contextlib.redirect_stdout(output):
        example.main(arguments)
    return output.getvalue().splitlines()
