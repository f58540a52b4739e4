"""Strategies that PyTorch ships."""
