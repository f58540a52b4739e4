"""The papers' claims, how each is computed from records, and what the records say."""
