"""Strategies over this library: its own, and others that are settings of it."""
