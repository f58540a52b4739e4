"""torchtitan's own Trainer on a tiny Llama 3, over two emulated nodes of one process.

for node in 0 1; do torchrun --nnodes 2 --node-rank $node --nproc-per-node 1 \
    --master-addr 127.0.0.1 --master-port 29500 torchtitan_llama.py & done; wait
"""

import json
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.validate import Validator
from torchtitan.config import TrainingConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import Llama3Model, model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel

import fcdp
from fcdp.integrations import torchtitan  # (1)


def configuration() -> Any:
    folder = Path(mkdtemp())
    words = {f"w{index}": index for index in range(500)} | {"<eos>": 500, "<bos>": 501}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>", "bos_token": "<bos>"}')
    rows = (" ".join(f"w{(row * 7 + at * 3) % 500}" for at in range(64)) for row in range(200))
    (folder / "data").mkdir()
    data = "\n".join(json.dumps({"text": row}) for row in rows)
    (folder / "data" / "train.jsonl").write_text(data)
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    for layer in config.model_spec.model.layers:  # flex attention has no backward on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    Llama3Model.get_attention_masks = lambda self, positions: None
    config.hf_assets_path = config.dump_folder = str(folder)
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset_path=str(folder / "data"))
    config.training = TrainingConfig(local_batch_size=2, seq_len=64, steps=4, global_batch_size=8)
    config.checkpoint = CheckpointManager.Config(enable=False)
    config.validator = Validator.Config(enable=False)
    config.training.disable_cuda_graphs = True  # (2) a graph would repeat the first step's misses
    return config


def main() -> None:
    torchtitan.use(policy="host")  # (3) before the trainer is built
    trainer = configuration().build()
    trainer.train()
    print(fcdp.ledger(trainer.model_parts[0]).table())  # (4) what crossed nodes


if __name__ == "__main__":
    main()
