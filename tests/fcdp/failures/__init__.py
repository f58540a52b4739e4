"""Ranks that fail, and what the others of their job are told."""

#: Far below the groups' time-out, far above what the machine needs under load.
SOON_S = 100.0
