"""The table of coding's speed: what is timed is told near its entropy, and read back."""

from __future__ import annotations

from scripts import coding_speed, readme


def test_each_case_is_coded_and_shown() -> None:
    found = coding_speed.measured(2**14, rounds=2)
    bits = {row["case"]: row["bits"] for row in found["rows"]}
    assert bits.keys() == {row["case"] for row in readme.committed("coding-speed")["rows"]}
    told = [bits[f"bf16 after a step at {rate:g}, entropy"] for rate in coding_speed.RATES]
    assert told == sorted(told, reverse=True)
    assert bits["bf16 gradients, exponents"] < 11.2
    assert all(
        f"| {name} | {count:.2f} |" in coding_speed.table(found) for name, count in bits.items()
    )
