"""The provenance of cells, in words."""

import json

import pandas as pd

from analysis import text


def provenance(cells: pd.DataFrame) -> str:
    """Matrix, cluster, models, date, commit and software of these cells in one sentence."""
    days = sorted(cells["started_at"].str.slice(0, 10).unique())
    parts = [
        f"Matrix {', '.join(sorted(cells['matrix'].unique()))}",
        _clusters(cells),
        _models(cells),
        days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
        f"commit {', '.join(_short(commit) for commit in commits(cells)) or 'unknown'}",
        _software(cells),
    ]
    return " · ".join(part for part in parts if part) + "."


def distinct(cells: pd.DataFrame, column: str) -> list[dict[str, str]]:
    """The different contents of a column of JSON text, values as text."""
    contents = [json.loads(value) for value in cells[column].drop_duplicates()]
    return [{key: _plain(value) for key, value in item.items()} for item in contents if item]


def commits(cells: pd.DataFrame) -> list[str]:
    return sorted(cells["commit"].dropna().unique())


def _short(commit: str) -> str:
    """Ten digits, and that the tree differed from the commit where it did."""
    digits, dash, state = commit.partition("-")
    return f"{digits[:10]}{dash}{state}"


def _clusters(cells: pd.DataFrame) -> str:
    ran = cells[cells["state"] != "skipped"]  # of the others no machine is known, nor its cores
    kinds = ran if len(ran) else cells
    kinds = kinds[["nodes", "ranks_per_node", "cores_per_node", "evidence"]].drop_duplicates()
    return ", ".join(
        f"{nodes} nodes × {ranks} ranks{_own_cores(own)}, {evidence}"
        for nodes, ranks, own, evidence in kinds.itertuples(index=False)
    )


def _own_cores(count: int) -> str:
    """Cores of each node's own; nothing where nodes shared them."""
    return "" if pd.isna(count) else f", {count} core{'s' if count > 1 else ''} per node"


def _models(cells: pd.DataFrame) -> str:
    """Each model with its full size, which LoRA's adapters enlarge a little."""
    sizes = cells.groupby("model", sort=False)["parameters"].min()
    return ", ".join(f"{name} ({text.count(size)})" for name, size in sizes.astype(float).items())


def _software(cells: pd.DataFrame) -> str:
    """The versions that decide a figure: the engines', and torch's."""
    versions = distinct(cells, "versions")
    torch = sorted({version["torch"] for version in versions if "torch" in version})
    engines = cells.loc[cells["engine"].notna(), ["engine", "engine_version"]].drop_duplicates()
    named = {
        f"{row['engine']} {row['engine_version']}"
        for _, row in engines.iterrows()
        # An engine that is built on torch's has torch's version.
        if row["engine_version"] not in torch
    }
    return ", ".join([*(f"torch {version}" for version in torch), *sorted(named)])


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
