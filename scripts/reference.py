"""The site's reference: what stands in it, and what its examples start from."""

from __future__ import annotations

import ast
from pathlib import Path

_LIBRARY = Path(__file__).resolve().parent.parent / "fcdp" / "public.py"

#: What the examples in docstrings of the library start from.
SETTING = """\
import torch
import fcdp

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

topology = fcdp.Topology.build(nodes=2, ranks_per_node=1)
model = fcdp.shard(Net(), topology)
optimizer = torch.optim.AdamW(model.parameters())
"""

#: The reference's parts, in the order in which they are needed.
_PARTS = {
    "Set-up": ("shard", "cache_parameters", "is_cached", "Topology"),
    "Training": ("accumulate", "discard", "invalidate", "ledger", "Ledger"),
    "Checkpoints and exports": ("save", "load", "save_adapters", "export"),
    "Policies": (
        "HostCache", "DeviceCache", "DiskCache", "NoCache", "Threshold", "Budget", "Auto",
        "CachePolicy",
    ),
    "Codecs": ("Delta", "BlockInt8", "BlockInt4", "Codec"),
}  # fmt: skip


_OPENING = f"""What `fcdp` has, from its docstrings. [The API](api.md) is an overview.

A test runs the examples on two ranks, each a node of its own, after

```python
{SETTING}```

with `directory` an empty folder that both see."""


def page() -> str:
    """Markdown: a heading per part, and mkdocstrings' directive for each public name."""
    named = [name for names in _PARTS.values() for name in names]
    if sorted(named) != sorted(_public()):
        raise ValueError(f"the reference has {sorted(named)}; fcdp has {sorted(_public())}")
    of = _public()
    parts = [
        f"## {part}\n\n" + "\n\n".join(_directive(f"{of[name]}.{name}") for name in names)
        for part, names in _PARTS.items()
    ]
    return "\n\n".join(["# Reference", _OPENING, *parts]) + "\n"


def _directive(name: str) -> str:
    """A module and a function in it may have one name: its own module's is meant."""
    return f"::: {name}\n    options: {{heading_level: 3}}"


def _public() -> dict[str, str]:
    """The modules of what ``fcdp`` has, read and not imported: a site needs no torch."""
    module = ast.parse(_LIBRARY.read_text(encoding="utf-8"))
    return {
        item.name: str(node.module)
        for node in module.body
        if isinstance(node, ast.ImportFrom)
        for item in node.names
    }
