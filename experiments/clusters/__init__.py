"""Where a cell runs. Each kind of cluster is one module behind the interface below."""
