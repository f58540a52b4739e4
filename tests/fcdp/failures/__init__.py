"""Ranks that fail, and the errors of the others of their job."""

#: Far below the groups' time-out, far above what the machine needs under load.
SOON_S = 100.0
