"""``python -m experiments strategies``: lists the strategies, and which of them run here."""

from baselines import pins, registry
from experiments import terminal
from experiments.records.allowed import why_not_installed


def strategies() -> None:
    """List the strategies: engine, versions, and why one cannot run on this machine.

    DeepSpeed has two pins; a cell of a matrix chooses with `deepspeed: current` or `paper`.
    """
    table = terminal.table(["strategy", "engine", "version", "what it is", "here"])
    for entry in registry.STRATEGIES:
        # One more line for each other version of its engine.
        for pin in pins.PINS if entry.engine == "deepspeed" else pins.PINS[:1]:
            reason = why_not_installed(entry, pin, cuda=registry.has_cuda())
            version = entry.engine_version(pin) or "–"
            name, what = (entry.name, entry.what) if pin == "current" else ("", f"the {pin}'s pin")
            table.add_row(name, entry.engine, version, what, reason or "runs")
    terminal.console().print(table)
