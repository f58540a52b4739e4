"""Cells on ranks: each one's model, its data, its training."""

#: In a cell's directory: the file with a line for each step, by rank 0, and the last checkpoint.
PROGRESS = "progress.jsonl"
CHECKPOINT = "checkpoint"
