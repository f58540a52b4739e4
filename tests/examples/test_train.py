"""The program that people copy, from an empty folder with the wheel: it outlives its ranks."""

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

from examples import train
from tests import wheels
from tests.examples.launch import launched
from tests.experiments.waiting import is_running, wait_until, wait_until_ended
from tests.fcdp.training import topology_of
from tests.ranks import Pools
from tests.wheels import ROOT

STEPS = 40
SAVE_EVERY = 4
OPTIONS = (
    *("--model", "model", "--data", "text.txt", "--sequence-length", "32"),
    *("--global-batch", "6", "--micro-batch", "2", "--warm-up", "3", "--lr", "0.003"),
    *("--precision", "float32", "--evaluate-every", "5"),
)
#: Keeps a copy of the checkpoint that it goes on from.
KEEP = """
import runpy, shutil
import torch.distributed as dist
import fcdp

plain = fcdp.load

def load(model, optimizer, directory):
    if dist.get_rank() == 0:
        shutil.copytree(directory, directory.parent / "loaded")
    return plain(model, optimizer, directory)

fcdp.load = load
runpy.run_path("train.py", run_name="__main__")
"""
#: Has no room for the first checkpoint, and a notice while it evaluates for the first time.
HARD = """
import os, signal, sys
from concurrent.futures import Future
import fcdp, train

save, evaluate = fcdp.save, train.evaluate

def full(*arguments, extra, asynchronous, **options):
    if not asynchronous or extra["step"] > 4:
        return save(*arguments, extra=extra, asynchronous=asynchronous, **options)
    failed = Future()
    failed.set_exception(RuntimeError("No space left on device"))
    return failed

def noticed(*arguments):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return evaluate(*arguments)

fcdp.save, train.evaluate = full, noticed
train.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program, a model with dropout and a text, whose Python has the wheel."""
    folder = tmp_path_factory.mktemp("place")
    source = wheels.source(tmp_path_factory.mktemp("source"), "fcdp")
    wheel = wheels.built("build_wheel", source, tmp_path_factory.mktemp("wheel"))
    wheels.environment(wheel, folder, "torch", "transformers", "accelerate")
    shutil.copy(ROOT / "examples/train.py", folder)
    (folder / "keep.py").write_text(KEEP)
    (folder / "hard.py").write_text(HARD)
    (folder / "text.txt").write_bytes(Path(argparse.__file__).read_bytes()[:20_000])
    make_model(folder / "model")
    return folder


def make_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(vocab_size=257, **sizes)).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE({sign: at for at, sign in enumerate(alphabet)}, []))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=bytes_).save_pretrained(folder)


def test_a_mistake_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": "\\ud800"}\n')
    usual = [f"--model={tmp_path}", f"--data={tmp_path / 'x.jsonl'}", f"--output={tmp_path}"]
    for option in ("--steps=0", "--seed=1e9", "--held-out=1", "--lr=-1", "--time-out=nan"):
        with pytest.raises(SystemExit, match="2"):
            train.parse([*usual, option])
        assert option.partition("=")[0] in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit, match="--sequence-length 128: the model allows 64"):
        train.check_model(train.parse([*usual, "--sequence-length=128"]))
    with pytest.raises(SystemExit, match=r"x\.jsonl: line 2: UnicodeEncodeError; must be an obj"):
        train.tokenise(train.parse([*usual, "--sequence-length=32"]))
    config = tmp_path / "config.json"
    for text, reason in (
        ('{"model_type": "bert"}', "type bert; must be"),
        ("{", "not a valid JSON"),
    ):
        config.write_text(text)
        with pytest.raises(SystemExit, match=f"--model .*: .*{reason}"):
            train.check_model(train.parse(usual))


def test_what_another_program_saved_is_no_run_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for extra in (None, {"step": 4}):
        monkeypatch.setattr(train.fcdp, "load", lambda *_, extra=extra: extra)
        with pytest.raises(SystemExit, match="is another program's; must be of this, or --output"):
            train.load(None, torch.optim.SGD([torch.ones(1)]), tmp_path, {"seed": 0})


