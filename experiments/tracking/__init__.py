"""Weights & Biases, fed from the records."""
