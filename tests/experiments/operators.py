"""DeepSpeed's operators, compiled before a cell's time limit would have to pay for it."""

import sys
from functools import cache

import pytest

from baselines import pins
from baselines.pins import Pin
from tests import programs


@cache
def build(pin: Pin) -> None:
    """Compile what every strategy uses; skips the test where this DeepSpeed is not installed."""
    if pins.version(pin) is None:
        pytest.skip(f"DeepSpeed ({pin}) is not installed: {pins.COMMANDS[pin]}")
    programs.printed(sys.executable, "-m", "baselines.deepspeed.engine", **pins.variables(pin))
