"""One training step, simulated event by event."""
