"""What the host cache costs a step on one GPU, where nothing has to cross a network.

    python -m scripts.gpu_overlap --out results/gpu

Everything is real but the other rank: torch's ``fake`` process group imitates a second node and
sends nothing, so that a step with ``NoCache`` is compute alone and a step with ``HostCache`` is
compute plus the copies from page-locked host memory. Weights do not change between the steps, so
every gather after the first is served from host memory. Writes ``overlap.json`` (both steps'
seconds, the bandwidth of the tier's copies beside a plain page-locked copy, the share of the
copies' time that lies under kernels) and the ``trace.json`` of one step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2Config, GPT2LMHeadModel

import fcdp
from experiments import provenance

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("gpu_overlap: needs a CUDA device")
    options.out.mkdir(parents=True, exist_ok=True)
    with one_of_two_nodes() as topology:
        record = measure(topology, options)
    text = json.dumps(record, indent=1)
    (options.out / "overlap.json").write_text(text + "\n", encoding="utf-8")
    print(text)


@contextmanager
def one_of_two_nodes() -> Iterator[fcdp.Topology]:
    """A world of two ranks of which this is one, and whose decisions are this one's."""
    torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

    def alone(flags: list[bool], _: fcdp.Topology) -> list[bool]:
        return list(flags)

    with (
        mock.patch("fcdp.engine.any_rank", alone),
        mock.patch("fcdp.staleness.any_rank", alone),
        mock.patch("fcdp.gather.swap", return_value=[]),
        mock.patch("torch.distributed.new_group"),  # for decisions, over gloo
    ):
        yield fcdp.Topology.build(2, 1, "cuda")
    dist.destroy_process_group()


def measure(topology: fcdp.Topology, options: argparse.Namespace) -> dict[str, Any]:
    none = seconds(step_of(topology, options, fcdp.NoCache()), options.steps)
    torch.cuda.empty_cache()
    step = step_of(topology, options, fcdp.HostCache())
    host = seconds(step, options.steps)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(options.out / "trace.json"))
    copied, seconds_copying, hidden = copies_under_kernels(options.out / "trace.json")
    plain = plain_bandwidth(1 << 28)
    return {
        "evidence": "measured on one GPU; the other node and the network are imitated",
        "device": torch.cuda.get_device_name(),
        "parameters": GPT2LMHeadModel(config_of(options)).num_parameters(),
        "none_seconds": none,
        "host_seconds": host,
        "host_over_none": statistics.median(host) / statistics.median(none),
        "copied_bytes": copied,
        "tier_bytes_per_s": copied / seconds_copying,
        "plain_copy_bytes_per_s": plain,
        "tier_over_plain": copied / seconds_copying / plain,
        "copy_time_under_kernels": hidden,
        "settings": {k: v for k, v in vars(options).items() if k != "out"},
        "provenance": asdict(provenance.gather()),
    }


def config_of(options: argparse.Namespace) -> GPT2Config:
    return GPT2Config(
        n_embd=options.width,
        n_layer=options.layers,
        n_head=options.width // 128,
        n_positions=options.tokens,
        vocab_size=50304,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def step_of(
    topology: fcdp.Topology, options: argparse.Namespace, policy: fcdp.CachePolicy
) -> Callable[[], None]:
    """Forward and backward; no optimizer step, so that what is cached stays fresh."""
    model: Any = GPT2LMHeadModel(config_of(options)).to("cuda")
    fcdp.shard(
        model, topology, units=model.transformer.h, policy=policy, mp_policy=BF16, look_ahead=2
    )
    tokens = torch.zeros(options.micro_batch, options.tokens, dtype=torch.int64, device="cuda")

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        model.zero_grad()

    return step


def seconds(step: Callable[[], None], steps: int) -> list[float]:
    for _ in range(3):
        step()
    times = []
    for _ in range(steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return times


def plain_bandwidth(nbytes: int) -> float:
    """Bytes a second of one large copy from page-locked memory, the best of ten."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    times = seconds(lambda: target.copy_(source, non_blocking=True) and None, 10)
    return nbytes / min(times)


def copies_under_kernels(trace: Path) -> tuple[int, float, float]:
    """Bytes and seconds of host-to-device copies of a trace, and the share under kernels."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"]]
    copies = [e for e in copies if "Pinned" in e["name"]]
    kernels = merged([(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"])
    total = sum(e["dur"] for e in copies)
    hidden = sum(
        max(0.0, min(end, e["ts"] + e["dur"]) - max(begin, e["ts"]))
        for e in copies
        for begin, end in kernels
    )
    assert total, "the trace has no copy from page-locked memory"
    return sum(int(e["args"]["bytes"]) for e in copies), total / 1e6, hidden / total


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of ``spans``, as spans that do not overlap."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


if __name__ == "__main__":
    main(sys.argv[1:])
