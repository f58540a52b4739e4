"""Device memory at paper scale: one rank's real training step, on a device that is imitated."""
