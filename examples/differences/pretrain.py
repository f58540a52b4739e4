"""Trains the small model of matrix.yaml for a while, for differences as fine-tuning makes them.

python -m examples.differences.pretrain

Writes config.json and model.safetensors into the folder ``weights`` beside this file. Takes a
minute or two on one core; the same machine makes the same weights each time.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from baselines.strategy import causal_loss
from experiments.worker import workloads

WEIGHTS = Path(__file__).resolve().parent / "weights"
STEPS = 300
SEQUENCES, LENGTH = 8, 128


def pretrain(steps: int = STEPS, width: int = 256) -> GPT2LMHeadModel:
    """Train on the standard library's sources, bytes as tokens, with AdamW at 1e-3."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=width,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = workloads.micro_batches(
        workloads.corpus(), rank=0, seed=1, sequences=SEQUENCES, sequence_length=LENGTH
    )
    for step in range(steps):
        loss = causal_loss(model, next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step + 1:3d} of {steps}: loss {loss.item():.3f}", flush=True)
    return model


if __name__ == "__main__":
    pretrain().save_pretrained(WEIGHTS)
    print(f"wrote {WEIGHTS}")