class Run:
    """Starts of the program with one folder for output."""

    def __init__(self, place: Path, name: str, *options: str) -> None:
        self.place = place
        self.output = place / name
        self.options = (*OPTIONS, "--output", name, *options)
        self.printed = place / f"{name}.txt"
        self.python, self.path = place / "environment/bin/python", ""

    def start(self, *launcher: str, script: str = "train.py") -> subprocess.Popen[bytes]:
        command = [self.python, "-m", "torch.distributed.run"]
        alone = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with self.printed.open("ab") as printed:
            return subprocess.Popen(
                [*command, "--monitor-interval", "0.1", *launcher, script, *self.options],
                cwd=self.place,
                env={**os.environ, **alone, "PYTHONPATH": self.path},
                stdout=printed,
                stderr=printed,
            )

    def lines(self) -> list[dict[str, Any]]:
        log = self.output / "log.jsonl"
        text = log.read_text() if log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def trained(self) -> dict[int, tuple[Any, ...]]:
        """Values that are the same wherever a run was interrupted; a step's last line counts."""
        return {
            line["step"]: (line["loss"], line["norm"], line["lr"], line.get("held_out_loss"))
            for line in self.lines()
        }

    def starts(self) -> list[int]:
        """The steps that the ranks began with, each time."""
        return [*map(int, re.findall(r"from step (\d+) of", self.printed.read_text()))]

    def wait_for(self, lines: int) -> None:
        """Wait until so many more steps are done."""
        target = len(self.lines()) + lines
        wait_until(lambda: len(self.lines()) >= target, within_s=120)

    def ends(self, *agents: subprocess.Popen[bytes]) -> None:
        for agent in agents:
            assert agent.wait(timeout=180) == 0, self.printed.read_text()[-4000:]

    def exported(self) -> bytes:
        return (self.output / "export/model.safetensors").read_bytes()


def workers(agent: subprocess.Popen[bytes]) -> list[int]:
    return [child.pid for child in psutil.Process(agent.pid).children()]


def kill(*pids: int) -> None:
    for pid in pids:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


ON_ONE_NODE = ("--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Run:
    run = Run(place, "undisturbed", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY))
    run.ends(run.start(*ON_ONE_NODE))
    return run


def test_a_mistake_is_printed_once_however_often_ranks_may_start(place: Path) -> None:
    (place / "x.jsonl").write_text('{"txet": "a"}\n')
    run = Run(place, "mistaken", "--data", "x.jsonl")
    agent = run.start(*ON_ONE_NODE, "--max-restarts", "100")
    assert agent.wait(timeout=120) != 0
    printed = run.printed.read_text()
    message = "--data x.jsonl: line 1: KeyError; must be"
    assert 1 <= printed.count(message) <= 2, printed  # by each rank
    assert 'train.py", line' not in printed  # torchrun's own traceback has other files


def mistaken(place: Path, *options: str) -> str:
    """The line that this rank ends with, of two on one node."""
    here = ("--model", f"{place}/model", "--data", f"{place}/text.txt", "--output", f"{place}/new")
    joined = mock.patch.object(train, "join", return_value=topology_of(1, 2))
    with launched(2), joined, mock.patch("signal.signal"), pytest.raises(SystemExit) as end:
        train.main([*OPTIONS, *here, *options])
    return str(end.value.code)


