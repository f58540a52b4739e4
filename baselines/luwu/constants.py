"""What bounds a run's memory; the simulator reads it without torch."""

#: Chunks of parameters, and of gradients, that may be under way before one is acknowledged: what
#: bounds every buffer on the way.
WINDOW = 16
#: Layers with memory on a worker.
LAYERS = 2
