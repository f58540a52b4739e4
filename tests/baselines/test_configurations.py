"""The committed configurations are what the code makes, and the README explains each setting."""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from baselines import pins
from baselines.pins import Pin
from tests import programs

BASELINES = Path(__file__).resolve().parents[2] / "baselines"
#: Prints the default of each setting; settings without one are not among them.
DEFAULTS = """
import json
from deepspeed.runtime import constants
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
zero = DeepSpeedZeroConfig(stage=3)
names = {field.alias or name: name for name, field in DeepSpeedZeroConfig.model_fields.items()}
usual = {alias: getattr(zero, name) for alias, name in names.items()}
usual = {key: value for key, value in usual.items() if isinstance(value, (bool, int, float))}
usual |= {"gradient_clipping": constants.GRADIENT_CLIPPING_DEFAULT, "wall_clock_breakdown": False}
print(json.dumps(usual))
"""


def committed() -> dict[str, dict[str, Any]]:
    folder = BASELINES / "configurations"
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


@cache
def defaults(pin: Pin) -> dict[str, Any]:
    if pins.version(pin) is None:
        pytest.skip(f"DeepSpeed ({pin}) is not installed: {pins.COMMANDS[pin]}")
    output = programs.printed(sys.executable, "-c", DEFAULTS, **pins.variables(pin))
    return json.loads(output.splitlines()[-1])


def test_they_are_what_the_code_makes() -> None:
    from scripts.configurations import configurations

    assert committed() == configurations()


@pytest.mark.parametrize("pin", pins.PINS)
def test_each_setting_is_known_and_each_departure_from_a_default_is_explained(pin: Pin) -> None:
    """A misspelt one would be ignored, and the default taken in its place."""
    readme = (BASELINES / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if line.startswith("| `")]
    explained = {name for row in rows for name in row.split("|")[1].replace("`", "").split(", ")}
    usual = defaults(pin)
    known = {*usual, "offload_param", "offload_optimizer"}
    for strategy, configuration in committed().items():
        assert configuration["zero_optimization"].keys() <= known, strategy
        flat = {**configuration, **configuration["zero_optimization"]}
        del flat["zero_optimization"]
        departing = {key for key, value in flat.items() if usual.get(key) != value}
        assert departing <= {name.strip() for name in explained}, strategy
