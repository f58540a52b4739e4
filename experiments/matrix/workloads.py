"""The models, data and losses of a matrix file, checked as far as torch is not needed."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from baselines.optimizers import SGD, AdamW, AnyOptimizer
from experiments.records import objective as objectives
from experiments.records import workload
from experiments.records.cell import Cell
from experiments.records.provenance import ROOT
from simulation import models as shapes
from simulation.transformer import Family, ModelSpec
from simulation.yaml_lines import Document, KeyPath

_OPTIMIZERS: dict[str, type[AnyOptimizer]] = {"adamw": AdamW, "sgd": SGD}
OBJECTIVES: dict[str, type[objectives.AnyObjective]] = {
    "causal-lm": objectives.CausalLM,
    "dpo": objectives.DPO,
    "grpo": objectives.GRPO,
    "distillation": objectives.Distillation,
}
_LOSS: str = Cell.model_fields["loss"].default
_SOURCES = ("library", "text", "jsonl", "dataset", "images")
#: Models of images by family; the other families are built-in language models.
_NETWORKS: dict[Any, type[workload.ImageModel | ModelSpec]] = {
    "convolutional": workload.Convolutional,
    "resnet": workload.ResNet,
}
#: Files of pretrained weights and of tokenizers, of which a repository on the hub has one.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZERS = ("tokenizer_config.json", "tokenizer.json")
#: Settings whose mistakes may first show on nodes.
_FROM_ELSEWHERE = ("data", "loss", "objective")
#: Keys that decide nothing of the model, and change with each version that saves a configuration.
_VOLATILE = ("transformers_version", "_name_or_path")


class Workloads:
    """Reads the parts of a matrix file's workload that are not built in.

    A mistake raises ``ValueError`` with the file, the line and the key.
    """

    def __init__(self, file: Document, folder: Path) -> None:
        self._file = file
        folder = folder.resolve()
        inside = folder.is_relative_to(ROOT)
        self._folder = str(folder.relative_to(ROOT) if inside else folder)
        #: The file's models by name, and the places of those that are not built in.
        self.models: dict[str, workload.AnyModel] = {}
        self._from_elsewhere: dict[str, KeyPath] = {}
        for i in range(len(file.at(("models",)))):
            spec = self._model(("models", i))
            if spec.name in self.models:
                file.fail(("models", i, "name"), f"{spec.name!r} is the name of an earlier model")
            self.models[spec.name] = spec
            if not isinstance(spec, ModelSpec):
                self._from_elsewhere[spec.name] = ("models", i)

    def _model(self, path: KeyPath) -> workload.AnyModel:
        section = self._file.at(path)
        fields = section if isinstance(section, dict) else {}
        if "function" in fields:
            model = self._file.spec(workload.OwnModel, path)
            self._has_module(model.function, (*path, "function"))
            return model
        if "config" in fields:
            return self._configured(path)
        if "family" in fields:
            families = (*get_args(Family), *_NETWORKS)
            self._file.one_of(fields["family"], families, (*path, "family"), "unknown family")
        return self._file.spec(_NETWORKS.get(fields.get("family"), ModelSpec), path)

    def data(self, path: KeyPath) -> workload.AnyData:
        section = self._file.at(path)
        if not isinstance(section, dict):
            self._file.fail(path, f"{section!r} is not a mapping such as {{text: FILE}}")
        source = next((key for key in _SOURCES if key in section), None)
        if source is None:
            self._file.fail(path, f"says none of {', '.join(_SOURCES)}")
        if source == "images":
            return self._images(path)
        data = self._from(source, path)
        if data.tokenizer is not None:
            tokenizer = self._path_or_name(data.tokenizer, (*path, "tokenizer"))
            if not workload.is_path(tokenizer):
                self._is_on_hub(tokenizer, _TOKENIZERS, (*path, "tokenizer"))
            data = data.model_copy(update={"tokenizer": tokenizer})
        return data

    def loss(self, path: KeyPath) -> str:
        loss = self._file.at(path)
        if loss == _LOSS:
            return _LOSS
        if not isinstance(loss, str) or ":" not in loss:
            self._file.fail(
                path, f"{loss!r} is no loss; allowed: {_LOSS!r}, a function as package.module:name"
            )
        self._has_module(loss, path)
        return loss

    def objective(self, path: KeyPath) -> objectives.AnyObjective:
        section = self._file.at(path)
        if isinstance(section, dict) and "function" in section:
            spec = self._file.spec(objectives.OwnObjective, path)
            self._has_module(spec.function, (*path, "function"))
            return spec
        if not isinstance(section, dict) or "kind" not in section:
            self._file.fail(path, f"{section!r} is not a mapping such as {{kind: dpo}}")
        self._file.one_of(section["kind"], OBJECTIVES, (*path, "kind"), "unknown objective")
        if section["kind"] != "distillation" or "teacher" not in section:
            return self._file.spec(OBJECTIVES[section["kind"]], path)
        self._file.one_of(section["teacher"], self.models, (*path, "teacher"), "unknown model")
        teacher = {"teacher": self.models[section["teacher"]]}
        return self._file.spec(objectives.Distillation, path, **teacher)

    def optimizer(self, path: KeyPath) -> AnyOptimizer:
        section = self._file.at(path)
        if not isinstance(section, dict) or "kind" not in section:
            self._file.fail(path, f"{section!r} is not a mapping such as {{kind: sgd}}")
        self._file.one_of(section["kind"], _OPTIMIZERS, (*path, "kind"), "unknown optimizer")
        return self._file.spec(_OPTIMIZERS[section["kind"]], path)

    def origin(self, model: str, settings: Mapping[str, KeyPath]) -> workload.Origin:
        """Places in the file of the parts of a cell's workload that are not built in."""
        paths = {name: settings[name] for name in _FROM_ELSEWHERE if name in settings}
        if model in self._from_elsewhere:
            paths["model"] = self._from_elsewhere[model]
        if not paths:
            return workload.Origin()
        places = {name: self._file.place(path) for name, path in paths.items()}
        return workload.Origin(folder=self._folder, **places)

    def _configured(self, path: KeyPath) -> workload.ConfiguredModel:
        place = (*path, "config")
        config = self._file.at(place)
        if not isinstance(config, str):
            self._file.fail(place, f"{config!r} is not text")
        # Before anything is fetched.
        model = self._file.spec(workload.ConfiguredModel, path, configuration={})
        source = self._path_or_name(config, place)
        local = self._path(config)
        try:
            read = shapes.read(local if workload.is_path(source) else source)
        except ValueError as error:
            self._file.fail(place, str(error))
        if not isinstance(read.get("model_type"), str):
            self._file.fail(place, f"{config} says no model_type")
        configuration = {name: read[name] for name in sorted(read) if name not in _VOLATILE}
        if model.weights == "pretrained" and workload.is_path(source):
            folder = local if local.is_dir() else local.parent
            if not any(folder.glob("*.safetensors")):
                self._file.fail((*path, "weights"), f"there are no *.safetensors in {folder.name}")
        elif model.weights == "pretrained":
            self._is_on_hub(source, _WEIGHTS, (*path, "weights"))
        return model.model_copy(update={"config": source, "configuration": configuration})

    def _images(self, path: KeyPath) -> workload.Images:
        images = self._file.spec(workload.Images, path)
        if images.images == "digits":
            if images.folder is not None:
                self._file.fail((*path, "folder"), "is not for digits, which scikit-learn brings")
        elif images.folder is None:
            self._file.fail(path, f"folder is missing: the one that {images.images} lies in")
        elif not self._path(images.folder).is_dir():
            self._no_file(images.folder, (*path, "folder"))
        return images

    def _from(self, source: str, path: KeyPath) -> workload.AnyText:
        if source == "library":
            return self._file.spec(workload.Library, path)
        if source == "dataset":
            loaded = self._file.spec(workload.Dataset, path)
            if importlib.util.find_spec("datasets") is None:
                self._file.fail((*path, source), "needs the package datasets: pip install datasets")
            name = self._path_or_name(loaded.dataset, (*path, source))
            return loaded.model_copy(update={"dataset": name})
        file = self._existing_file((*path, source))
        if source == "text":
            return self._file.spec(workload.TextFile, path, digest=workload.digest(file))
        lines = self._file.spec(workload.JsonLines, path, digest=workload.digest(file))
        try:
            texts = [len(text) for text in workload.json_lines(file, lines.field)]
            if not sum(texts):
                what = f"texts ({lines.field})" if texts else "lines"
                raise ValueError(f"{file.name} has empty {what} alone")
        except ValueError as error:
            self._file.fail((*path, source), str(error))
        return lines

    def _existing_file(self, path: KeyPath) -> Path:
        name = self._file.at(path)
        if not isinstance(name, str):
            self._file.fail(path, f"{name!r} is not text")
        file = self._path(name)
        if file.is_dir():
            self._file.fail(path, f"{name} is a folder, not a file")
        if not file.is_file():
            self._no_file(name, path)
        if not file.stat().st_size:
            self._file.fail(path, f"{name} is empty")
        return file

    def _path_or_name(self, text: str, path: KeyPath) -> str:
        """An existing path, as ``is_path`` knows paths; else what may be a name on the hub."""
        if self._path(text).exists():
            return text if workload.is_path(text) else f"./{text}"
        if workload.is_path(text) or text.endswith(".json") or text.count("/") > 1:
            self._no_file(text, path)
        return text

    def _is_on_hub(self, name: str, files: Sequence[str], path: KeyPath) -> None:
        try:
            shapes.from_hub(name, *files)
        except ValueError as error:
            self._file.fail(path, str(error))

    def _no_file(self, name: str, path: KeyPath) -> NoReturn:
        self._file.fail(path, f"there is no file or folder {name} beside this matrix file")

    def _path(self, text: str) -> Path:
        return workload.Origin(folder=self._folder).path(text)

    def _has_module(self, function: str, path: KeyPath) -> None:
        module = function.partition(":")[0]
        try:
            if importlib.util.find_spec(module) is not None:
                return
            reason = "there is no such file"
        except Exception as error:  # what the packages around it do while they are imported
            reason = str(error)
        self._file.fail(
            path,
            f"no module {module!r} in the current directory or among installed packages: {reason}",
        )
