"""Other people's trainers with FCDP, beside themselves with FSDP2: histories, parameters, bytes."""

import json
import os
import re
import shutil
import signal
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp

from tests import programs, wheels
from tests.programs import ROOT

PYTHON = ROOT / ".venv-clients/bin/python"

#: Cases by client, as ``CASES`` of their modules names them.
HUGGING_FACE = ("trainer", "sft", "sft-lora", "dpo", "dpo-lora", "grpo", "grpo-lora")
SYNCED = ("dpo-sync", "grpo-sync")
ACCUMULATED = tuple(
    f"{case}-accumulated" for case in ("trainer", "sft-lora", "dpo-lora", "grpo-lora")
)
AT_LOAD = ("trainer-at-load", "sft-at-load", "sft-accumulated-at-load")
OPTIONS = ("sft-bf16", "sft-recomputed", "sft-ram", "sft-offload", "sft-resume", "grpo-long")
LIGHTNING = (
    *("fabric", "fabric-lora", "fabric-lora-accumulated"),
    *("trainer", "trainer-lora", "trainer-lora-accumulated"),
)
TORCHTITAN = ("dp", "dp-accumulated")
QUANTIZED = (
    *("bitsandbytes-uint8", "bitsandbytes-bfloat16", "bitsandbytes-float32"),
    *("nf4", "float8"),
)
#: Clients that reduce each micro-batch by itself without FCDP: sums of another order.
ROUNDED = {("lightning", "trainer-lora-accumulated"), ("torchtitan", "dp-accumulated")}


#: torchtitan 0.3 cannot be imported on torch 2.11, and on 2.12 its tensor parallelism crashes.
TITAN_FITS = hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state")
needs_titan = pytest.mark.skipif(not TITAN_FITS, reason="torchtitan 0.3 needs torch 2.13")


@pytest.fixture(scope="module")
def python() -> str:
    interpreter = os.environ.get("FCDP_CLIENTS_PYTHON", str(PYTHON))
    if not Path(interpreter).exists():
        pytest.skip("other people's trainers are not installed: make clients")
    return interpreter


