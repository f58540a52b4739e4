"""Records in: one table of them, what claims ask of them, and where they come from."""
