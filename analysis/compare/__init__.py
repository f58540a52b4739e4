"""Cells beside what they are compared with: a baseline, a closed form, a prediction."""
