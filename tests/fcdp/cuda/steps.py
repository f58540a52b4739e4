"""One step of a model of a billion parameters, its seconds and its trace."""

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

import fcdp
from tests.fcdp.cuda.alone import DEVICE, ON_GPU, shard

#: 1.1 billion parameters, where it is to say something.
LAYERS, WIDTH, TOKENS, MICRO_BATCH, ROUNDS = (
    (20, 2048, 1024, 16, 10) if ON_GPU else (2, 64, 16, 1, 2)
)
LOOK_AHEAD = 2
MOST_TRACE_BYTES = 2**20
#: Kinds of events that a trace is written without, most of its bytes: what the host called.
_OF_HOST = {"cpu_op", "cuda_runtime", "cuda_driver", "ac2g", "fwdbwd"}


class Step:
    """Forward and backward, and the optimizer's step at a learning rate.

    At a rate of zero there is none, so that what is cached stays fresh.
    """

    def __init__(
        self, topology: fcdp.Topology, engine: str, rate: float = 0.0, **codecs: Any
    ) -> None:
        config = GPT2Config(
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=max(1, WIDTH // 128),
            n_positions=TOKENS,
            vocab_size=50304,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )
        with DEVICE:  # made there: on the host it would take most of a minute
            self.model: Any = GPT2LMHeadModel(config)
            self._tokens = torch.randint(50257, (MICRO_BATCH, TOKENS))
        shard(self.model, self.model.transformer.h, topology, engine, LOOK_AHEAD, **codecs)
        self._optimizer = (
            torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True) if rate else None
        )

    def backward(self) -> None:
        """Forward and backward of a micro-batch, whose gradients stay."""
        self.model(input_ids=self._tokens, labels=self._tokens, use_cache=False).loss.backward()

    def __call__(self) -> None:
        self.backward()
        if self._optimizer is not None:
            self._optimizer.step()
        self.model.zero_grad()


def seconds_of(call: Callable[[], object]) -> float:
    synchronize = torch.cuda.synchronize if ON_GPU else lambda: None
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - started


def write_trace(step: Step, file: Path) -> None:
    """The device's events and ranges, no time in the header: it names nothing of this machine."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    for _ in range(2):  # the first sets the profiler up while the step waits
        with profile(activities=activities) as profiler:
            seconds_of(step)
    whole = file.with_name("whole.json")
    profiler.export_chrome_trace(str(whole))
    events = json.loads(whole.read_text(encoding="utf-8"))["traceEvents"]
    whole.unlink()
    shown = [event for event in events if event.get("cat") not in _OF_HOST]
    text = json.dumps({"traceEvents": shown}, separators=(",", ":"))
    file.write_bytes(gzip.compress(text.encode("utf-8"), mtime=0))
