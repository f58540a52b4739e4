"""The Trainer of transformers on a tiny random Llama, over two emulated nodes of one process.

for node in 0 1; do torchrun --nnodes 2 --node-rank $node --nproc-per-node 1 \
    --master-addr 127.0.0.1 --master-port 29500 trainer.py & done; wait
"""

from tempfile import mkdtemp

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fcdp
from fcdp.integrations import hugging_face  # (1)


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    rows = (torch.arange(32) * row % 128 for row in range(64))
    data = [{"input_ids": row, "labels": row} for row in rows]

    hugging_face.use(fcdp.Topology.from_env(), policy="host")  # (2) before the Trainer is made
    trainer = Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            output_dir=mkdtemp(),
            use_cpu=not torch.accelerator.is_available(),
            fsdp=True,  # (3)
            fsdp_config={"version": 2},  # (4)
            max_steps=5,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
        ),
        train_dataset=data,
    )
    trainer.train()
    print(fcdp.ledger(trainer.model).table())  # (5) what crossed nodes


if __name__ == "__main__":
    main()
