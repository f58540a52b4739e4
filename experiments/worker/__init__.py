"""What every rank of a cell runs: its model, its data, its training."""
