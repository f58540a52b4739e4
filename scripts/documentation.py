"""Pages of the documentation's site beside those of docs: the reference, and linked files.

mkdocs calls these functions (``hooks`` in mkdocs.yml). Pages link files of the repository as
GitHub shows them, ``../fcdp/engine.py``; here each such file becomes a page of the site, so that
no link leaves it and all of them are checked.
"""

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
#: Where files of the repository stand in the site.
_FOLDER = "repository"
#: One of the five pages, though it lies outside of docs: what it links is in the site, too.
_REPRODUCTION = "REPRODUCTION.md"
_LINK = re.compile(r"!?\[(?P<text>[^\[\]]*)\]\((?P<target>[^)#\s]+)(?P<heading>#[^)\s]+)?\)")
#: Pictures in HTML, which mkdocs leaves as it is.
_PICTURE = re.compile(r"\b(?P<name>src|srcset)=\"(?P<target>[^\"\s]+)\"")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", "": "docker"}
#: Keeps sources out of the search, which would list them before the pages.
_UNSEARCHED = "---\nsearch: {exclude: true}\n---\n"
#: Set-up code of the examples in the library's docstrings.
SETTING = """\
import torch
import fcdp

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

topology = fcdp.Topology.build(nodes=2, ranks_per_node=1)
model = fcdp.shard(Net(), topology)
optimizer = torch.optim.AdamW(model.parameters())
"""

#: The reference's parts, in the order in which they are needed.
_PARTS = {
    "Set-up": (
        "shard", "cache_parameters", "CacheOptions", "CommOptions", "is_cached", "Topology",
    ),
    "Training": ("accumulate", "unchanged", "discard", "invalidate", "ledger", "Ledger"),
    "Checkpoints and exports": ("save", "load", "save_adapters", "export", "load_pretrained"),
    "Publications": ("publish", "Publication", "Subscriber"),
    "Policies": (
        "HostCache", "DeviceCache", "DiskCache", "NoCache", "Threshold", "Budget", "Auto",
        "CachePolicy",
    ),
    "Codecs": ("Delta", "Exact", "BlockInt8", "BlockInt4", "Codec"),
}  # fmt: skip
_OPENING = f"""What `fcdp` has, from its docstrings; [in short](reference.md#the-library).

A test runs the examples on two ranks, each a node of its own, after

```python
{SETTING}```

with `directory` an empty folder that both see."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, and each file of the repository that a page links."""
    files.append(File.generated(config, "library.md", content=reference()))
    pages = [(page.content_string, page.src_uri) for page in files.documentation_pages()]
    pages.append(((ROOT / _REPRODUCTION).read_text("utf-8"), f"{_FOLDER}/{_REPRODUCTION}"))
    # A folder's page and that of its README are one.
    linked = {
        _uri(path): path.parent if path.name == "README.md" else path
        for page in pages
        for path in _outside(*page)
    }
    for uri, path in sorted(linked.items()):
        files.append(_file(uri, path, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the pages that files of the repository have here."""
    here = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        path = _path(match["target"], here)
        if path is None:
            return match[0]
        uri = _uri(path)
        if files.get_file_from_path(uri) is None:
            # Pages outside of docs link files that the site lacks: their text alone is kept.
            return match["text"]
        mark = "!" * match[0].startswith("!")
        return f"{mark}[{match['text']}]({_relative(uri, here)}{match['heading'] or ''})"

    def moved_picture(match: re.Match[str]) -> str:
        path = _path(match["target"], here)
        target = match["target"] if path is None else _relative(_uri(path), here)
        return f'{match["name"]}="{target}"'

    return _PICTURE.sub(moved_picture, _LINK.sub(moved, markdown))


def _relative(uri: str, page: str) -> str:
    return posixpath.relpath(uri, posixpath.dirname(page))


def _outside(markdown: str, page: str) -> Iterator[Path]:
    """Files and folders of the repository, outside of docs, that a page links."""
    for match in _LINK.finditer(markdown):
        path = _path(match["target"], page)
        if path is not None and not _is_a_page_or_figure(path):
            yield path


def _is_a_page_or_figure(path: Path) -> bool:
    return path.is_relative_to("docs") and path.suffix != ".py"


def _path(target: str, page: str) -> Path | None:
    """The path that a relative link names, from the repository's root, or ``None``."""
    if "://" in target or page == "library.md":
        return None
    inside, _, rest = page.partition("/")
    source = rest if inside == _FOLDER else f"docs/{page}"
    at = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    return Path(at) if (ROOT / at).exists() else None


def _uri(path: Path) -> str:
    """Where a file of the repository stands in the site."""
    if _is_a_page_or_figure(path):
        return path.relative_to("docs").as_posix()
    source = ROOT / path
    if source.is_dir():
        return f"{_FOLDER}/{path.as_posix()}/README.md"
    page = path.suffix == ".md" or path.suffix not in _LANGUAGES
    return f"{_FOLDER}/{path.as_posix()}" + ("" if page else ".md")


def _file(uri: str, path: Path, config: MkDocsConfig) -> File:
    source = ROOT / path
    options: dict[str, Any] = {"inclusion": InclusionLevel.NOT_IN_NAV}
    if source.is_file() and path.suffix not in {*_LANGUAGES, ".md"}:
        return File.generated(config, uri, abs_src_path=str(source), **options)
    return File.generated(config, uri, content=_content(path), **options)


def _content(path: Path) -> str:
    """A page of a file or folder: Markdown as it is, other text as a block, a folder as a list."""
    source = ROOT / path
    if source.is_dir():
        readme = source / "README.md"
        intro = readme.read_text(encoding="utf-8") if readme.exists() else f"# {path}\n"
        entries = sorted(item for item in source.iterdir() if not item.name.startswith(("_", ".")))
        names = "\n".join(f"- `{entry.name}{'/' * entry.is_dir()}`" for entry in entries)
        return f"{_UNSEARCHED}{intro}\n\n## Files\n\n{names}\n"
    text = source.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return f"{_UNSEARCHED}# {path}\n\n````{_LANGUAGES[path.suffix]}\n{text}````\n"


def reference() -> str:
    """Markdown: a heading per part, and mkdocstrings' directive for each public name."""
    named = [name for names in _PARTS.values() for name in names]
    of = _public()
    if sorted(named) != sorted(of):
        raise ValueError(f"the reference has {sorted(named)}; fcdp has {sorted(of)}")
    sections = ["# The library", _OPENING]
    for part, names in _PARTS.items():
        # A module may have the name of a function in it: the function's own module is named too.
        of_part = (f"::: {of[name]}.{name}\n    options: {{heading_level: 3}}" for name in names)
        sections += [f"## {part}", *of_part]
    return "\n\n".join(sections) + "\n"


def _public() -> dict[str, str]:
    """The module of each public name, parsed and not imported: a site needs no torch."""
    module = ast.parse((ROOT / "fcdp" / "public.py").read_text(encoding="utf-8"))
    # Plugged-in names are imported for type checkers alone, inside of a condition.
    return {
        item.name: str(node.module)
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fcdp.")
        for item in node.names
    }
