"""Measures a cluster's links, copies and compute, as the planner and the simulator need them."""
