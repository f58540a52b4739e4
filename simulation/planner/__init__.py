"""Planner: which strategy fits on a cluster that nobody has rented, how fast it is, its cost."""
