"""DeepSpeed's ZeRO, by its own engine."""
