"""Tables and pages: of one run, and of all that this repository commits."""
