"""Which strategy fits on a cluster that nobody has rented yet, how fast it is, what it costs."""
