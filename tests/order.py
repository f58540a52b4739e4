"""The order of files where two processes share them: the longest first.

A process that takes up a file of minutes while the other has none left makes `make test` that much
longer. What is not in ``SECONDS`` is judged by its tests' tiers.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

#: Seconds on two cores that others used as well; what matters is which is longer.
SECONDS: Mapping[str, float] = {
    "tests/clients/test_clients.py": 390,
    "tests/experiments/clusters/test_slurm.py": 190,
    "tests/examples/test_train.py": 180,
    "tests/experiments/clusters/test_ssh.py": 110,
    "tests/experiments/worker/test_worker.py": 95,
    "tests/fcdp/test_walk.py": 95,
    "tests/fcdp/test_streams.py": 85,
    "tests/experiments/test_pins.py": 85,
    "tests/experiments/clusters/test_rented.py": 70,
}
#: Seconds of a usual test.
USUAL: Mapping[str, float] = {"system": 3.0, "cluster": 3.0, "ranks": 1.0, "unit": 0.1}


def longest_first(tests: Sequence[tuple[str, str]]) -> list[str]:
    """Files in the order to run them in, of tests that are each given as file and tier."""
    usual: dict[str, float] = defaultdict(float)
    for file, tier in tests:
        usual[file] += USUAL[tier]
    return sorted(usual, key=lambda file: -SECONDS.get(file, usual[file]))
