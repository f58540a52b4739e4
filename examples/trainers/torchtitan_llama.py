"""torchtitan's own Trainer on a tiny Llama 3, over two emulated nodes of one process.

for node in 0 1; do torchrun --nnodes 2 --node-rank $node --nproc-per-node 1 \
    --master-addr 127.0.0.1 --master-port 29500 torchtitan_llama.py & done; wait
"""

import json
from pathlib import Path
from tempfile import mkdtemp

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import TrainingConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import Llama3Model, model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel

import fcdp
from fcdp.integrations import torchtitan


def main() -> None:
    folder = Path(mkdtemp())
    words = {f"w{index}": index for index in range(500)} | {"<eos>": 500, "<bos>": 501}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<eos>", "bos_token": "<bos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    text = [" ".join(f"w{(row * 7 + at * 3) % 500}" for at in range(64)) for row in range(200)]
    (folder / "data").mkdir()
    rows = "\n".join(json.dumps({"text": each}) for each in text)
    (folder / "data" / "train.jsonl").write_text(rows)

    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    for layer in config.model_spec.model.layers:  # flex attention has no backward on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    Llama3Model.get_attention_masks = lambda self, positions: None
    config.hf_assets_path = str(folder)
    config.dump_folder = str(folder)
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset_path=str(folder / "data"))
    config.training = TrainingConfig(local_batch_size=2, seq_len=64, steps=4, global_batch_size=8)
    config.optimizer = default_adamw(lr=1e-3)
    config.checkpoint = CheckpointManager.Config(enable=False)
    config.validator = Validator.Config(enable=False)
    config.training.disable_cuda_graphs = True  # (1) a graph would repeat the first step's misses
    torchtitan.use(policy="host")  # (2) before the trainer is built
    trainer = config.build()
    trainer.train()
    ledger = fcdp.ledger(trainer.model_parts[0])
    print(f"{ledger.hits} gathers from the cache, {ledger.misses} across nodes")
    trainer.close()


if __name__ == "__main__":
    main()
