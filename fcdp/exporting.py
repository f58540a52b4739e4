"""Weights for other programs: safetensors files, written by rank 0."""

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fcdp import fsdp2
from fcdp.agreement import check_names, on_all_ranks
from fcdp.durable import flush
from fcdp.engine import ATTRIBUTE, engine_of
from fcdp.extensions import is_packed, opened
from fcdp.optional import safetensors

_NEED = "fcdp.export and fcdp.save_adapters write safetensors files"
#: Whole tensors by name, in host memory.
_Tensors = dict[str, torch.Tensor]
#: Where PyTorch has its collectives: those of groups, those of DTensors.
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


def save_adapters(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write the trainable parameters, and only these, as ``adapter_model.safetensors``.

    Of a ``PeftModel``, PEFT writes its active adapters, what is frozen of them included, and a
    configuration, for ``PeftModel.from_pretrained``. Of any other model the file holds the
    trainable parameters by their names in the model. One parameter at a time is gathered, to the
    host memory of rank 0. Files that are there already are replaced, each at once, when all new
    ones are on disk. Collective: every rank calls it.

    Args:
        model: A cached model of which something is trainable.
        directory: Rank 0's; made if it is not there.

    Raises:
        ImportError: Without safetensors.
        ValueError: If nothing is trainable.
        RuntimeError: On every rank if rank 0 cannot write.

    Example:
        >>> fcdp.save_adapters(model, directory)
        >>> from safetensors.torch import load_file
        >>> load_file(directory / "adapter_model.safetensors")["blocks.0.weight"].shape
        torch.Size([8, 8])
    """
    safetensors(_NEED)
    engine_of(model).controller.conclude()
    state = model.state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not any(value.requires_grad for value in tensors.values()):
        raise ValueError("model: no parameter has requires_grad; there are no adapters to save")
    peft_model = _as_peft_model(model)
    frozen = tensors if peft_model is None else _without_adapters(tensors, peft_model)
    ids = {id(value) for value in frozen.values() if not value.requires_grad}
    adapters = {name: value for name, value in tensors.items() if id(value) not in ids}

    def write(folder: Path, gathered: _Tensors) -> None:
        if peft_model is None:
            _write_file(gathered, folder / "adapter_model.safetensors")
            return
        plain = _plain_copy(peft_model, adapters, gathered)
        # PEFT changes them while it writes, and an error would leave them so.
        plain.peft_config = copy.deepcopy(plain.peft_config)
        # X-LoRA names those that it mixes as active, and not itself.
        mixes = plain.active_peft_config.peft_type == "XLORA"
        names = list(plain.peft_config if mixes else plain.active_adapters)
        plain.save_pretrained(os.fspath(folder), selected_adapters=names, state_dict=gathered)

    _write(model, adapters, directory, write=write)


def export(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write the whole model as safetensors, for its ``from_pretrained`` if it has one.

    A model with ``save_pretrained`` writes itself, configuration included. Of any other,
    ``model.safetensors`` holds the parameters and buffers by name, tied ones once. Of a
    ``PeftModel`` the base model is written, as it is without adapters: see ``save_adapters``.
    One parameter at a time is gathered, to the host memory of rank 0, which must have room for
    the model. Files that are there already are replaced, each at once, when all new ones are on
    disk. Collective: every rank calls it.

    Args:
        model: A cached model.
        directory: Rank 0's; made if it is not there.

    Raises:
        ImportError: Without safetensors.
        ValueError: For packed parameters: of a tensor class such as torchao's ``NF4Tensor``, or of
            a model that transformers has quantised (bitsandbytes). On every rank, for a model of
            which ranks have other names, or other values under one name.
        RuntimeError: On every rank if rank 0 cannot write.

    Example:
        >>> fcdp.export(model, directory)
        >>> from safetensors.torch import load_file
        >>> sorted(load_file(directory / "model.safetensors"))
        ['blocks.0.bias', 'blocks.0.weight', 'blocks.1.bias', 'blocks.1.weight']
    """
    safetensors(_NEED)
    engine_of(model).controller.conclude()
    peft_model = _as_peft_model(model)
    plain: Any = model if peft_model is None else peft_model.get_base_model()
    state = base_state(model)
    if getattr(plain, "hf_quantizer", None) is not None:
        raise ValueError(
            f"model: {type(plain).__name__} was quantised by transformers, whose writer needs it "
            "whole; write the adapters by fcdp.save_adapters, which name the base that they are for"
        )

    def write(folder: Path, gathered: _Tensors) -> None:
        if hasattr(plain, "save_pretrained"):
            whole = _plain_copy(plain, state, gathered)
            config = getattr(whole, "config", None)
            if getattr(config, "distributed_config", None) is not None:
                # Told that ranks share it, transformers gathers it anew, and waits for all.
                whole.config = copy.copy(config)
                whole.config.distributed_config = None
            whole.save_pretrained(folder, state_dict=gathered)
        else:
            _write_file(gathered, folder / "model.safetensors")

    _write(model, state, directory, write=write, instead_of="model*.safetensors*")


def _write(
    model: nn.Module,
    state: Mapping[str, Any],
    directory: str | os.PathLike[str],
    *,
    write: Callable[[Path, _Tensors], None],
    instead_of: str | None = None,
) -> None:
    """Gather ``state``, and have rank 0 ``write`` it into a folder."""
    for name, value in state.items():
        if isinstance(value, DTensor) and is_packed(value):
            raise ValueError(
                f"{name}: is packed in a {type(value._local_tensor).__name__}, which safetensors "
                "files have no form for; write the adapters by fcdp.save_adapters, or all by "
                "fcdp.save"
            )
    topology = engine_of(model).topology
    check_names(state, topology)
    # Rank 0 of all that hold parts: with tensor parallelism several topologies have a rank 0, and
    # meshes of some of the ranks begin with others.
    meshes = {param.device_mesh for param in model.parameters() if isinstance(param, DTensor)}
    first = min(int(mesh.mesh.min()) for mesh in meshes) == dist.get_rank()
    gathered = _gather(state, first)

    def build() -> None:
        if isinstance(gathered, Exception):
            raise gathered
        if first:
            with _put_in_place(Path(directory), instead_of) as folder, _alone(model):
                write(folder, gathered)

    on_all_ranks(f"directory = {directory}", topology, build)


def _gather(state: Mapping[str, Any], keep: bool) -> _Tensors | Exception:
    """The whole tensors of ``state`` in host memory, tied ones still tied; {} unless ``keep``.

    Every rank sees each tensor whole, one at a time: where there is no room for it, too. The error
    is returned then.
    """
    problem: Exception | None = None
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    wholes: dict[int, torch.Tensor] = {}
    for value in tensors.values():
        if id(value) not in wholes:
            (plain,) = opened("", value).values()
            whole = plain.detach()
            if isinstance(whole, DTensor):
                whole = whole.full_tensor()
            wholes[id(value)] = whole.new_empty(0)
            if keep and problem is None:
                try:
                    # Files have no form for two views of one memory, as buffers may be.
                    own = whole if isinstance(value, DTensor) else whole.clone()
                    wholes[id(value)] = own.cpu()
                except (MemoryError, RuntimeError) as error:
                    problem = error
                    wholes = dict.fromkeys(wholes, whole.new_empty(0))  # tied ones stay known
    return problem or ({name: wholes[id(value)] for name, value in tensors.items()} if keep else {})


def _plain_copy(module: nn.Module, state: Mapping[str, Any], gathered: _Tensors) -> Any:
    """A copy of a module and of those inside it, for a writer that one rank alone runs.

    It has whole parameters and buffers, the classes from before FSDP2 and no hooks, so that nothing
    in it communicates. A parameter that was not gathered has no memory (``meta``). Other attributes
    are the original's own: what they hold of the sharded model is refused (``_alone``).
    """
    wholes = {id(state[name]): whole for name, whole in gathered.items()}
    params: dict[nn.Parameter | None, nn.Parameter] = {}
    for param in module.parameters():
        whole = wholes.get(id(param))
        if whole is None:
            whole = torch.empty(param.shape, dtype=param.dtype, device="meta")
        params[param] = nn.Parameter(whole, requires_grad=param.requires_grad)
    copies: dict[nn.Module | None, Any] = {}
    for each in module.modules():
        kind: Any = next(kind for kind in type(each).__mro__ if not issubclass(kind, FSDPModule))
        copies[each] = plain = object.__new__(kind)
        nn.Module.__init__(plain)
        set_anew = vars(plain).keys() - {"training", "_non_persistent_buffers_set"} | {ATTRIBUTE}
        for name, it in vars(each).items():
            if name not in set_anew and not name.startswith(fsdp2.STATE_NAMES):
                vars(plain)[name] = it
        for name in (slot for base in kind.__mro__ for slot in getattr(base, "__slots__", ())):
            if hasattr(each, name):
                object.__setattr__(plain, name, getattr(each, name))
        plain._buffers.update({name: wholes.get(id(it), it) for name, it in each._buffers.items()})
        # Names of what is not there have ``None``.
        plain._parameters.update({name: params.get(it) for name, it in each._parameters.items()})
    for each in module.modules():
        copies[each]._modules.update(
            {name: copies.get(child) for name, child in each._modules.items()}
        )
    return copies[module]


@contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    """Refuse collectives in the body, which rank 0 runs alone.

    A forward of the sharded model is refused before it begins, so that it leaves nothing behind.
    """

    def refuse(module: nn.Module, *_: Any) -> None:
        raise _held(f"has called the sharded model's {type(module).__name__}")

    with ExitStack() as stack:
        stack.enter_context(engine_of(model).topology.failures.alone())
        for module in model.modules():
            if isinstance(module, FSDPModule):
                stack.enter_context(fsdp2.refusing_forwards(module, refuse))
        stack.enter_context(_NoCollectives())  # type: ignore[no-untyped-call]
        yield


class _NoCollectives(TorchDispatchMode):
    """Raises ``RuntimeError`` in place of any collective."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it computes on plain tensors, and its collectives come here
        if func.namespace in _COLLECTIVES:
            raise _held(f"has begun an exchange with other ranks ({func})")
        return func(*args, **kwargs or {})


def _held(what: str) -> RuntimeError:
    return RuntimeError(
        f"the model's writer runs on rank 0 alone, on a whole copy of the model, and {what}; an "
        "attribute of the copy that is no module (a bound method, a partial, a list of modules, a "
        "parent) still holds the sharded one: have the writer reach modules from self"
    )


@contextmanager
def _put_in_place(directory: Path, instead_of: str | None) -> Iterator[Path]:
    """Let the body fill a folder inside ``directory``; move its files out once all are on disk.

    Each file is then replaced at once, and stays as it was if writing fails. Other files
    that match ``instead_of`` go: those of a model in other parts would be loaded in its place.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".unfinished-", dir=directory) as temporary:
        folder = Path(temporary)
        yield folder
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in files:
            flush(path)
        for path in files:
            target = directory / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
        new = {directory / path.relative_to(folder) for path in files}
        if instead_of is not None:
            for old in set(directory.glob(instead_of)) - new:
                old.unlink()
        folders = {folder for path in new for folder in path.parents}
        for each in folders - {*directory.parents}:
            flush(each)


