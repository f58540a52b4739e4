"""Mutants as a measure of the tests: one small fault at a time is put into ``fcdp/``."""
