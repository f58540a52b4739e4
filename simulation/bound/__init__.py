"""The bound that memory and bandwidth set to FSDP's utilisation, at the paper's model sizes."""
