"""Matrix files and the cells that they expand to."""
