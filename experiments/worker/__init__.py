"""What every rank of a cell runs: its model, its data, its training."""

#: In a cell's directory: where rank 0 writes a line for each step, and the ranks' last checkpoint.
PROGRESS = "progress.jsonl"
CHECKPOINT = "checkpoint"
