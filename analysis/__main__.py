"""``python -m analysis``: tables, figures and a report of records."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer._completion_classes import completion_init

from analysis import strategies

if TYPE_CHECKING:
    from experiments.records.record import Record

# The commands import what they need themselves: pandas and seaborn take seconds on a busy
# machine, which neither --help nor a wrong path should cost.
completion_init()  # for scripts/completion.bash
app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

#: The committed runs.
RESULTS = Path(__file__).resolve().parent.parent / "results"

#: Kinds of pictures.
_PICTURES = (".svg", ".png", ".pdf")

Records = Annotated[
    Path, typer.Argument(metavar="RECORDS", help="A JSON Lines file, or a directory of runs.")
]
Baseline = Annotated[str, typer.Option(help="The strategy that speed-ups are taken over.")]


@app.command()
def report(
    records: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RECORDS]",
            show_default=False,
            help="A JSON Lines file, or a directory of runs; by default all committed results.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to write; by default report/ beside the records.")
    ] = None,
    baseline: Baseline = strategies.BASELINE,
) -> None:
    """Write figures, the comparison table, Parquet and one self-contained HTML report.

    Without RECORDS: REPRODUCTION.md and results/report.html, each claim of the papers next to what
    the committed records say of it.
    """
    if records is None:
        if output is not None or baseline != strategies.BASELINE:
            _fail("--output and --baseline need RECORDS")
        from analysis.report import reproduction

        with _failing():
            pages = reproduction.write(RESULTS)
        for name, path in pages.items():
            typer.echo(f"{name:8}{path}")
        return
    from analysis.load.table import by_file

    with _failing():
        files = by_file(records)
    _check_baseline(baseline, [record for group in files.values() for record in group])
    from analysis.report.run import write

    directory = output or (records if records.is_dir() else records.parent) / "report"
    with _failing("cannot write the report: ", (OSError,)):
        written = write(files, directory, baseline)
    for png, svg in written.figures:
        typer.echo(f"figure  {png}\n        {svg}")
    typer.echo(f"table   {written.table}\ndata    {written.data}\nreport  {written.report}")


@app.command()
def table(
    records: Records,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="As Markdown, with notes, ready for a README.")
    ] = False,
    baseline: Baseline = strategies.BASELINE,
) -> None:
    """Print every cell next to the baseline that ran under the same settings."""
    loaded = _load(records)
    _check_baseline(baseline, loaded)
    from analysis.compare.baseline import compare, seeds_in_words
    from analysis.load.table import latest
    from analysis.report import run

    compared = compare(latest(loaded), baseline)
    if markdown:
        typer.echo(run.markdown(compared), nl=False)
        return
    typer.echo(run.presentable(compared).to_string(index=False))
    typer.echo("\n" + "\n".join(run.notes(compared)))
    seeds = seeds_in_words(compared)
    if not seeds.empty:
        typer.echo(f"\n{run.OVER_SEEDS}:\n{seeds.to_string(index=False)}")


@app.command()
def audit(records: Records) -> None:
    """Compare every cell's bytes with its closed form and its losses with FSDP2's, as Markdown.

    Exit status: 0; 1 if a strategy did not run, or sent or learned what it should not have; 2
    without records of cells that were run.
    """
    loaded = _load(records)
    from analysis.compare.audit import audit, markdown
    from analysis.load.table import latest

    with _failing(f"{records}: "):
        findings = audit(latest(loaded))
    typer.echo(markdown(findings), nl=False)
    if any(finding.problems for finding in findings):
        raise typer.Exit(1)


@app.command()
def check(records: Records) -> None:
    """Judge your own run by the papers' claims that its matrix tests, beside the committed run.

    Exit status: 0; 1 if a number differs from the committed one and is neither as near to the
    paper's as the claim asks nor nearer; 2 without records that a claim tests.
    """
    from analysis.check import check

    with _failing():
        checked = check(records, RESULTS)
    states: Counter[str] = Counter()
    for of in checked:
        typer.echo(f"{of.matrix}: `{of.command}`; the committed run took {of.resources}")
        states.update(line.state for line in of.lines)
        for line in of.lines:
            numbers = f"paper {line.paper}, committed {line.committed}, yours {line.ours}"
            for text in filter(None, (line.claim, numbers, line.outcome, line.difference)):
                first = line.state if text is line.claim else ""
                typer.echo(fill(text, 80, initial_indent=f"{first:9}", subsequent_indent=" " * 9))
    others = [f"; {states[state]} {state}" for state in ("other", "not run") if states[state]]
    total = f"{states['same']} of {states.total()} comparisons have the committed number"
    typer.echo(total + "".join(others))
    if states["FAIL"]:
        raise typer.Exit(1)


def _picture(output: Path) -> Path:
    """The file, if it can be a picture's."""
    if output.suffix not in _PICTURES:
        _fail(f"--output {output}: ends in none of {', '.join(_PICTURES)}")
    return output


_Picture = Annotated[
    Path,
    typer.Option(
        metavar="FILE", help="Where the picture goes: .svg, .png or .pdf.", callback=_picture
    ),
]


@app.command()
def timeline(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="What experiments trace wrote, or a rank's of a cell with profile: true.",
        ),
    ],
    output: _Picture = Path("timeline.svg"),
) -> None:
    """Draw what a rank does when in one step: simulated, profiled, or both over the same time."""
    from analysis import timeline

    with _failing():
        drawing = timeline.draw([timeline.load(file) for file in traces])
        timeline.save(drawing, output)
    typer.echo(f"figure  {output}")


@app.command()
def draw_plan(
    file: Annotated[
        typer.FileText, typer.Argument(metavar="PLAN", help="What experiments plan --figure found.")
    ],
    output: _Picture = Path("plan.svg"),
) -> None:
    """Draw a plan's throughput and cost over nodes and links, with their ranges."""
    from analysis.figures.plan import draw

    prefix = f"{file.name}: no plan with curves, or cannot be drawn: "
    with _failing(prefix, (OSError, ValueError, LookupError)):
        draw(json.load(file)).savefig(output, dpi=200)
    typer.echo(f"figure  {output}")


@app.command()
def time_to_quality(
    results: Annotated[
        Path, typer.Argument(help="The folder with the records of fair-search and time-to-quality.")
    ] = RESULTS,
) -> None:
    """Draw held-out loss over seconds for each link, with a table of seconds to a loss.

    Losses by step are those of each strategy's best trial in fair-search, seconds per step those of
    time-to-quality, beside whose records both go.
    """
    from analysis.quality import write

    with _failing():
        tables, figure, plans = write(results)
    typer.echo(f"{tables}\n\nfigure  {figure}\nplans   {plans}")


def _load(path: Path) -> "list[Record]":
    from analysis.load.table import load

    with _failing():
        return load(path)


def _check_baseline(name: str, records: "Sequence[Record]") -> None:
    """One message and exit status 2 for a strategy without records, unless it is the default."""
    there = strategies.ordered(record.cell.strategy for record in records)
    if name not in (*there, strategies.BASELINE):
        _fail(f"--baseline {name}: has no records here; allowed are {', '.join(there)}")


@contextmanager
def _failing(
    prefix: str = "", errors: tuple[type[Exception], ...] = (OSError, ValueError)
) -> Iterator[None]:
    """One message and exit status 2 for what a reader's files or arguments are to blame for."""
    try:
        yield
    except errors as error:
        _fail(f"{prefix}{error}")


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app(prog_name="python -m analysis")
