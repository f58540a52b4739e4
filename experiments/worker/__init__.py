"""Cells on ranks: each one's model, its data, its training."""

#: In a cell's directory: the file with a line for each step, by rank 0, and the last checkpoint.
PROGRESS = "progress.jsonl"
CHECKPOINT = "checkpoint"


def progress(rank: int) -> str:
    """The name of the rank's own file of steps."""
    return f"progress{rank or ''}.jsonl"
