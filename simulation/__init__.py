"""The performance model: what a step takes in time, bytes and memory on any cluster."""
