"""Settings of lossless codecs."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import fcdp
from fcdp.delta.difference import prepare


@pytest.mark.parametrize("when", ["never", "", None])
def test_another_rule_is_refused(when: Any) -> None:
    with pytest.raises(ValueError, match="when = .*: must be 'pays', 'always' or 'smallest'"):
        fcdp.Delta(when)


@pytest.mark.parametrize("codec", [fcdp.Delta(), fcdp.Exact()])
def test_loops_are_compiled_before_training_on_all_ranks_of_cpus(codec: Any) -> None:
    host, device = (
        SimpleNamespace(mesh=SimpleNamespace(device_type=kind)) for kind in ("cpu", "cuda")
    )
    with mock.patch("fcdp.delta.settings.on_all_ranks") as on_all_ranks:
        codec.load(device)
        codec.load(host)
    assert on_all_ranks.mock_calls == [mock.call(f"codec = {codec}", host, prepare)]
