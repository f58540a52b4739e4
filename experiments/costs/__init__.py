"""What a step takes in time, bytes and memory: pure functions, each quantity with its unit."""
