"""Workloads of cells beside the built-in models on the standard library's text.

Paths are as the matrix file gives them; ``Origin`` says where they start. Where a name on the hub
would do as well, a path begins as ``is_path`` says, so that no node looks for it elsewhere.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from experiments.records.provenance import ROOT
from simulation.files import Name, Strict
from simulation.transformer import ModelSpec


def _is_function(text: str) -> str:
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise ValueError('must be of the form "package.module:function"')
    return text


#: A user's function, as "package.module:function".
Function = Annotated[str, AfterValidator(_is_function)]


def is_path(path_or_name: str) -> bool:
    """Whether it is a path, and not a name on the hub."""
    return path_or_name.startswith((".", "/", "~"))


class ConfiguredModel(Strict):
    """A causal language model of ``transformers`` by its configuration."""

    name: Name
    #: A ``config.json``, the folder that has it, or a name on the hub.
    config: str
    #: Pretrained weights are in the same folder, or on the hub under the same name.
    weights: Literal["random", "pretrained"] = "random"
    #: Content of ``config.json``, which the reader adds: nodes need not have the file.
    configuration: dict[str, Any]

    @property
    def model_type(self) -> str:
        """The family, as ``transformers`` calls it."""
        return str(self.configuration.get("model_type"))


class OwnModel(Strict):
    """A model that a user's function makes, as docs/use.md says."""

    name: Name
    function: Function


class Convolutional(Strict):
    """A small residual network that classifies images, normalised within each image."""

    name: Name
    family: Literal["convolutional"]
    #: Residual blocks of two convolutions, and their channels.
    layers: int = Field(ge=1)
    width: int = Field(ge=1)


class ResNet(Strict):
    """The residual network of 18 or 50 layers, with batch normalisation."""

    name: Name
    family: Literal["resnet"]
    layers: Literal[18, 50]


#: Models of images; all others are of text.
ImageModel = Convolutional | ResNet
AnyModel = ModelSpec | ConfiguredModel | OwnModel | ImageModel


class _Text(Strict):
    #: A folder with a tokenizer, or its name on the hub; without one, bytes are the tokens.
    tokenizer: str | None = None

    @property
    def source(self) -> str:
        raise NotImplementedError

    @property
    def name(self) -> str:
        return self.source if self.tokenizer is None else f"{self.source} by {self.tokenizer}"


class Library(_Text):
    """The sources of Python's standard library, which every machine has."""

    library: Literal["python"] = "python"

    @property
    def source(self) -> str:
        return "standard library"


class TextFile(_Text):
    """A text file."""

    #: The file, relative to that of the matrix.
    text: str
    #: SHA-256 of its content, which the reader adds: nodes must have the same file.
    digest: str

    @property
    def source(self) -> str:
        return self.text


class JsonLines(_Text):
    """A file of one JSON object per line, of which one field is the text."""

    #: The file, relative to that of the matrix.
    jsonl: str
    #: The field of each object that holds the text.
    field: str = "text"
    #: SHA-256 of its content, as of a text file.
    digest: str

    @property
    def source(self) -> str:
        return self.jsonl


class Dataset(_Text):
    """A data set that the package ``datasets`` loads by its name or from a folder."""

    #: Its name, or a folder.
    dataset: str
    #: Which of its configurations, if it has several.
    subset: str | None = None
    split: str = "train"
    #: The field of each row that holds the text.
    field: str = "text"

    @property
    def source(self) -> str:
        return self.dataset if self.subset is None else f"{self.dataset}/{self.subset}"


AnyText = Library | TextFile | JsonLines | Dataset


class Images(Strict):
    """Images and their classes: scikit-learn's digits, or what ``torchvision`` reads from disk."""

    images: Literal["digits", "cifar-10", "imagenet"]
    #: Their folder on each node; digits come with scikit-learn.
    folder: str | None = None

    @property
    def name(self) -> str:
        return self.images

    @property
    def package(self) -> str:
        """The package that reads them."""
        return "sklearn" if self.images == "digits" else "torchvision"


AnyData = AnyText | Images
#: Groups of pyproject.toml that few cells need.
Group = Literal["images", "quantised"]


def needed(group: Group) -> str:
    """Message where the packages of a group of pyproject.toml are missing."""
    return f"needs the packages of the group {group} on each node: pip install --group {group}"


class Origin(Strict):
    """Places in a matrix file of a cell's workload, for paths in it and errors about it.

    Empty where all of the workload is built in.
    """

    #: The folder of the file: relative to this repository if it is in it.
    folder: str = ""
    #: File, line and key of each part.
    model: str = ""
    data: str = ""
    loss: str = ""
    objective: str = ""

    @property
    def name(self) -> str:
        return self.folder

    def key(self, part: Literal["model", "data", "loss", "objective"], key: str = "") -> str:
        """File, line and key of a part of the workload, or of one key of it, for errors."""
        return ".".join(filter(None, (getattr(self, part) or part, key)))

    def path(self, text: str) -> Path:
        """A path that the file gives, on this machine."""
        return ROOT / self.folder / os.path.expanduser(text)

    def source(self, path_or_name: str, where: str) -> str:
        """Resolve a path on this machine; return a name on the hub as it is.

        Raises ``ValueError``, about the key ``where``, for a path that is not on this node.
        """
        if not is_path(path_or_name):
            return path_or_name
        path = self.path(path_or_name)
        if not path.exists():
            raise ValueError(
                f"{where}: there is no {path} on this node; each node needs it, at the same path"
            )
        return str(path)


def digest(file: Path) -> str:
    hasher = hashlib.sha256()
    with file.open("rb") as content:
        while part := content.read(2**20):
            hasher.update(part)
    return hasher.hexdigest()


def json_lines(file: Path, field: str) -> Iterator[str]:
    """The texts of a file of one JSON object per line; empty lines are passed over.

    Raises ``ValueError`` naming file and line where there is no such object or no text in it.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file.name}:{number}"
            try:
                row: Any = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: is no JSON object")
            yield text_of(row, field, where)


def text_of(row: dict[str, Any], field: str, where: str) -> str:
    """The text of an object. Raises ``ValueError`` where the field is missing or no text."""
    if field not in row:
        raise ValueError(f"{where}: has no field {field!r}, only {', '.join(map(repr, row))}")
    text = row[field]
    if not isinstance(text, str):
        raise ValueError(f"{where}: {field} is a {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(f"{where}: {field} has half a character, {half!r}") from error
    return text