def test_a_mistake_that_ranks_find_is_one_line_of_each(
    ranks: Pools, place: Path, undisturbed: Run
) -> None:
    damaged = shutil.copytree(undisturbed.output, place / "damaged")
    (tokens,) = damaged.glob("tokens-*.pt")
    os.truncate(tokens, tokens.stat().st_size // 2)
    output, file = str(undisturbed.output), f"{place}/text.txt"
    for options, reason in (
        (("--policy", "hots"), "policy = 'hots': allowed are none,"),
        (("--output", file), f"{file}/checkpoint: Not a directory; must be a folder"),
        (("--output", str(damaged)), f"{tokens.name}: is damaged; remove it"),
        (("--output", output, "--seed", "1"), "was trained with seed = 0; must be the same"),
    ):
        for line in ranks.run(2, mistaken, place, *options):
            assert reason in line
            assert "\n" not in line


def test_after_a_kill_and_a_notice_it_goes_on_as_if_nothing_had_happened(
    place: Path, undisturbed: Run
) -> None:
    run = Run(place, "killed", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY))
    launcher = (*ON_ONE_NODE, "--max-restarts", "1")
    first = run.start(*launcher)
    run.wait_for(SAVE_EVERY + 2)
    kill(workers(first)[1])
    wait_until(lambda: len(run.starts()) == 2, within_s=60)
    run.wait_for(2)
    first.terminate()
    assert first.wait(timeout=60) != 0
    noticed = run.lines()[-1]["step"]
    assert not (run.output / "export").exists()
    run.ends(run.start(*launcher))
    begun, after_kill, after_notice = run.starts()
    assert (begun, after_kill % SAVE_EVERY, after_notice) == (0, 0, noticed + 1)
    assert run.trained() == undisturbed.trained()
    assert [*run.trained()] == [*range(STEPS)]
    assert run.exported() == undisturbed.exported()


def test_a_full_disk_and_a_notice_in_an_evaluation_lose_no_step(
    place: Path, undisturbed: Run
) -> None:
    run = Run(place, "hard", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY))
    assert run.start(*ON_ONE_NODE, script="hard.py").wait(timeout=120) != 0
    assert "not saved, the checkpoint before counts: No space left" in run.printed.read_text()
    assert [line["step"] for line in run.lines()] == [*range(5)]
    assert "held_out_loss" not in run.lines()[-1]
    run.ends(run.start(*ON_ONE_NODE))
    assert run.starts() == [0, 5]
    assert run.exported() == undisturbed.exported()


