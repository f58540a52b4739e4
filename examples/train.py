"""Fine-tune a model of Hugging Face on a text, on nodes that may leave and come back.

    torchrun --nproc-per-node 8 train.py --model llama --data text.txt --output run
    torchrun --nnodes 1:4 --max-restarts 100 --rdzv-backend c10d ... train.py ...    # elastic

It needs fcdp, torch, transformers and accelerate; peft for ``--lora-rank``, wandb for ``--wandb``.
Each rank reads its own shards of the model, so that no node's memory has to hold it. ``--output``
is on a file system that all nodes share. Started again with the same one, by torchrun after a lost
rank, by a scheduler or by hand, it goes on from the last checkpoint there.

All that a step depends on (sequences, dropout, learning rate) follows from the seed and the step's
number, so that this number is all that a checkpoint needs beside the model and the optimizer. A
step's gradient is that of ``--global-batch`` sequences, however many ranks there are.
"""

from __future__ import annotations

import argparse
import errno
import functools
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# ruff: noqa: E402
LAUNCHER = os.getppid()  # before the imports, which take long: it may be gone after them

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import clip_grad_norm_
from torch.profiler import profile
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)

import fcdp


def whole(least: int, most: int = 2**31) -> Callable[[str], int]:
    """Reads a whole number in a range."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            must = f"must be a whole number from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r}: {must}")
        return int(text)

    return read


def positive(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0")
    return float(text)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="text, or .jsonl with --field")
    parser.add_argument("--output", type=Path, required=True, help="a folder, shared by all nodes")
    parser.add_argument("--field", default="text", help="of each object in JSON Lines")
    parser.add_argument("--held-out", type=float, default=0.05, help="share kept for evaluation")
    parser.add_argument("--sequence-length", type=whole(2), default=1024)
    parser.add_argument("--global-batch", type=whole(1), default=32, help="sequences per step")
    parser.add_argument("--micro-batch", type=whole(1), default=1, help="sequences a rank and pass")
    parser.add_argument("--epochs", type=whole(1), default=1)
    parser.add_argument("--steps", type=whole(1), help="instead of --epochs")
    parser.add_argument("--lr", type=positive, default=2e-5)
    parser.add_argument("--warm-up", type=whole(0), default=100, help="steps; then half a cosine")
    parser.add_argument("--lora-rank", type=whole(0), default=0, help="0: train all parameters")
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--policy", default="host", help="where gathered parameters are kept")
    parser.add_argument("--save-every", type=whole(1), default=100, help="steps")
    parser.add_argument("--evaluate-every", type=whole(1), default=100, help="steps")
    parser.add_argument(
        "--time-out", type=positive, default=300, help="s until a silent node is lost"
    )
    parser.add_argument("--seed", type=whole(0, 2**27), default=0)
    parser.add_argument("--wandb", metavar="PROJECT", help="log to it; WANDB_MODE=offline works")
    parser.add_argument("--profile", action="store_true", help="write a trace of the third step")
    options = parser.parse_args(arguments)
    options.model = options.model.resolve()  # adapters name it
    if not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: has no config.json; must be a folder with one")
    if not options.data.is_file():
        parser.error(f"--data {options.data}: must be a file of text or JSON Lines")
    if not 0 <= options.held_out < 1:
        parser.error(f"--held-out {options.held_out}: must be from 0 to below 1")
    for asked, library in ((options.lora_rank, "peft"), (options.wandb, "wandb")):
        if asked and find_spec(library) is None:
            parser.error(f"{library} is not installed, which --lora-rank or --wandb needs")
    return options


def check_model(options: argparse.Namespace) -> None:
    """Exit with a line where the model cannot be trained on such sequences."""
    option = f"--model {options.model}"
    try:
        config = AutoConfig.from_pretrained(options.model, local_files_only=True)
    except (OSError, ValueError) as error:
        sys.exit(f"{option}: {str(error).splitlines()[0]}")
    # Tokens of BERT and its kin see those after them too, unless their configuration says so.
    causal = any(getattr(config, a, False) for a in ("is_decoder", "is_encoder_decoder", "causal"))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or (
        type(config) in MODEL_FOR_MASKED_LM_MAPPING and not causal
    ):
        sys.exit(f"{option}: is of type {config.model_type}; must be causal")
    longest = getattr(config, "max_position_embeddings", None) or options.sequence_length
    if options.sequence_length > longest:
        sys.exit(f"--sequence-length {options.sequence_length}: the model allows {longest}")


def join(time_out: timedelta) -> fcdp.Topology:
    """Meet the other ranks that torchrun has started this time."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        sys.exit(  # pytorch/pytorch#135712
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE: must be 1 with --max-restarts; ranks that are "
            "started again would look for those before"
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        dist.init_process_group("gloo", timeout=time_out)
    else:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        backend = dist.get_default_backend_for_device(accelerator)
        dist.init_process_group(f"cpu:gloo,{accelerator.type}:{backend}", timeout=time_out)
    return fcdp.Topology.from_env()


