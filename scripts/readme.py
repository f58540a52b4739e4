"""Write tables of the README and docs, from committed records, commands and matrices' types.

python -m scripts.readme           rewrite the pages
python -m scripts.readme --check   fail if that would change one
"""

import ast
import csv
import inspect
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, get_args
from xml.etree import ElementTree

from pydantic import BaseModel

from analysis import quality, text
from analysis.claims import papers
from analysis.compare import rivals
from analysis.compare.audit import audit
from analysis.load import runs
from analysis.report import simulator
from baselines import registry
from baselines.optimizers import AnyOptimizer
from baselines.settings import Setting
from docs import draw_map, memory, published
from examples.differences import bits
from experiments.matrix.reader import SETTINGS
from experiments.matrix.workloads import OBJECTIVES
from experiments.records import objective
from experiments.records.cell import FILE_NAMES, Cell, ClusterSpec, SimulatedSpec
from experiments.records.comparison import pooled
from experiments.records.record import Record, read
from experiments.records.workload import AnyData, AnyModel
from scripts import coding_speed, headline, host_cost, tables
from simulation.files import stored

ROOT = Path(__file__).resolve().parent.parent
#: Plans in which FCDP is worth its host memory and in which it is not, by the README's titles.
_CASES = {
    "70B, LoRA 16, 8,192 tokens; 4 nodes × 8 L40S, 10 Gbit/s": (
        "plan --model llama-3-70b --peft lora:16 --sequence-length 8192 "
        "--nodes 4 --gpus 8 --gpu l40s --inter-node 10Gbps"
    ),
    "30B, LoRA 8, 512 tokens; 4 nodes × 8 A40, 1 Gbit/s": (
        "plan --model gpt-30b --peft lora:8 --nodes 4 --gpus 8 --gpu a40 --inter-node 1Gbps"
    ),
}
_PLANNED = (
    "fcdp",
    "pipeline",
    "fsdp2-hsdp-offload",
    "deepspeed-hpz-offload",
    "deepspeed-zero3",
    "fsdp2",
    "fsdp2-hsdp",
)
#: Commands that the site's front page shows.
_FRONT = {
    "plan": f"experiments {next(iter(_CASES.values()))} --strategies {','.join(_PLANNED)}",
    "check": "analysis check results/paper/volume",
    "policies": (
        "experiments compare results/ablation:policy=none,k=4 results/ablation:policy=host,k=4"
    ),
}
#: The marked places of each page, and what is written there.
PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "rivals": lambda: rivals.in_words(_records("headline")),
        "share": draw_map.share_in_words,
        "result": lambda: headline.result(_records("headline")),
        "one-gpu-cluster": lambda: _on_one_gpu(headline.on_one_gpu),
    },
    "docs/README.md": {
        name: partial(lambda call: _answered(call), call) for name, call in _FRONT.items()
    },
    "docs/differences.md": {
        "differences": lambda: tables.in_a_sentence(_records("delta-slow-link")),
        "slow-link": lambda: tables.on_the_slow_link(_records("delta-slow-link")),
    },
    "docs/use.md": {"saving": lambda: tables.saving(committed("saving"))},
    "docs/memory.md": {"pipelines": memory.of_pipelines, "groups": memory.of_groups},
    "docs/planning.md": {
        "planned": lambda: _planned(),
        "pipelines": published.of_pipelines,
        "share": draw_map.share,
    },
    "docs/measurements.md": {"parts": lambda: headline.parts(_records("parts"))},
    "docs/simulator.md": {"orders": lambda: _ordered()},
    "docs/reference.md": {
        "cells": lambda: of_cells(),
        "strategies": lambda: of_strategies(),
        "clusters": lambda: of_clusters(),
        "models": lambda: of_kinds(AnyModel),
        "data": lambda: of_kinds(AnyData),
        "optimizers": lambda: of_kinds(AnyOptimizer),
        "objectives": lambda: of_objectives(),
    },
    "results/tables.md": {
        "reference": lambda: tables.condensed(_records("reference")),
        "unshaped": lambda: tables.condensed(_records("unshaped")),
        "unshaped-repeated": lambda: tables.condensed(_records("unshaped-repeated")),
        "slow-link": lambda: tables.retention(_records("slow-link")),
        "link-bound": lambda: tables.bound_by_the_link(_records("link-bound")),
        "paper-emulated": lambda: tables.speeds(_records("paper-emulated")),
        **{
            f"accumulation-{name}": partial(
                lambda name: headline.result(_records(f"accumulation/{name}")), name
            )
            for name in ("equal-4x1", "equal-4x2", "4x1", "4x2")
        },
        "audit": lambda: tables.audited(audit(_records("parity"))),
        # Differences have no closed form.
        "counted": lambda: tables.counted([f for f in audit(_records("headline")) if f.least]),
        "baselines": lambda: tables.speeds(_records("baselines")),
        "workers": lambda: tables.retention_by_workers(
            [_records(f"co2-scaling/{workers}") for workers in ("two", "four", "eight")]
        ),
        "lag-short": lambda: tables.lag(_records("co2-loss")),
        "lag-longer": lambda: tables.lag(_records("co2-long")),
        "lag-long": lambda: tables.lag(_records("co2-tuned")),
        "behind": lambda: tables.behind(_records("co2-ablation")),
        "ablation": lambda: tables.ablated(_records("ablation")),
        "frozen": lambda: tables.by_base(_records("frozen")),
        "frozen-kinds": lambda: tables.by_kind(_records("frozen-kinds")),
        "quantised": lambda: tables.over_seeds(_records("quantised")),
        "free-link": lambda: tables.on_a_free_link(_records("delta-unshaped")),
        "phases": lambda: _drawn("post-training", tables.by_phase),
        "rollouts": lambda: _drawn("rollout", tables.by_rollout),
        "quality": lambda: _drawn(
            quality.TIMES,
            lambda times: quality.markdown(quality.joined(_records(quality.SEARCH), times)),
        ),
        "bits": lambda: bits.table(committed("difference-bits")),
        "coding": lambda: coding_speed.table(committed("coding-speed")),
        "host-time": lambda: host_cost.tables(committed("host-cost")),
        "one-gpu": lambda: tables.on_the_slow_link(_records("one-gpu")),
        "one-gpu-cluster": lambda: _on_one_gpu(headline.memory_on_one_gpu),
        "gpu": lambda: _on_a_gpu(),
        "memory": memory.of_caches,
        "others": memory.of_others,
        "traffic": memory.of_traffic,
    },
}


