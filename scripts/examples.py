"""What the examples in docstrings of the library start from."""

SETTING = """\
import torch
import fcdp

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

topology = fcdp.Topology.build(nodes=2, ranks_per_node=1)
model = fcdp.shard(Net(), topology)
optimizer = torch.optim.AdamW(model.parameters())
"""