class Forks:
    """A process of ``tests.clients.forks``, which has imported what the programs import."""

    def __init__(self, folder: Path, *command: str | Path, **where: Any) -> None:
        self.folder = folder
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                **where,
            )

    def run(self, nodes: int, per_node: int, folder: Path, *words: str | Path) -> str:
        """Run a program on its ranks; return what they print."""
        before = self.log.stat().st_size
        program = {"nodes": nodes, "per_node": per_node, "folder": str(folder)}
        print(json.dumps({**program, "words": [*map(str, words)]}), file=self.process.stdin)
        self.process.stdin.flush()
        code = self.process.stdout.readline()
        printed = self.log.read_bytes()[before:].decode(errors="replace")
        assert code == "0\n", printed[-8000:]
        return printed

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def forks(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    names = ("hugging_face", "lightning", "quantized", *(["torchtitan"] if TITAN_FITS else []))
    cases = (f"tests.clients.cases_{name}" for name in names)
    forks = Forks(
        tmp_path_factory.mktemp("forks"), python, "-m", "tests.clients.forks", *cases, cwd=ROOT
    )
    yield forks
    forks.end()


def run_cases(
    forks: Forks, client: str, nodes: int, per_node: int, cases: tuple[str, ...]
) -> dict[str, Any]:
    """Run cases of a client, on the accelerator if there is but one process."""
    script = "ranks" if nodes * per_node > 1 else "on_streams"
    out = forks.folder / "results.json"
    out.unlink(missing_ok=True)
    forks.run(nodes, per_node, ROOT, ROOT / f"tests/clients/{script}.py", client, out, *cases)
    return json.loads(out.read_text(encoding="utf-8"))


def crossed(result: dict[str, Any]) -> int:
    return sum(result["ledger"]["inter_node"].values())


def gathered(result: dict[str, Any]) -> int:
    sent = result["ledger"]["inter_node"]
    return int(sent["forward"] + sent.get("backward", 0))


@pytest.mark.parametrize(
    ("client", "cases"),
    [
        ("hugging_face", ("alone", *HUGGING_FACE, *ACCUMULATED)),
        ("hugging_face", SYNCED + OPTIONS),
        ("hugging_face", AT_LOAD),
        ("lightning", ("alone", *LIGHTNING)),
        pytest.param("torchtitan", TORCHTITAN, marks=needs_titan),
    ],
    ids=["trl", "options", "at load", "lightning", "torchtitan"],
)
def test_two_nodes_train_as_fsdp2_to_the_bit(
    forks: Forks, client: str, cases: tuple[str, ...]
) -> None:
    results = run_cases(forks, client, 2, 1, cases)
    alone = gathered(results.pop("alone")) if "alone" in results else 0
    for case, result in results.items():
        exact = (client, case) not in ROUNDED
        assert result["same_history"] or not exact, case
        assert result["apart"] <= (0.0 if exact else 1e-4), case
        assert result["hits"] > 0 or "trainer" in case, case
        if alone and "lora" in case:  # frozen weights cross once, then adapters alone do
            assert gathered(result) == pytest.approx(alone, rel=0.05), case
        if (accumulated := results.get(f"{case}-accumulated")) is not None:
            assert crossed(accumulated) <= crossed(result), case
    if "sft" in results:
        assert alone < gathered(results["sft"]) / 2
    if "grpo-long" in results:
        assert gathered(results["grpo-long"]) == gathered(results["grpo-sync"])


@pytest.mark.parametrize(
    ("client", "cases"),
    [
        ("hugging_face", ("sft-lora", "dpo", "grpo-lora")),
        ("lightning", ("fabric", "trainer")),
        pytest.param("torchtitan", ("dp", "dp-tp"), marks=needs_titan),
    ],
    ids=["trl", "lightning", "torchtitan"],
)
def test_two_nodes_of_two_ranks_train_as_fsdp2_to_rounding(
    forks: Forks, client: str, cases: tuple[str, ...]
) -> None:
    for case, result in run_cases(forks, client, 2, 2, cases).items():
        assert result["apart"] < 1e-4, case


@needs_titan
@pytest.mark.parametrize(
    ("nodes", "per_node", "cases"),
    [
        (2, 2, ("ep1", "ep2", "ep4", "ep2-lora", "ep2-accumulated")),
        (4, 1, ("ep2", "ep2-tp", "ep2-hsdp")),  # ranks of different experts are on different nodes
        (2, 4, ("ep1", "ep2", "ep4")),
    ],
    ids=["2x2", "4x1", "2x4"],
)
def test_experts_of_torchtitan_train_as_fsdp2_to_the_bit_and_send_the_closed_form(
    forks: Forks, nodes: int, per_node: int, cases: tuple[str, ...]
) -> None:
    """Ranks compare the bytes by themselves. torchtitan rounds each of several micro-batches.

    It depends on the CPU whether the first step's norm of gradients shows that.
    """
    for case, result in run_cases(forks, "torchtitan", nodes, per_node, cases).items():
        exact = "accumulated" not in case
        *losses, norm = result["theirs"][0]
        first = [*losses, norm if exact else pytest.approx(norm, rel=1e-6)]
        assert [*result["history"][0]] == first, case
        assert result["same_history"] or not exact, case
        assert result["apart"] == 0.0 or not exact, case
        assert result["hits"] > 0, case


@pytest.mark.parametrize(
    ("client", "cases"),
    [
        ("hugging_face", ("trainer-accumulated", "sft-lora", "grpo-short")),
        ("lightning", ("fabric-lora", "trainer")),
    ],
    ids=["trl", "lightning"],
)
def test_two_nodes_with_accelerators_train_as_fsdp2_to_the_bit(
    forks: Forks, client: str, cases: tuple[str, ...]
) -> None:
    """On the accelerator of ``tests.fcdp``, without a race, in a randomly drawn schedule."""
    for case, result in run_cases(forks, client, 1, 1, cases).items():
        assert result["same_history"], case
        assert result["apart"] == 0.0, case
        assert result["hits"] > 0, case
        assert result["wrong"] is None, case


def test_quantised_bases_cross_once_and_train_as_fsdp2_to_the_bit(forks: Forks) -> None:
    """Each of two ranks per node keeps what the other node's rank has sent: 1/n of 1/L."""
    for case, result in run_cases(forks, "quantized", 2, 2, QUANTIZED).items():
        for what in ("same_history", "same_bits", "same_saved", "same_published"):
            assert result[what], (case, what)
        # Bits of NaNs, which no copy by way of numbers would keep.
        assert (result["nans"] > 0) == (case in ("bitsandbytes-bfloat16", "bitsandbytes-float32"))
        assert result["apart"] == 0.0, case
        first, *later = result["crossed"]
        assert {*later} == {result["adapters"]}, case
        assert first - result["adapters"] == result["frozen"], case
        kept = result["adapters"] + result["frozen"]
        assert 0 <= result["cached"] - kept < result["units"] * 4096, case  # each begins a page
        if case != "float8":
            # torchao's tables and means are on each rank, and need not be sent.
            assert result["frozen"] == pytest.approx(result["packed"] / 4, rel=0.01), case
            assert "write the adapters by fcdp.save_adapters" in result["refusal"], case


def test_what_needs_a_packed_base_passes_tests_of_its_own(python: str) -> None:
    """The environment of all other tests lacks what packs it, so that they are skipped there."""
    files = (
        "tests/experiments/worker/test_frozen.py",
        "tests/baselines/test_strategies.py",
        "tests/fcdp/test_expert_meshes.py",
    )
    chosen = ("-q", "-p", "no:cacheprovider", "-k", "packed or scales or nf4")
    output = programs.printed(python, "-m", "pytest", *chosen, *files, within_s=600)
    assert "skipped" not in output, output


def test_what_cannot_be_taken_over_names_the_option_to_change(forks: Forks) -> None:
    sentences = run_cases(forks, "hugging_face", 2, 1, ("refused",))["refused"]
    for wrapped in ("DDP", "fully_shard", "fcdp.shard"):
        assert "pass it as from_pretrained makes it" in sentences[wrapped], wrapped
    assert "fsdp=True, fsdp_config={'version': 2}" in sentences["no plugin"]


@needs_titan
def test_what_torchtitan_must_not_be_configured_to_do(forks: Forks) -> None:
    sentences = run_cases(forks, "torchtitan", 2, 1, ("refused",))["refused"]
    beside = "parallelism.spmd_backend = 'spmd_types': must be 'partial_dtensor' beside "
    assert sentences == {
        "pipeline_parallel_degree": "parallelism.pipeline_parallel_degree = 2: must be 1",
        "tensor_parallel_degree": beside + "tensor or expert parallelism",
        "expert_parallel_degree": beside + "tensor or expert parallelism",
    }


@pytest.fixture(scope="module")
def alone(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of the wheel and of the clients, without the checkout."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "source").mkdir()
    wheel = wheels.built("build_wheel", wheels.source(folder / "source", "fcdp"), folder)
    programs.printed(python, "-m", "venv", "--without-pip", folder / "venv")
    (packages,) = folder.glob("venv/lib/*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    # Python reads no .pth files of folders that one adds: no editable install of fcdp.
    paths = "import sys; print(*(path for path in sys.path if path.endswith('site-packages')))"
    seen = programs.printed(python, "-c", paths).split()
    (packages / "clients.pth").write_text("\n".join(seen))
    return folder / "venv/bin/python"


#: Fails where a part of the checkout beside the library can be imported.
APART = """
import importlib.util, sys
import fcdp
assert fcdp.__file__.startswith(sys.prefix), fcdp.__file__
assert not any(map(importlib.util.find_spec, ("experiments", "baselines", "simulation")))
"""


@pytest.fixture(scope="module")
def emptied() -> dict[str, str]:
    """Variables of a shell that knows nothing of the checkout."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment.pop("PYTHONPATH", None)
    return environment


@pytest.fixture(scope="module")
def apart(
    alone: Path, emptied: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Forks]:
    folder = tmp_path_factory.mktemp("apart")
    (folder / "apart.py").write_text(APART)
    script = shutil.copy(ROOT / "tests/clients/forks.py", folder)
    imported = ("trl", "lightning", "torchtitan.trainer", "apart")
    forks = Forks(folder, alone, script, *imported, cwd=folder, env=emptied)
    yield forks
    forks.end()


def copied(name: str, folder: Path) -> Path:
    (script,) = (ROOT / "examples").rglob(f"{name}.py")
    return Path(shutil.copy(script, folder))


@pytest.mark.parametrize(
    "name",
    ["sft", "dpo", "grpo", "trainer", "lightning_trainer", "torchtitan_llama", "qlora", "moe"],
)
def test_examples_run_from_an_empty_folder(apart: Forks, name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    printed = apart.run(2, 1, tmp_path / "empty", copied(name, tmp_path))
    assert printed.count("hits") == 2, printed
    if name in ("qlora", "moe"):  # the base crosses once, then adapters and their gradients alone
        sent = [int(each.replace(",", "")) for each in re.findall(r"rank 0 sent ([\d,]+)", printed)]
        assert len({*sent[1:]}) == 1, sent
        assert sent[0] > 2 * sent[1], sent


def test_torchrun_starts_an_example(alone: Path, emptied: dict[str, str], tmp_path: Path) -> None:
    """By the command in the first lines of the examples."""
    start = f"{alone} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank $node"
    start += f" --master-addr 127.0.0.1 --master-port 29533 {copied('trainer', tmp_path)}"
    both = f"node=0; {start} & node=1; {start} && wait $!"
    done = programs.ended("bash", "-c", both, folder=tmp_path, environment=emptied, within_s=400)
    assert done.stdout.count("hits") == 2, done.stdout[-2000:] + done.stderr[-4000:]