def document(number: int, line: bytes, options: argparse.Namespace) -> str:
    """The text of one line of JSON Lines."""
    try:
        text: str = json.loads(line)[options.field]
        text.encode()  # no half characters
    except Exception as error:
        must = f"must be an object with text in --field {options.field}"
        sys.exit(f"--data {options.data}: line {number}: {type(error).__name__}; {must}")
    return text


def tokenise(options: argparse.Namespace) -> Path:
    """Write the text's tokens, unless an earlier start has; a digest of inputs names the file."""
    text = options.data.read_bytes()
    read = [text, options.field.encode()]
    read += [file.read_bytes() for file in sorted(options.model.glob("tokenizer*"))]
    digest = hashlib.sha256(b"\0".join(read)).hexdigest()
    path: Path = options.output / f"tokens-{digest[:16]}.pt"
    if not path.exists():
        tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
        documents = [text.decode(errors="replace")]
        if options.data.suffix == ".jsonl":
            lines = enumerate(text.splitlines(), 1)
            documents = [document(*line, options) for line in lines if line[1].strip()]
        if not any(documents):
            sys.exit(f"--data {options.data}: has no text")
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        tokens = [t for each in tokenizer(documents)["input_ids"] for t in (*each, *end)]
        if not tokens:
            sys.exit(f"--model {options.model}: has no tokenizer, or one that finds no token")
        draft = path.with_suffix(".new")
        torch.save(torch.tensor(tokens, dtype=torch.int32), draft)
        draft.replace(path)
    return path


