"""An accelerator for tests: several ranks in one process, and every order that waits allow.

``run`` calls a function on every rank, each a thread with a device of its own, and returns what
they return and the tape of all that streams, hosts and collectives did. ``check`` says what nothing
on the tape orders, and what drawn schedules of it read wrongly. The library takes the paths of
CUDA. A process that has imported this has the device for good: tests run it in one of its own.
"""

from tests.fcdp.accelerator.device import NAME, here
from tests.fcdp.accelerator.ranks import RankFailed, check, run

__all__ = ["NAME", "RankFailed", "check", "here", "run"]
