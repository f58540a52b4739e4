"""Short programs that show FCDP in other people's training loops."""
