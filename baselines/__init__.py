"""Strategies to compare with: one interface, one file a strategy."""
