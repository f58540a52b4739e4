"""Cyclic Data Parallelism (arXiv 2403.08837): micro-batches that start two slots apart.

A stage's parameters may then be one step old where a micro-batch comes to it, which the update
rules v1 and v2 allow.
"""
