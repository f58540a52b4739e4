"""What every rank of a cell runs: its model, its data, its training."""

#: In a cell's directory: where rank 0 writes a line for each step, and the ranks' last checkpoint.
PROGRESS = "progress.jsonl"
CHECKPOINT = "checkpoint"
#: The file of a checkpoint that is replaced when it is complete: ``COMMIT`` of
#: ``fcdp.checkpoint.commit``, which imports torch, and so is not for the parent.
COMMIT = "state.pt"
