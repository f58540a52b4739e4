"""Lossless differences: what a node lacks of a shard of which it holds an earlier version."""
