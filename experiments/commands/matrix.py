"""``python -m experiments matrix``: begin a matrix file of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from experiments import terminal
from experiments.matrix import reader

_TEMPLATE = """\
name: {name}
description: FCDP's cache policies next to FSDP2, at one and at four micro-batches per step.

cluster:
  kind: emulated # or rented: real nodes; simulated: a cluster that need not exist
  nodes: 2
  ranks_per_node: 2

models:
  # Or {{name: …, config: meta-llama/Llama-3.2-1B}}, or {{name: …, function: package.module:name}}.
  - {{name: gpt2-4x128, family: gpt2, layers: 4, width: 128, heads: 4}}

# All are multiplied; a setting that a strategy does not have does not multiply its cells.
axes:
  strategy: [fsdp2, fcdp]
  policy: [none, host]
  accumulation: [1, 4]

# How often each cell runs, in both orders.
repeats: 1

workload:
  model: gpt2-4x128
  tuning: full # or lora
  inter_bandwidth: 100 Mbit/s # or unshaped
  sequence_length: 128
  micro_batch: 1
  dtype: float32
  lora_rank: 8
  learning_rate: 0.001
  warmup_steps: 1
  steps: 3
  timeout_s: 180
"""


def matrix(
    action: Annotated[Literal["new"], typer.Argument(help="new: write a file to begin with.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where it goes: NAME.yaml.")],
) -> None:
    """Write a matrix file to begin with; `run FILE` runs it as it is.

    Exit status: 0; 2 if it cannot be written, or if there is such a file already.
    """
    assert action == "new", "the one action"
    if file.suffix not in (".yaml", ".yml"):
        terminal.stop(f"FILE = {str(file)!r}: ends in neither .yaml nor .yml")
    with terminal.stopping():
        if file.exists():
            raise ValueError(f"FILE = {str(file)!r}: is there already, and stays as it is")
        terminal.check_writable("FILE", file)
        file.write_text(_TEMPLATE.format(name=file.stem), encoding="utf-8")
    try:
        found = reader.read(str(file.absolute()))
    except ValueError as error:  # a name that no matrix may have
        file.unlink()
        terminal.stop(f"FILE = {str(file)!r}: {error}")
    terminal.say("matrix", file)
    said = f"{len(found.cells)} cells; try: python -m experiments run {file} --dry-run"
    terminal.console().print(said)
