"""Figures of the comparison, and what to print under them."""
