"""LuWu: model-in-network training. Workers keep no model; a server has it, a switch stands between.

*Workers* compute. They pull a layer's parameters when they need them, twice per step, push its
gradients, and hold two layers at most. The *switch* sums the workers' gradients into one stream,
multicasts the parameters, and merges acknowledgements; it stands for the paper's network cards and
programmable switch, in one process, and has no state but what is in flight. The *server* has fp32
masters and moments in files, steps AdamW while the workers' backward goes on, and sends the next
layers without being asked for each.
"""

# Bounds of a run's memory. The simulator reads them, without torch.

#: Chunks of parameters, and of gradients, that may be under way before one is acknowledged: what
#: bounds every buffer on the way.
WINDOW = 16
#: Layers with memory on a worker.
LAYERS = 2
