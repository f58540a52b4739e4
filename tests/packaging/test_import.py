"""The import of the library: what it takes beside torch's own, and what it leaves alone."""

import statistics
import sys

from tests import programs

#: Whoever calls ``fully_shard`` imports torch and FSDP2.
PROGRAM = """
import sys, time
import torch, torch.distributed.fsdp
before, begun = {*sys.modules}, time.process_time()
import fcdp
fcdp.shard
print(time.process_time() - begun)
print(*sys.modules.keys() - before)
"""


def test_it_takes_no_longer_than_that_of_fsdp2_by_0_3_seconds() -> None:
    """In seconds of the processor, which other work on this machine hardly changes."""
    times, names = [], set[str]()
    for _ in range(5):
        time, modules = programs.printed(sys.executable, "-c", PROGRAM).splitlines()
        times.append(float(time))
        names |= {*modules.split()}
    # The compiler of torch takes as long as FSDP2; it comes with the first model.
    assert names.isdisjoint({"torch._dynamo", "torch._inductor", "numba", "safetensors"})
    assert statistics.median(times) < 0.3, times
