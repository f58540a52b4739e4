"""Lightning's Trainer on a small model, over two emulated nodes of one process.

for node in 0 1; do torchrun --nnodes 2 --node-rank $node --nproc-per-node 1 \
    --master-addr 127.0.0.1 --master-port 29500 lightning_trainer.py & done; wait
"""

import os
from tempfile import mkdtemp

import lightning
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

import fcdp
from fcdp.integrations.lightning import TrainerStrategy  # (1)


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(128, 64)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(64, 128)

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        logits = self.head(self.body(self.embed(tokens)))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        if self.global_rank == 0:
            print(f"loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    torch.manual_seed(0)
    ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(
        strategy=TrainerStrategy(policy="host"),  # (2)
        devices=ranks_per_node,
        num_nodes=int(os.environ["WORLD_SIZE"]) // ranks_per_node,
        max_steps=5,
        accumulate_grad_batches=2,
        default_root_dir=mkdtemp(),
        logger=False,
        enable_checkpointing=False,
    )
    model = Model()
    trainer.fit(model, DataLoader([torch.arange(32) * row % 128 for row in range(64)], 2))
    print(fcdp.ledger(model).table())  # (3) what crossed nodes


if __name__ == "__main__":
    main()
