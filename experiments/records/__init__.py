"""Cells and the records of their runs: the schema that analysis reads."""
