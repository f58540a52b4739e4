"""Where and what to run: models, clusters, matrices, the worker, the records."""
