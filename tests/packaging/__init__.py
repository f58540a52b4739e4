"""Tests of what surrounds the code: pins, set-up, image, wheel."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
