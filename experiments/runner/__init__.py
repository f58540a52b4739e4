"""Runs cells one after another, and keeps their records."""
