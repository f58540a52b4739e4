"""Measures a cluster's links, copies and compute, and says whether FCDP will help there."""
