"""The cache: one entry per unit, where its bytes lie, and who may read them when."""
