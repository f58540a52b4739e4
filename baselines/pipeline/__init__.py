"""A pipeline across nodes, FSDP2 inside of each: what crosses is activations, not parameters."""
