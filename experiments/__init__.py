"""The testbed: matrices of cells, the clusters that they run on, their records, the commands."""
