"""DeepSpeed's operators, compiled before a cell's time limit would have to pay for it."""

import sys
from functools import cache
from pathlib import Path

import pytest

from baselines import pins
from baselines.pins import Pin
from tests import programs


@cache
def build(pin: Pin) -> None:
    """Compile what every strategy uses; skips the test where this DeepSpeed is not installed."""
    if pins.version(pin) is None:
        pytest.skip(f"DeepSpeed ({pin}) is not installed: {pins.COMMANDS[pin]}")
    # ``make setup`` has compiled it: to import DeepSpeed only to see that takes ten seconds.
    if pin == "current" and Path(sys.prefix, "operators.stamp").exists():
        return
    programs.printed(sys.executable, "-m", "baselines.deepspeed.engine", **pins.variables(pin))
