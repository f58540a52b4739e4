"""How fast GPUs compute, fitted to published measurements and checked on those left out."""
