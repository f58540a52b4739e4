"""Files that have mutants, the kinds of these, and the tests that are to catch them."""

from collections.abc import Iterator
from pathlib import Path

from scripts.mutants.operators import Mutant, Source, arithmetic, omissions, order

#: Parts in which arithmetic is mutated too, and statements and conditions are left out.
ARITHMETIC = (
    "grouping",
    "partition",
    "exchange",
    "reduce_scatter",
    "staleness",
    "pass_controller",
    "fsdp2",
    "partial_gradients",
    "topology",
    "codec",
    "options",
    "rounding",
    "delta",
)

#: The tests of a file, or of all in a folder: files and folders of ``tests/fcdp``, in the order in
#: which they run. Of each list unit tests come first, whatever needs processes after them.
TESTS: dict[str, tuple[str, ...]] = {
    "all_gather": ("test_in_flight.py", "test_streams.py", "test_guard.py", "test_staleness.py"),
    "api": ("test_guard.py", "test_staleness.py"),
    "cache": ("cache", "test_streams.py", "test_guard.py", "test_staleness.py"),
    "checkpoint": ("test_checkpoint.py",),
    "codec": ("test_codec.py", "test_api.py", "test_rounding.py"),
    "delta": ("delta", "test_streams.py"),
    "direct_io": ("cache/test_tiers.py", "test_streams.py"),
    "engine": ("test_streams.py", "test_reduce_scatter.py", "test_staleness.py"),
    "exchange": ("test_exchange.py", "test_rounding.py", "test_streams.py"),
    "fsdp2": ("test_fsdp2.py", "test_staleness.py", "test_accumulate.py", "test_check.py"),
    "failure": ("failures/test_ranks.py",),
    "grouping": ("test_grouping.py", "test_partition.py", "test_peft.py"),
    "guard": ("test_guard.py", "test_streams.py", "test_extensions.py"),
    "in_flight": ("test_in_flight.py",),
    "options": ("test_options.py",),
    "partial_gradients": (
        *("test_partial_gradients.py", "test_reduce_scatter.py"),
        *("test_accumulate.py", "test_streams.py"),
    ),
    "partition": ("test_partition.py", "test_peft.py"),
    "pass_controller": (
        *("test_pass_controller.py", "test_staleness.py", "cache/test_cache.py"),
        *("test_guard.py", "test_streams.py", "failures/test_ranks.py"),
    ),
    "pretrained": ("test_pretrained.py",),
    "reduce_scatter": (
        *("test_reduce_scatter.py", "test_in_flight.py", "test_streams.py", "test_accumulate.py"),
        *("upstream/test_mixed_precision.py", "test_ledger.py"),
        "reports/test_silence_where_something_is_lost.py",
    ),
    "rounding": ("test_rounding.py", "test_codec_training.py", "test_streams.py"),
    "streams": ("cache/test_slices.py", "test_streams.py"),
    "topology": ("test_topology.py", "test_tensor_parallel.py", "test_expert_meshes.py"),
    "staleness": ("test_staleness.py", "test_guard.py"),
}


def sources(root: Path) -> Iterator[Source]:
    """The library's files, but for integrations, whose tests need an environment of their own."""
    for path in sorted(root.glob("fcdp/**/*.py")):
        if path.parent.name != "integrations":
            yield Source(str(path.relative_to(root)), path.read_text(encoding="utf-8"))


def mutants(root: Path) -> Iterator[Mutant]:
    for source in sources(root):
        faults = source.mutants("order", order(source))
        if part_of(source.file) in ARITHMETIC:
            have = {mutant.source for mutant in faults}
            edits = [*omissions(source), *arithmetic(source)]
            more = source.mutants("arithmetic", edits)
            faults += [mutant for mutant in more if mutant.source not in have]
        yield from faults


def tests_of(file: str) -> tuple[str, ...]:
    return tuple(f"tests/fcdp/{name}" for name in TESTS[part_of(file)])


def part_of(file: str) -> str:
    """The folder or the file right below ``fcdp``."""
    return file.split("/")[1].removesuffix(".py")
