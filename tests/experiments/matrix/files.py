"""Matrix files that tests change and read."""

from pathlib import Path
from typing import Any

from experiments.matrix import reader
from experiments.matrix.reader import Matrix

FILE = Path(__file__).with_name("example.yaml").read_text(encoding="utf-8")
LLAMA = "name: llama-b, family: llama, layers: 2, width: 16, heads: 2"
TUNING = "  tuning: full"
LENGTH = "  sequence_length: 16\n"
GPT2 = "name: gpt2-a, family: gpt2, layers: 2, width: 16, heads: 2"
IMAGES = (
    FILE.replace(GPT2, "name: cnn, family: convolutional, layers: 2, width: 4")
    .replace(LLAMA, "name: resnet, family: resnet, layers: 18")
    .replace("[gpt2-a, llama-b]", "[cnn, resnet]")
    .replace(LENGTH, "  data: {images: digits}\n")
)
SIMULATED = FILE.replace(
    "cluster: {nodes: 2, ranks_per_node: 2}",
    "cluster: {kind: simulated, nodes: 2, ranks_per_node: 2, gpu: a40}",
).replace("float32", "bfloat16")
FILES = {"text": FILE, "images": IMAGES, "simulated": SIMULATED}


def written(directory: Path, text: str = FILE) -> str:
    file = directory / "example.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def read(folder: Path, *changes: tuple[str, str], text: str = FILE, **options: Any) -> Matrix:
    """Read the file with other words in the place of some, which stand in it once."""
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return reader.read(written(folder, text), **options)
