"""TRL's GRPOTrainer with LoRA on a tiny random Llama, over two emulated nodes of one process.

for node in 0 1; do torchrun --nnodes 2 --node-rank $node --nproc-per-node 1 \
    --master-addr 127.0.0.1 --master-port 29500 grpo.py & done; wait
"""

from tempfile import mkdtemp

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import fcdp
from fcdp.integrations import hugging_face  # (1)


def main() -> None:
    words = {f"w{index}": index for index in range(100)} | {"<pad>": 100, "<eos>": 101}
    plain = Tokenizer(WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    prompts = [" ".join(f"w{(row + at) % 100}" for at in range(4)) for row in range(64)]

    hugging_face.use(fcdp.Topology.from_env(), policy="host")  # (2) before the trainer is made
    trainer = GRPOTrainer(
        LlamaForCausalLM(config),
        reward_funcs=lambda completions, **_: [float(len({*each.split()})) for each in completions],
        args=GRPOConfig(
            output_dir=mkdtemp(),
            use_cpu=not torch.accelerator.is_available(),
            fsdp=True,  # (3)
            fsdp_config={"version": 2},  # (4)
            max_steps=5,
            num_generations=4,
            max_completion_length=16,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()
    print(fcdp.ledger(trainer.model).table())  # (5) what crossed nodes


if __name__ == "__main__":
    main()
