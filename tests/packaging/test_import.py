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
print((time.process_time() - begun) / begun)
print(*sys.modules.keys() - before)
"""


def test_it_takes_little_more_than_that_of_torch_with_fsdp2() -> None:
    """By 0.3 s where these take 2 s, as time of the processor: other work makes both slower."""
    shares, names = [], set[str]()
    for _ in range(3):
        share, modules = programs.printed(sys.executable, "-c", PROGRAM).splitlines()
        shares.append(float(share))
        names |= {*modules.split()}
    # The compiler of torch takes as long as FSDP2; it comes with the first model.
    assert names.isdisjoint({"torch._dynamo", "torch._inductor", "numba", "safetensors"})
    assert statistics.median(shares) < 0.15, shares
