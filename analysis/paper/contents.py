"""Contents of the chapter on a paper: its sections.

``contents.yaml``, of the FCDP paper, and the files beside it, of others, name claims, matrices and
settings; the papers' numbers stand in ``analysis/claims.yaml``. A mistake raises ``ValueError``
with the file and the key.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from analysis.claims.computations import Selection
from analysis.claims.papers import Claims
from experiments.records.cell import MatrixName
from simulation import yaml_lines
from simulation.files import Name, Strict, validated

CONTENTS = Path(__file__).with_suffix(".yaml")
#: Files of the papers whose chapters follow, in their order.
OTHERS = tuple(
    CONTENTS.with_name(f"{paper}.yaml") for paper in ("co2", "cyclic", "luwu", "fuyou", "bound")
)


#: Content of a section's figure.
Figure = Literal[
    "volume",
    "ranges",
    "scaling",
    "bandwidth",
    "policies",
    "memory",
    "losses",
    "apart",
    "throughput",
    "traffic",
    "intervals",
    "slots",
    "bound",
]


class Pivot(Strict):
    """A table of a matrix's cells: a quantity by two of their settings."""

    id: Name
    title: str
    matrix: MatrixName
    quantity: Literal["tokens_per_s", "peak_device_bytes", "held_out_loss", "held_out_accuracy"]
    #: The cells that it shows; all by default.
    of: Selection | None = None
    rows: Name = "strategy"
    columns: Name


class Seeds(Strict):
    """A table of held-out metrics over a matrix's seeds."""

    id: Name
    title: str
    matrix: MatrixName
    #: The strategy from which differences are taken, seed by seed.
    over: Name


class Section(Strict):
    """One table or figure of the paper."""

    id: Name
    title: str
    figure: Figure
    matrices: tuple[MatrixName, ...]
    #: The paper's claims, which its table shows; none where nothing is known of what it says.
    claims: tuple[Name, ...] = ()
    #: Hypotheses on the same table or figure: its figure shows them, its table does not.
    hypotheses: tuple[Name, ...] = ()
    #: Short names, in figures and in the table with which the chapter opens.
    first: dict[Name, str] = Field(default_factory=dict)
    #: Reasons for verdicts, a clause each, where no range and no check of the claim has one.
    because: dict[Name, str] = Field(default_factory=dict)
    #: Part of the paper's setting that is not known.
    unknown: str | None = None
    #: Tables of every system's cells, where the paper's own values are not known.
    pivots: tuple[Pivot, ...] = ()
    seeds: tuple[Seeds, ...] = ()

    @model_validator(mode="after")
    def _opens_with_its_own(self) -> "Section":
        named = (*self.claims, *self.hypotheses)
        if others := [name for name in (*self.first, *self.because) if name not in named]:
            raise ValueError(f"first, because: {others} are neither claims nor hypotheses of it")
        return self


class Contents(Strict):
    """The contents of one such file."""

    #: The paper, as the claims call it.
    paper: Name
    sections: tuple[Section, ...]


def load(claims: Claims, path: Path = CONTENTS) -> Contents:
    """Read and check the chapter's contents; ``ValueError`` as said above."""
    contents = validated(Contents, yaml_lines.load(path).values, path.name)
    for kind in ("claims", "hypotheses"):
        known = {of.id for of in getattr(claims, kind) if of.paper == contents.paper}
        for section in contents.sections:
            if others := [name for name in getattr(section, kind) if name not in known]:
                raise ValueError(f"{path.name}: {section.id}: {kind} of the paper lack {others}")
    return contents
