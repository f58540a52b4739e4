"""Bytes that an interface has sent, by its counters."""

from pathlib import Path

import pytest

from baselines import links
from baselines.links import transmitted_bytes


def test_an_infiniband_adapter_counts_words_on_all_of_its_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for port, words in (("1", 250), ("2", 50)):
        folder = tmp_path / "mlx5_0/ports" / port / "counters"
        folder.mkdir(parents=True)
        (folder / "port_xmit_data").write_text(f"{words}\n")
    monkeypatch.setattr(links, "_INFINIBAND", tmp_path)
    assert transmitted_bytes("mlx5_0") == 4 * 300
    with pytest.raises(ValueError, match=r"interface = 'mlx5_1': allowed are .*lo.*mlx5_0"):
        transmitted_bytes("mlx5_1")
