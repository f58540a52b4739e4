"""A mixture of experts: adapters on attention, so that experts cross nodes once; a tiny Qwen3-MoE.

for node in 0 1; do torchrun --nnodes 2 --node-rank $node --nproc-per-node 1 \
    --master-addr 127.0.0.1 --master-port 29500 moe.py & done; wait

It needs fcdp, accelerate, peft and transformers. A folder after ``moe.py`` is a model of your own.
"""

import sys
from tempfile import mkdtemp

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import fcdp


def random_base() -> str:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=2,
    )
    folder = mkdtemp()
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def main(folder: str) -> None:
    topology = fcdp.Topology.from_env()
    device = topology.mesh.device_type
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=device)
    torch.manual_seed(1)  # the same adapters on every rank
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(base, LoraConfig(r=8, target_modules=attention))
    fcdp.shard(model, topology)  # after the adapters are there, before the optimizer

    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    generator = torch.Generator().manual_seed(topology.rank)
    for step in range(5):
        fcdp.ledger(model).reset()
        rows = torch.randint(1000, (2, 64), generator=generator).to(device)
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sent = fcdp.ledger(model).total("inter_node")
        print(f"step {step}: rank {topology.rank} sent {sent:,} bytes between nodes")
    print(fcdp.ledger(model).table())  # of the last step
    fcdp.save_adapters(model, "adapters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else random_base())