def read(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Sequences to train on, held-out ones (the text's last), and the name of their tokens."""
    patient = dist.new_group(backend="gloo", timeout=timedelta(hours=4))
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [tokenise(options)]
        except SystemExit as mistake:  # the others, which wait for its tokens, end with it too
            box = [mistake.code]
    dist.broadcast_object_list(box, group=patient)
    if not isinstance(box[0], Path):
        sys.exit(box[0])
    try:
        tokens = torch.load(box[0], mmap=True)
        windows = tokens[: len(tokens) // options.sequence_length * options.sequence_length]
        windows = windows.view(-1, options.sequence_length)
    except Exception as error:
        # EINVAL is torch's error for a cut file; others may pass, as the file comes later.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        sys.exit(f"{box[0]}: is damaged; remove it, and it is made anew")
    held_out = math.ceil(len(windows) * options.held_out)
    if len(windows) - held_out < options.global_batch:
        sys.exit(
            f"--data {options.data}: has {len(windows) - held_out} sequences to train on; "
            f"must have as many as --global-batch, {options.global_batch}"
        )
    return windows[: len(windows) - held_out], windows[len(windows) - held_out :], box[0].stem


def build(options: argparse.Namespace, topology: fcdp.Topology) -> Any:
    """The sharded model: trained parameters in float32, computed with and sent in ``--precision``.

    Until its shards are read, what is not an adapter has no memory.
    """
    computed = getattr(torch, options.precision)
    config = AutoConfig.from_pretrained(options.model, local_files_only=True)
    dtype = computed if options.lora_rank else torch.float32
    with init_empty_weights():  # of parameters: buffers have what the configuration says
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    if (options.model / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(options.model)
    if options.lora_rank:
        model = with_adapters(model, options)
    mixed = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=computed)
    try:
        fcdp.shard(model.train(), topology, policy=options.policy, mp_policy=mixed)
        fcdp.load_pretrained(model, options.model)
    except ValueError as error:
        sys.exit(str(error))
    return model


def with_adapters(model: Any, options: argparse.Namespace) -> Any:
    from peft import LoraConfig, get_peft_model  # not needed without adapters
    from peft.tuners.lora import LoraLayer

    lora = LoraConfig(r=options.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    torch.manual_seed(options.seed)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):  # PEFT puts adapters where the layer's weights are
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_lora_parameters("default", True)
    return model


@functools.lru_cache(1)
def order(epoch: int, count: int, seed: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed + 7919 * epoch))


def chosen(step: int, count: int, options: argparse.Namespace) -> torch.Tensor:
    """Numbers of the step's sequences: its part of the epoch's order."""
    epoch, place = divmod(step, count // options.global_batch)
    start = place * options.global_batch
    return order(epoch, count, options.seed)[start : start + options.global_batch]


def share(
    rows: torch.Tensor, topology: fcdp.Topology, size: int
) -> list[tuple[torch.Tensor, float]]:
    """This rank's micro-batches of ``rows``, as many as on any rank, and the weight of each.

    FSDP2 takes the mean of the ranks' gradients, so that weights are relative to the mean rank's
    share. A rank that has no rows left computes one of weight 0.
    """
    mine = rows[topology.rank :: topology.world_size]
    passes = math.ceil(len(rows) / (topology.world_size * size))
    parts = [mine[at * size : (at + 1) * size] for at in range(passes)]
    mean = len(rows) / topology.world_size
    return [(part, len(part) / mean) if len(part) else (rows[:1], 0.0) for part in parts]


def rate(step: int, steps: int, options: argparse.Namespace) -> float:
    """Learning rate: grows over the warm-up, then falls by half a cosine."""
    if step < options.warm_up:
        return float(options.lr * (step + 1) / options.warm_up)
    done = (step - options.warm_up) / max(1, steps - options.warm_up)
    return float(options.lr * (1 + math.cos(math.pi * done)) / 2)


@torch.no_grad()
def evaluate(
    model: Any,
    data: torch.Tensor,
    topology: fcdp.Topology,
    options: argparse.Namespace,
    leaving: threading.Event,
) -> float | None:
    """The mean loss of the held-out sequences; ``None`` where a rank is to leave meanwhile."""
    device = topology.mesh.device_type
    sums = torch.zeros(2, device=device)
    model.eval()
    for rows, weight in share(torch.arange(len(data)), topology, options.micro_batch):
        tokens = data[rows].long().to(device)
        sums[0] += model(input_ids=tokens, labels=tokens, use_cache=False).loss * weight
        sums[1] = leaving.is_set()
        dist.all_reduce(sums[1])
        if sums[1]:
            break
    model.train()
    dist.all_reduce(sums[0])
    return None if sums[1] else sums[0].item() / topology.world_size


def load(
    model: Any, optimizer: torch.optim.Optimizer, checkpoint: Path, fixed: dict[str, Any]
) -> dict[str, Any]:
    """Read a checkpoint of a run with the same ``fixed``; return what it holds beside the model.

    Raises where it cannot be read: a restart may read it, once a late file system has it.
    """
    saved: Any = fcdp.load(model, optimizer, checkpoint)
    if not isinstance(saved, dict) or not saved.keys() >= {*fixed, "step", "run"}:
        sys.exit(f"{checkpoint}: is another program's; must be of this, or --output another folder")
    for key, value in fixed.items():
        if saved[key] != value:
            sys.exit(
                f"{checkpoint}: was trained with {key} = {saved[key]!r}; must be the same, not "
                f"{value!r}, or --output another folder"
            )
    return saved


def train(options: argparse.Namespace, leaving: threading.Event) -> None:
    topology = join(timedelta(seconds=options.time_out))
    device, first = topology.mesh.device_type, topology.rank == 0
    data, held_out, name = read(options)
    model = build(options, topology)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    steps = options.steps or options.epochs * (len(data) // options.global_batch)
    checkpoint: Path = options.output / "checkpoint"
    fixed = {key: getattr(options, key) for key in ("seed", "sequence_length", "global_batch")}
    fixed |= {"data": name, "sequences": len(data)}

    # Rank 0 looks: others' view of a shared file system may be older.
    there: list[Any] = [(checkpoint / "state.pt").exists()]
    dist.broadcast_object_list(there)
    start, saved = 0, {**fixed, "run": f"{time.time_ns():x}"}
    if there[0]:
        saved = load(model, optimizer, checkpoint, fixed)
        start = saved.pop("step")
    log, run = None, None
    if first:
        print(f"from step {start} of {steps}, on {topology}", flush=True)
        log = (options.output / "log.jsonl").open("a", encoding="utf-8")
        if options.wandb:
            import wandb  # not needed without

            run = wandb.init(
                project=options.wandb, id=saved["run"], resume="allow", dir=options.output,
                config={key: str(value) for key, value in vars(options).items()},
            )  # fmt: skip

    def save(step: int, *, asynchronous: bool) -> Any:
        return fcdp.save(
            model, optimizer, checkpoint, extra={**saved, "step": step}, asynchronous=asynchronous
        )

    def written(saving: Any) -> None:
        """Wait for a save; where the disk was full, say so, and train on until the next one."""
        try:
            saving.result()
        except RuntimeError as error:
            if first:
                print(f"not saved, the checkpoint before counts: {error}", flush=True)

    saving = None
    for step in range(start, steps):
        begin = time.perf_counter()
        tracing = options.profile and step == start + 2
        torch.manual_seed((options.seed * 1_000_003 + step) * 65_537 + topology.rank)
        optimizer.param_groups[0]["lr"] = rate(step, steps, options)
        # The loss, and how many ranks are to leave: by a notice, or as their launcher has ended.
        sums = torch.zeros(2, device=device)
        with profile() if tracing else nullcontext() as tracer:
            parts = share(chosen(step, len(data), options), topology, options.micro_batch)
            for at, (rows, weight) in enumerate(parts, 1):
                tokens = data[rows].long().to(device)
                with fcdp.accumulate(model, last=at == len(parts)):
                    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss * weight
                    loss.backward()
                sums[0] += loss.detach()
            norm: Any = clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            sums[1] = leaving.is_set() or os.getppid() != LAUNCHER
            dist.all_reduce(sums)
            total, leave = sums.tolist()
        if tracer is not None:
            tracer.export_chrome_trace(str(options.output / f"trace-{topology.rank}.json"))

        if not leave and (step + 1) % options.save_every == 0 and step + 1 < steps:
            if saving is not None:
                written(saving)
            saving = save(step + 1, asynchronous=True)
        metrics = {"loss": total / topology.world_size, "norm": norm.full_tensor().item()}
        metrics |= {"lr": optimizer.param_groups[0]["lr"], "seconds": time.perf_counter() - begin}
        if not leave and len(held_out) and (step + 1) % options.evaluate_every == 0:
            held_out_loss = evaluate(model, held_out, topology, options, leaving)
            leave = held_out_loss is None
            metrics |= {} if held_out_loss is None else {"held_out_loss": held_out_loss}
        if first:
            assert log is not None
            line = {"step": step, "ranks": topology.world_size, "time": time.time(), **metrics}
            print(json.dumps(line), file=log, flush=True)
            print(", ".join(f"{key} {value:.6g}" for key, value in line.items()), flush=True)
            if run is not None:
                run.log(metrics, step=step)
        if leave:
            if saving is not None:
                written(saving)
            save(step + 1, asynchronous=False)
            # Ranks of nodes that stay end as well, and their torchrun starts them again, fewer.
            sys.exit(128 + signal.SIGTERM)

    if saving is not None:
        written(saving)
    if start < steps:
        save(steps, asynchronous=False)
    if options.lora_rank:
        fcdp.save_adapters(model, options.output / "export")
    else:
        fcdp.export(model, options.output / "export")
    if first:
        tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
        tokenizer.save_pretrained(options.output / "export")
        print(fcdp.ledger(model).table())
    if run is not None:
        run.finish()


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    check_model(options)
    try:
        (options.output / "checkpoint").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--output {error.filename}: {error.strerror}; must be a folder, or none yet")
    leaving = threading.Event()
    # From torchrun that stops its ranks, Slurm (--signal=TERM@120), a spot node's last minutes.
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())
    train(options, leaving)
    dist.destroy_process_group()


def give_up() -> None:
    """End this node's torchrun: ranks that it started again would make the same mistake again.

    One rank after the other tries, since a second signal breaks off what it does at the first.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(2 * int(os.environ["LOCAL_RANK"]))
    if os.getppid() == LAUNCHER:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(LAUNCHER, signal.SIGTERM)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SystemExit as end:
        mistake = isinstance(end.code, str) or end.code == 2  # argparse's
        if mistake and "TORCHELASTIC_RUN_ID" in os.environ:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr, flush=True)
            give_up()
            sys.exit(2)
        raise
