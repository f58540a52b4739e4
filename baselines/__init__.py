"""Strategies to compare with: one interface, one file per strategy."""
