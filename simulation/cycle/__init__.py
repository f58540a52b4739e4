"""What a cycle's stages are, and what a rank keeps of them."""
