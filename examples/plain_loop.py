"""A plain training loop: a small GPT on bytes of Python's own sources, with or without LoRA.

torchrun --nproc-per-node 4 examples/plain_loop.py --nodes 2            # emulated nodes
torchrun --nnodes 2 --nproc-per-node 8 ... examples/plain_loop.py       # real ones
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

import fcdp

WIDTH, HEADS, LENGTH = 64, 4, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        heads = self.qkv(F.rms_norm(x, [WIDTH])).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(F.rms_norm(x, [WIDTH]))))


class GPT(nn.Module):
    """The mean loss of each byte but the first, from those before it."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.bytes(tokens[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(F.rms_norm(x, [WIDTH])).mT, tokens[:, 1:])


class LoRA(nn.Module):
    """A frozen layer, and beside it the product of two small matrices that are trained."""

    def __init__(self, layer: Any, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.a = nn.Linear(layer.in_features, rank, bias=False)
        self.b = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) + self.b(self.a(x))


def make_model(layers: int, lora_rank: int) -> nn.Module:
    """A model with equal weights on every rank."""
    torch.manual_seed(0)
    model = GPT(layers)
    if lora_rank:
        model.requires_grad_(False)
        for block in model.blocks:
            for name, layer in [*block.named_children()]:
                setattr(block, name, LoRA(layer, lora_rank))
    return model


def closed_form(model: nn.Module, topology: fcdp.Topology, steps: int) -> int:
    """Bytes that a rank sends to other nodes: what is trained and its gradient at each step."""
    total = 0
    param: Any  # a DTensor
    for param in model.parameters():
        rows = param.shape[param.placements[0].dim]
        shard = param.nbytes // rows * -(-rows // topology.world_size)  # padded to the largest
        total += shard * (2 * steps if param.requires_grad else 1)  # what is frozen, once
    return (topology.nodes - 1) * total


def train(model: nn.Module, topology: fcdp.Topology, options: argparse.Namespace) -> None:
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    sources = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    text = torch.frombuffer(bytearray(sources), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(topology.rank)
    for step in range(options.steps):
        total = torch.zeros((), device=topology.mesh.device_type)
        for micro_batch in range(options.accumulation):
            starts = torch.randint(len(text) - LENGTH, (2, 1), generator=generator)
            tokens = text[starts + torch.arange(LENGTH + 1)].to(total.device, torch.long)
            with fcdp.accumulate(model, last=micro_batch == options.accumulation - 1):
                loss = model(tokens) / options.accumulation
                loss.backward()
            total += loss.detach()
        norm: Any = clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        loss, norm = total / topology.world_size, norm.full_tensor()
        if topology.rank == 0:
            print(f"step {step}: loss {loss:.4f}, gradient norm {norm:.3f}", flush=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, help="emulate so many on this host")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lora-rank", type=int, default=0, help="0: train all parameters")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args(arguments)
    nodes, ranks = options.nodes, int(os.environ["WORLD_SIZE"])
    topology = fcdp.Topology.build(nodes, ranks // nodes) if nodes else fcdp.Topology.from_env()
    model = make_model(options.layers, options.lora_rank).to(topology.mesh.device_type)
    fcdp.shard(model, topology)
    train(model, topology, options)
    sent = fcdp.ledger(model).total("inter_node")
    expected = closed_form(model, topology, options.steps)
    if topology.rank == 0:
        print(fcdp.ledger(model).table())
        print(f"between nodes {sent:,} bytes, by the closed form {expected:,}")
    if sent != expected:
        sys.exit(f"rank {topology.rank} sent {sent} bytes between nodes, not {expected}")


if __name__ == "__main__":
    main(sys.argv[1:])
    dist.destroy_process_group()