def _ordered() -> str:
    """Pairs of cells that the simulator puts in the right order, and the cost of its choices."""
    loaded_runs = [run for run in runs.load(ROOT / "results") if isinstance(run, runs.Run)]
    rows = simulator.choices(simulator.orders(papers.load(), loaded_runs))
    names = {
        "together, if nothing ran beside": "beside which nothing is known to have run",
        "together": "all",
    }
    head = ("Matrices", "Pairs", "In the right order", "Choices", "Cost more, median", "at most")
    columns = itemgetter("pairs", "right", "choices", "median_cost", "largest_cost")
    cells = ((names[row["matrix"]], *columns(row)) for row in rows if row["matrix"] in names)
    return text.table(head, ([*map(str, row)] for row in cells))


def rewritten(page: str, content: str) -> str:
    """The page's text with each marked place filled; raises ``ValueError`` if one is missing."""
    for name, table in PAGES[page].items():
        place = re.compile(f"(<!-- {name}: .*? -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        filled = table().replace("\\", r"\\")
        content, count = place.subn(rf"\g<1>{filled}\n\g<2>", content)
        if count != 1:
            raise ValueError(f"{page}: found {count} places for {name}, expected 1")
    return content


def _records(matrix: str) -> list[Record]:
    """A committed run's records, repetitions pooled."""
    return pooled(read(ROOT / "results" / matrix / "records.jsonl"))


def committed(name: str) -> dict[str, Any]:
    """The committed record of a script's measurement, in a folder of results."""
    file = ROOT / "results" / name / "record.json"
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record


def _drawn(matrix: str, table: Callable[[list[Record]], str]) -> str:
    """The table, and the figures that are drawn beside its records."""
    folder = ROOT / "results" / matrix
    drawn = sorted([*folder.rglob("*phases.svg"), *folder.rglob("quality.svg")])
    names = (each.stem.rpartition("-")[2] for each in drawn)
    places = (each.relative_to(ROOT / "results") for each in drawn)
    figures = (f"![{name}]({place})" for name, place in zip(names, places, strict=True))
    return "\n\n".join([table(_records(matrix)), *figures])


def _answered(command: str) -> str:
    """A command and its output, of which a long one is cut in the middle."""
    program, _, rest = command.partition(" ")
    lines = [line.rstrip() for line in _run(rest, program=program).strip("\n").splitlines()]
    if len(lines) > 25:
        lines = [*lines[:5], "…", *lines[-7:]]
    shown = " \\\n    ".join(_broken(f"$ python -m {command}", 74))
    lines = [part for line in lines for part in ([line] if "  " in line else _broken(line, 80))]
    return "```console\n" + "\n".join([shown, *lines]) + "\n```"


def _broken(line: str, width: int) -> list[str]:
    """Lines as on a terminal of so many columns, which break between words."""
    return textwrap.wrap(line, width, break_on_hyphens=False, break_long_words=False) or [""]


def _planned() -> str:
    """The planner's answer to each case: tokens per second with their range."""
    plans = {title: _plan(command) for title, command in _CASES.items()}
    labels = {name: registry.find(name).label for name in _PLANNED}
    labels["pipeline of fcdp"] = "Pipeline with FCDP inside"
    speeds = {
        (f"`{name}`" if label == name else label, title): _speed(plan.get(name))
        for name, label in labels.items()
        for title, plan in plans.items()
    }
    return tables.crossed("Tokens per second", speeds)


def _plan(command: str) -> dict[str, dict[str, str]]:
    """The rows of a plan's table, by strategy."""
    with TemporaryDirectory() as folder:
        table = Path(folder) / "plan.csv"
        _run(command, "--strategies", ",".join(_PLANNED), "--csv", str(table))
        with table.open(encoding="utf-8", newline="") as file:
            return {row["strategy"]: row for row in csv.DictReader(file)}


def _on_one_gpu(table: Callable[[list[Record]], str]) -> str:
    """The table of ``make gpu-cluster``'s records; empty until some are committed."""
    name = "one-gpu-cluster"
    there = stored(ROOT / "results" / name / "records.jsonl").exists()
    return table(_records(name)) if there else ""


def _on_a_gpu() -> str:
    """Timed steps of tests/fcdp/cuda, and the planned speed of FSDP2 on that GPU."""
    steps = tables.on_a_gpu(ElementTree.parse(ROOT / "results/gpu/speed.xml"))
    options = "--nodes 1 --gpus 1 --gpu h200 --sequence-length 1024 --micro-batch 16"
    options += " --global-batch 1x"
    planned = _plan(f"plan --model results/gpu/model {options}")["fsdp2"]
    label = "Planned for FSDP2 on one GPU that has all of it"
    return f"{steps}\n\n{label}: {_speed(planned)} tokens per second."


def _run(command: str, *more: str, program: str = "experiments") -> str:
    arguments = [sys.executable, "-m", program, *shlex.split(command), *more]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def _speed(row: dict[str, str] | None) -> str:
    if row is None:
        return "does not fit"
    names = ("tokens_per_s", "least_tokens_per_s", "most_tokens_per_s")
    speed, least, most = (float(f"{float(row[name]):.3g}") for name in names)
    return f"{speed:,.0f} ({least:,.0f}–{most:,.0f})"


# Lists of docs/reference.md: each key of a matrix file, from the types that read them. Its
# meaning is the comment above its field, or above the name of its field's type; else its label.

_REQUIRED = "–"
#: Values and defaults of keys that a file has in another form than a cell.
_IN_A_FILE = {
    "strategy": ("a [strategy](strategies.md)", _REQUIRED),
    "model": ("a name of `models`", _REQUIRED),
    "inter_bandwidth": ("such as `10 Mbit/s`, or `unshaped`", _REQUIRED),
    "inter_group_bandwidth": ("such as `10 Mbit/s`, or `unshaped`", "`unshaped`"),
    "micro_batch": ("an integer ≥ 1; simulated, also `max`, the largest that fits", _REQUIRED),
    "optimizer": ("a mapping, below", "`{kind: adamw}`"),
    "data": ("a mapping, below", "`{library: python}`"),
    "objective": ("a mapping, below", "`{kind: causal-lm}`"),
    "loss": ("`cross entropy`, or `package.module:function`", "`cross entropy`"),
}
_TYPES = {"integer": "an integer", "number": "a number", "string": "text", "null": "`null`"}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def of_cells() -> str:
    """Keys that all cells have: one line for each that axes and workload take."""
    names = {name: FILE_NAMES.get(name, name) for name in Cell.model_fields}
    rows = _rows(Cell, {name: file for name, file in names.items() if file in SETTINGS})
    return _list(rows)


def of_strategies() -> str:
    """Lists of settings that only some strategies have, one for those that share them."""
    tables: dict[str, dict[str, list[str]]] = {}
    for kind in registry.settings_types():
        for row in _rows(kind):
            key = row[0].strip("`")
            have = [each for each in registry.STRATEGIES if key in each.settings.model_fields]
            # Their defaults may differ.
            row[2] = ", ".join(dict.fromkeys(_default(each.settings, key) for each in have))
            tables.setdefault(_either(each.name for each in have), {}).setdefault(key, row)
    return "\n\n".join(f"{of}:\n\n{_list(rows.values())}" for of, rows in tables.items())


def of_clusters() -> str:
    rows = [["`kind`", "`emulated`, `rented`, `simulated`", "`emulated`", "Where cells run", "all"]]
    for kind, of in ((ClusterSpec, "emulated, rented"), (SimulatedSpec, "simulated")):
        for row in _rows(kind):
            if same := next((each for each in rows if each[0] == row[0]), None):
                same[-1] = "all"
            else:
                rows.append([*row, of])
    return _list(
        [*row, meaning if of == "all" else f"{meaning} ({of})"] for *row, meaning, of in rows
    )


def of_objectives() -> str:
    """A line for each kind of objective with its keys, but for models."""
    kinds = [(f"`kind: {name}`", kind) for name, kind in OBJECTIVES.items()]
    lines = []
    for name, kind in [*kinds, ("A user's own", objective.OwnObjective)]:
        keys = [each for each in kind.model_fields if each not in ("kind", "teacher")]
        if not keys:
            continue
        lines += [f"- {name}: {'; '.join(_items(_rows(kind, {each: each for each in keys})))}"]
    return "\n".join(lines)


#: Fields that the reader of matrices adds to those of a file.
_ADDED = ("configuration", "digest")


def of_kinds(union: Any) -> str:
    """A list of keys per type of a union, below the type's description."""
    parts, earlier = [], []
    for kind in get_args(union):
        rows = _rows(kind, {name: name for name in kind.model_fields if name not in _ADDED})
        # A row that an earlier kind has word for word is shown once.
        repeated = ", ".join(row[0] for row in rows if row in earlier)
        about = _as_markdown(inspect.cleandoc(kind.__doc__ or "")) + (
            repeated and f" {repeated}: as above."
        )
        parts.append(f"{about}\n\n{_list(row for row in rows if row not in earlier)}")
        earlier += rows
    return "\n\n".join(parts)


def _list(rows: Iterable[Sequence[str]]) -> str:
    """A line per key."""
    return "\n".join(f"- {item}" for item in _items(rows))


def _items(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Each key, its values and default in brackets, and its meaning."""
    for key, value, default, meaning in rows:
        values = value if default == _REQUIRED else f"{value}; {default}"
        says_more = meaning.lower() != key.strip("`").replace("_", " ")
        yield f"{key} ({values})" + (f": {meaning}" if meaning and says_more else "")


def _rows(kind: type[BaseModel], names: Mapping[str, str] | None = None) -> list[list[str]]:
    """Key, value, default and meaning of fields, by the names that a file has for them."""
    schema = kind.model_json_schema(mode="validation")
    rows = []
    for name, key in (names or {name: name for name in kind.model_fields}).items():
        value, default = _IN_A_FILE.get(key, (None, None)) if kind is Cell else (None, None)
        if value is None or default is None:
            value = _value(schema["properties"][name], schema.get("$defs", {}))
            default = _default(kind, name)
        rows.append([f"`{key}`", value, default, _meaning(kind, name)])
    return rows


def _value(schema: Mapping[str, Any], defined: Mapping[str, Any]) -> str:
    """Values that JSON Schema allows, in words."""
    if "$ref" in schema:
        return f"{{{_value(defined[schema['$ref'].rpartition('/')[2]], defined)}}}"
    if "anyOf" in schema:
        return ", or ".join(_value(each, defined) for each in schema["anyOf"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return _either(schema["enum"])
    if schema["type"] == "boolean":
        return "`true`, `false`"
    if schema["type"] == "object":
        fields = schema["properties"].items()
        return "; ".join(f"`{name}`: {_value(each, defined)}" for name, each in fields)
    bounds = [f"{sign} {schema[name]}" for name, sign in _BOUNDS.items() if name in schema]
    return " ".join([_TYPES[schema["type"]], " and ".join(bounds)]).strip()


def _default(kind: type[BaseModel], name: str) -> str:
    field = kind.model_fields[name]
    if field.is_required():
        return _REQUIRED
    value = field.default
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _meaning(kind: type[BaseModel], name: str) -> str:
    """The comment on a field, or on its type's name; else its label, or nothing."""
    for owner in kind.__mro__:
        if name in inspect.get_annotations(owner):
            module = sys.modules[owner.__module__]
            comment, annotation = _comments(module)[f"{owner.__name__}.{name}"]
            return comment or _comments(module).get(annotation, ("", ""))[0] or _label(kind, name)
    raise AssertionError(f"no class declares {kind.__name__}.{name}")


def _label(kind: type[BaseModel], name: str) -> str:
    settings = (item for item in kind.model_fields[name].metadata if isinstance(item, Setting))
    return next((setting.label for setting in settings), "")


@cache
def _comments(module: ModuleType) -> dict[str, tuple[str, str]]:
    """The comment above each name and field of a module, and a field's type as it is written."""
    source = inspect.getsource(module)
    lines, comments = source.splitlines(), {}
    for node in ast.parse(source).body:
        for owner, each in ((node, item) for item in getattr(node, "body", [node])):
            prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
            if isinstance(each, ast.AnnAssign):
                comments[prefix + ast.unparse(each.target)] = (
                    _above(lines, each.lineno),
                    ast.unparse(each.annotation),
                )
            elif isinstance(each, ast.Assign):
                comments[prefix + ast.unparse(each.targets[0])] = (_above(lines, each.lineno), "")
    return comments


def _above(lines: list[str], number: int) -> str:
    """The comment right above a line, as one line of Markdown."""
    comment: list[str] = []
    for line in reversed(lines[: number - 1]):
        if not line.strip().startswith("#:"):
            break
        comment.insert(0, line.strip().removeprefix("#:").strip())
    return _as_markdown(" ".join(comment)).rstrip(".")


def _as_markdown(words: str) -> str:
    return words.replace("``None``", "`null`").replace("``", "`")


def _either(names: Iterable[object]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main(arguments: Sequence[str]) -> int:
    differs = False
    for page in PAGES:
        path = ROOT / page
        before = path.read_text(encoding="utf-8")
        after = rewritten(page, before)
        if "--check" not in arguments:
            path.write_text(after, encoding="utf-8")
        elif after != before:
            print(f"{page} differs from the records: run python -m scripts.readme")
            differs = True
    return int(differs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
