"""Cells on ranks: each one's model, its data, its training."""

#: In a cell's directory: where rank 0 writes a line for each step, and the ranks' last checkpoint.
PROGRESS = "progress.jsonl"
CHECKPOINT = "checkpoint"