def test_from_pretrained_reads_what_it_exports(place: Path, undisturbed: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = undisturbed.output / "export"
    model = AutoModelForCausalLM.from_pretrained(export)
    text = (place / "text.txt").read_text()[-2000:]
    tokens = AutoTokenizer.from_pretrained(export)(text, return_tensors="pt").input_ids[:, :32]
    before = AutoModelForCausalLM.from_pretrained(place / "model")
    with torch.no_grad():
        losses = [each(input_ids=tokens, labels=tokens).loss.item() for each in (before, model)]
    assert losses[1] < 0.75 * losses[0]
    assert undisturbed.lines()[-1]["step"] == STEPS - 1


def test_adapters_json_lines_and_a_live_history(place: Path) -> None:
    """With peft and wandb, which are installed here; a rank has a sequence less than the other."""
    pytest.importorskip("wandb", reason="not in an environment made by `make setup`")
    from transformers import AutoModelForCausalLM

    from tests.experiments.tracking import offline

    text = (place / "text.txt").read_text()
    rows = [{"body": text[at : at + 1000]} for at in range(0, len(text), 1000)]
    (place / "text.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run = Run(place, "adapters", "--steps", "9", "--lora-rank", "4", "--global-batch", "5")
    run.options += ("--data", "text.jsonl", "--field", "body", "--wandb", "test")
    run.python, run.path = Path(sys.executable), str(ROOT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        run.ends(run.start(*ON_ONE_NODE))
    (tracked,) = offline.runs(run.output)
    lines = run.lines()
    assert [point["loss"] for point in tracked.history] == [line["loss"] for line in lines]
    for point, line in zip(tracked.history, lines, strict=True):
        assert point["_timestamp"] == pytest.approx(line["time"], abs=1)
    model = AutoModelForCausalLM.from_pretrained(run.output / "export")
    assert sum("lora" in name for name, _ in model.named_parameters()) == 16


class Nodes:
    """Agents of torchrun, a node of one rank each, which meet at the first."""

    def __init__(self, run: Run, nodes: str, script: str = "train.py") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meet = f"127.0.0.1:{free.getsockname()[1]}"
        self.run, self.script = run, script
        self.options = (
            *("--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "100"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", meet, "--rdzv-id", "test"),
            *("--local-addr", "127.0.0.1"),
        )
        self.agents = [self.start(0), self.start(1)]

    def start(self, node: int) -> subprocess.Popen[bytes]:
        settings = f"is_host={int(node == 0)},last_call_timeout=1,keep_alive_interval=1"
        return self.run.start(*self.options, "--rdzv-conf", settings, script=self.script)

    def lose(self, node: int) -> None:
        """Have a node go dark, as far as processes can."""
        pids = [self.agents[node].pid, *workers(self.agents[node])]
        kill(*pids)
        self.agents[node].wait()
        wait_until_ended(pids)


def test_without_a_node_the_rest_train_the_same_global_batch(place: Path, undisturbed: Run) -> None:
    """As a single rank from the same step does, and but for rounding as both ranks do."""
    run = Run(place, "fewer", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY))
    nodes = Nodes(run, "1:2", "keep.py")
    run.wait_for(SAVE_EVERY + 2)
    nodes.lose(1)
    run.ends(nodes.agents[0])
    begun, went_on = run.starts()
    assert (begun, went_on % SAVE_EVERY) == (0, 0)
    assert [line["ranks"] for line in run.lines()][:: len(run.lines()) - 1] == [2, 1]
    single = Run(place, "single", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY))
    shutil.copytree(run.output / "loaded", single.output / "checkpoint")
    single.ends(single.start("--standalone", "--nproc-per-node", "1"))
    assert single.starts() == [went_on]
    expected, actual = single.trained(), run.trained()
    assert {step: actual[step] for step in expected} == expected
    for step, (loss, *_) in undisturbed.trained().items():
        assert actual[step][0] == pytest.approx(loss, rel=0.02), step


LONG, KILLS = 1000, 10


def test_ten_kills(place: Path, request: pytest.FixtureRequest) -> None:
    """Kills of ranks, of a node that another one replaces, of all; and notices to all."""
    if not request.config.getoption("--exhaustive"):
        pytest.skip("trains for minutes: runs with --exhaustive")
    options = ("--steps", str(LONG), "--save-every", "10", "--evaluate-every", "1000")
    calm = Run(place, "calm", *options)
    calm.ends(*Nodes(calm, "2").agents)
    run, draw = Run(place, "tossed", *options), random.Random(0)
    nodes = Nodes(run, "2")
    kinds = ["rank", "node", "all", "notice"] * 2 + draw.sample(["rank", "node", "all"], 2)
    draw.shuffle(kinds)
    for kind in kinds:
        run.wait_for(draw.randrange(1, 40))
        before, begun = len(run.starts()), time.monotonic()
        if kind == "rank":
            kill(draw.choice([pid for agent in nodes.agents for pid in workers(agent)]))
        elif kind == "node":
            nodes.lose(1)
            nodes.agents[1] = nodes.start(1)
        else:
            if kind == "notice":
                for agent in nodes.agents:
                    agent.terminate()
                for agent in nodes.agents:
                    agent.wait(timeout=60)
            else:
                nodes.lose(0)
                nodes.lose(1)
            nodes = Nodes(run, "2")
        done = run.lines()[-1]["step"] + 1
        wait_until(lambda before=before: len(run.starts()) > before, within_s=120)
        seconds, lost = time.monotonic() - begun, done - run.starts()[-1]
        print(f"{kind}: after {seconds:.1f} s from step {run.starts()[-1]}, {lost} steps lost")
        assert 0 <= lost < 20, "an interval, and another one where a save was under way"
        assert kind != "notice" or lost == 0
    run.ends(*nodes.agents)
    assert run.trained() == calm.trained()
    assert run.exported() == calm.exported()
    everybody = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    assert [words for words in everybody if "tossed" in words] == []
