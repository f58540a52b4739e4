"""Other people's trainers with FCDP: each file runs from the wheel and its client alone."""
