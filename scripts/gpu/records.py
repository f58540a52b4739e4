"""What a part found, as it is committed: checks with a verdict each, key figures, details."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from experiments.records import provenance

#: ``not measured``: this device or this Python cannot; the detail says why.
Verdict = Literal["passed", "failed", "not measured"]
DeviceType = Literal["cuda", "cpu"]

T = TypeVar("T")

NOT_ON_CPU = "not measured on the CPU"
_NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,memory.total",
    "--format=csv,noheader",
)


@dataclass(frozen=True)
class Brief:
    """What is asked of every part."""

    #: Where the records go; what they need meanwhile goes to ``scratch``.
    out: Path
    scratch: Path
    device: DeviceType
    #: Sizes at which a part shows that it runs, not how fast.
    small: bool


@dataclass(frozen=True)
class Check:
    name: str
    verdict: Verdict
    detail: str = ""


@dataclass
class Record:
    """One part's record, filled while the part runs."""

    part: str
    checks: list[Check] = field(default_factory=list)
    #: For the table at the end.
    figures: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def passed_if(self, condition: bool, name: str, detail: str = "") -> None:
        self.checks.append(Check(name, "passed" if condition else "failed", detail))

    def failed(self, name: str, detail: str) -> None:
        self.checks.append(Check(name, "failed", provenance.scrub(detail)))

    def not_measured(self, name: str, why: str) -> None:
        self.checks.append(Check(name, "not measured", provenance.scrub(why)))

    @property
    def verdict(self) -> Verdict:
        """Failed if one check is; passed if one is and none failed."""
        found = {check.verdict for check in self.checks}
        for verdict in ("failed", "passed"):
            if verdict in found:
                return verdict
        return "not measured"

    def as_json(self, device: DeviceType) -> dict[str, Any]:
        return {
            "part": self.part,
            "evidence": "measured",
            "device": device,
            "verdict": self.verdict,
            "seconds": round(self.seconds, 1),
            "figures": self.figures,
            "checks": [asdict(check) for check in self.checks],
            "details": self.details,
        }


class Deadline:
    """Seconds that are left of a limit."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


def shared(shares: Mapping[T, float], limit_s: float) -> Iterator[tuple[T, float]]:
    """Each in turn, with its seconds of the limit; what one does not use, those behind it have."""
    deadline, left = Deadline(limit_s), sum(shares.values())
    for name, share in shares.items():
        yield name, deadline.left() * share / left
        left -= share


def write(file: Path, content: dict[str, Any]) -> None:
    text = json.dumps(_finite(content), indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """JSON has no infinities; a loss that is none of its numbers is written as a word."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def origin(device: DeviceType, commit: str | None) -> dict[str, Any]:
    """Commit, versions and hardware; ``commit`` where the tree came without its repository."""
    found = provenance.gather()
    versions = dict(found.versions)
    hardware = dict(found.hardware)
    if device == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        hardware |= _gpu()
    return {"commit": found.commit or commit, "versions": versions, "hardware": hardware}


def _gpu() -> dict[str, str]:
    """Without a CUDA context in this process."""
    try:
        done = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return {"gpu": torch.cuda.get_device_name(0)}
    name, driver, memory = (part.strip() for part in done.stdout.splitlines()[0].split(","))
    return {"gpu": name, "driver": driver, "gpu_memory": memory}


def table(records: Sequence[Record]) -> str:
    """Part, verdict, seconds and key figures, a line each; below each what did not pass."""
    lines = []
    for record in records:
        figures = ", ".join(f"{name} {_short(value)}" for name, value in record.figures.items())
        lines.append(
            f"{record.part:<12} {record.verdict:<13} {record.seconds:>5.0f} s  {figures}".rstrip()
        )
        for check in record.checks:
            if check.verdict != "passed":
                first = check.detail.strip().splitlines()[:1]
                lines.append(f"    {check.verdict}: {check.name}: {''.join(first)[:160]}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
