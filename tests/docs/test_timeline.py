"""The picture of a step is what its page's two commands draw."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

import analysis.__main__
import experiments.__main__
from tests.docs import DOCS, ROOT

PAGE = (DOCS / "simulator.md").read_text(encoding="utf-8")
PROGRAMS = {"experiments": experiments.__main__.app, "analysis": analysis.__main__.app}


def test_the_picture_is_that_of_the_commands(tmp_path: Path) -> None:
    commands = re.findall(r"^python -m (.+(?:runs/trace\.json|timeline\.svg))$", PAGE, re.MULTILINE)
    assert [command.split()[1] for command in commands] == ["trace", "timeline"]
    for command in commands:
        program, *words = shlex.split(command)
        words = [_elsewhere(word, tmp_path) for word in words]
        result = CliRunner().invoke(PROGRAMS[program], words)
        assert result.exit_code == 0, result.output

    drawn, committed = (
        (folder / "timeline.svg").read_text(encoding="utf-8")
        for folder in (tmp_path, DOCS / "figures")
    )
    # Up to the version of matplotlib: their texts, and how many bars there are.
    texts = [re.findall(r"<text.*?>(.*?)</text>", picture) for picture in (drawn, committed)]
    assert texts[0] == texts[1]
    assert any(text.startswith("simulated: fcdp-full") for text in texts[0])
    assert any(text.startswith("profiled: fcdp-full") for text in texts[0])
    assert drawn.count("<path") == committed.count("<path") > 50
    assert "(figures/timeline.svg)" in PAGE


def _elsewhere(word: str, folder: Path) -> str:
    if word in ("runs/trace.json", "docs/figures/timeline.svg"):
        return str(folder / Path(word).name)
    return str(ROOT / word) if word.startswith("results/") else word


def test_mistakes_get_one_line(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("{}")
    for words, says in (
        (["timeline", str(tmp_path / "trace.json")], "no list of traceEvents"),
        (["timeline", str(tmp_path / "none.json")], "No such file"),
        (["timeline", "trace.json", "--output", "a.txt"], "ends in none of"),
    ):
        result = CliRunner().invoke(analysis.__main__.app, words)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert says in result.stderr
        assert len(result.stderr.splitlines()) == 1
