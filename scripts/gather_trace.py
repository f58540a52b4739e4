"""The calls of one gather, from FSDP2's call to the exchange: every function of ``fcdp`` entered.

python -m scripts.gather_trace            print the trace
python -m scripts.gather_trace --write    write docs/gather.txt, which a test compares

The other ranks of two nodes of two are imitated. "device" is the path of accelerators, whose
streams order nothing here; "host" is the path of CPUs. Each gather is one in the middle of a pass.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.nn as nn

import fcdp
from fcdp.engine import Engine, engine_of
from scripts import fake_world

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gather.txt"
#: Files that gathers enter, callers before those that they call: no call goes upward.
ORDER = (
    "all_gather.py",
    "pass_controller.py",
    "cache/cache.py",
    "cache/tiers.py",
    "guard.py",
    "checksum.py",
    "streams.py",
    "exchange.py",
    "failure.py",
    "counts.py",
)
#: How deep a call is among those of ``fcdp``, its file, and its function.
Call = tuple[int, str, str]


@contextlib.contextmanager
def calls() -> Iterator[list[Call]]:
    """Note the functions of ``fcdp`` that the body enters, in the order of their calls."""
    noted: list[Call] = []
    folder = f"{Path(fcdp.__file__).parent}/"
    stack: list[FrameType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if not name.startswith(folder) or "<" in frame.f_code.co_name:  # a comprehension
            return
        if event == "call":
            function: str = frame.f_code.co_qualname  # type: ignore[attr-defined]
            noted.append((len(stack), name.removeprefix(folder), function))
            stack.append(frame)
        elif event == "return":
            stack.pop()

    sys.setprofile(note)
    try:
        yield noted
    finally:
        sys.setprofile(None)


def _gathers(engine: Engine) -> dict[str, Callable[[], list[Call]]]:
    """A miss and a hit of the model's second unit, each as FSDP2 calls for it."""
    topology, unit = engine.topology, engine.units[1]
    gather, _ = engine._collectives[unit]
    size = topology.world_size * unit.shard_numel
    cpu = torch.device("cpu")

    def traced(*, stale: bool) -> list[Call]:
        engine.entries[unit].generation += stale  # as the ranks' agreement does
        with calls() as noted:
            output = gather.allocate((size,), dtype=torch.float32, device=cpu)
            shard = output.view(topology.world_size, -1)[topology.rank]
            work = gather(output, shard, topology.mesh.get_group())
            if work is not None:
                work.wait()
        return noted

    return {"miss": lambda: traced(stale=True), "hit": lambda: traced(stale=False)}


def traces() -> dict[str, list[Call]]:
    """Calls of each kind of gather by its name, such as "device, hit"."""
    found = {}
    for path in ("device", "host"):
        with contextlib.ExitStack() as stack:
            topology = stack.enter_context(fake_world.world(2, 2, "cpu"))
            if path == "device":
                stack.enter_context(mock.patch("fcdp.engine.Streams", fake_world.DeviceStreams))
            model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
            fcdp.shard(model, topology, units=model)
            with torch.no_grad():
                model(torch.ones(1, 8))
                engine = engine_of(model)
                engine.controller.begin_pass()
                kinds = _gathers(engine)
                for kind in kinds.values():  # the first agrees with the other ranks
                    kind()
                found |= {f"{path}, {name}": kind() for name, kind in kinds.items()}
    return found


def page() -> str:
    lines = [__doc__.splitlines()[0], ""]
    for name, noted in traces().items():
        files = {file for _, file, _ in noted}
        lines += [f"{name}: {len(noted)} calls in {len(files)} files", ""]
        lines += [f"{'  ' * (depth + 1)}{file}: {function}" for depth, file, function in noted]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page())


if __name__ == "__main__":
    main()