def _write_file(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors by name; of those that are one, which the format does not allow, the first."""
    firsts = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
    safetensors(_NEED).save_file(
        {name: tensors[name].contiguous() for name in sorted(firsts.values())},
        path,
        metadata={"format": "pt"},
    )


def _as_peft_model(model: nn.Module) -> Any:
    """``model`` if it is a ``PeftModel``, else None. Only where PEFT is loaded can there be one."""
    peft = sys.modules.get("peft")
    return model if peft is not None and isinstance(model, peft.PeftModel) else None


def base_state(model: nn.Module) -> dict[str, Any]:
    """The state of a model, or of what a ``PeftModel`` wraps, by the names in its files."""
    state = model.state_dict(keep_vars=True)
    peft_model = _as_peft_model(model)
    return state if peft_model is None else _without_adapters(state, peft_model)


def _without_adapters(state: Mapping[str, Any], peft_model: Any) -> dict[str, Any]:
    """The state of the base model by the names that it has before PEFT wraps its layers."""
    base = peft_model.get_base_model()
    root = next(name for name, module in peft_model.named_modules() if module is base)
    peft = sys.modules["peft"]
    kinds = (
        peft.tuners.tuners_utils.BaseTunerLayer,
        peft.utils.other.AuxiliaryTrainingWrapper,
        peft.tuners.adaption_prompt.layer._BaseAdaptedAttention,
    )
    wrappers = {name for name, module in base.named_modules() if isinstance(module, kinds)}
    wrapped = {"base_layer", "original_module", "token_adapter", "model"}
    plain: dict[str, Any] = {}
    for name, value in state.items():
        if not name.startswith(f"{root}."):
            continue
        parts = name.removeprefix(f"{root}.").split(".")
        inside = [at for at in range(1, len(parts)) if ".".join(parts[:at]) in wrappers]
        if {parts[at] for at in inside} <= wrapped:
            plain[".".join(part for at, part in enumerate(parts) if at not in inside)] = value
    return plain
