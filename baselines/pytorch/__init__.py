"""What PyTorch ships."""
