"""A size is read alike wherever there is one, in the library and outside of it."""

import pytest

import fcdp
from fcdp.cache import named
from fcdp.sizes import parse, written
from simulation import quantities

TEXTS = {
    "512GB": 512e9,
    "512 GiB": 512 * 2**30,
    "1 MiB": 2**20,
    "1.5 kB": 1500,
    "1TB": 1e12,
    "100 B": 100,
    "2giB": 2**31,
    "1e9B": 1e9,
    ".5 GiB": 2**29,
    "1_000MB": 1e9,
    "1024": 1024,
    "1.5 TiB": 1.5 * 2**40,
}
NO_SIZES = ["GB", "-1 GB", "1 Gbit", "one GB", "infGB", "512G", "1e999B", ""]


@pytest.mark.parametrize(("text", "count"), TEXTS.items())
def test_every_place_reads_the_same(text: str, count: float) -> None:
    assert parse(text) == count
    assert quantities.size_bytes("--host-memory", text) == count
    assert named.parse(f"budget(host={text})") == fcdp.Budget(host=int(count))


@pytest.mark.parametrize("text", [*NO_SIZES, "0 GiB"])
def test_an_error_of_a_size_lists_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: allowed are bytes, 1 or more, or such as"):
        parse(text, least=1)
    with pytest.raises(ValueError, match=f"--host-memory = '{text}': allowed: bytes, 1 or more"):
        quantities.size_bytes("--host-memory", text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1.26e9, "1.26 GB"), (512e9, "512 GB"), (25.3e9, "25.3 GB")],
)
def test_sizes_are_written_in_one_way(count: float, text: str) -> None:
    assert written(count) == text


@pytest.mark.parametrize(
    ("bits", "text"), [(99.5e9, "99.5 Gbit/s"), (40e6, "40 Mbit/s"), (1.234e12, "1,234 Gbit/s")]
)
def test_rates_are_written_in_one_way(bits: float, text: str) -> None:
    assert quantities.format_rate(bits) == text


def test_no_module_of_the_library_hides_a_public_name() -> None:
    """Names are looked up when they are used, and a module that was imported is found before."""
    assert not fcdp._MODULES & set(fcdp.__all__)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="module 'fcdp' has no attribute 'nothing'"):
        fcdp.nothing  # type: ignore[attr-defined]  # noqa: B018
