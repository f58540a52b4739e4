"""The commands that README and docs show, as they are written."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.docs import DOCS, ROOT

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
#: Languages of fenced blocks; only the first two hold commands.
LANGUAGES = {"bash", "console", "text", "python", "yaml", "json"}


@dataclass(frozen=True)
class Shown:
    page: str
    text: str
    #: Its output on the page, without line breaks, in parts that stand between omissions.
    prints: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The command's words, without settings of its environment."""
        return shlex.split(self.called)

    @property
    def called(self) -> str:
        """The text from the name of the program on."""
        return re.sub(r"^([A-Z_]+=\S+ )+", "", self.text)


def fences(page: Path) -> list[tuple[str, str]]:
    """Language and text of each block."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    assert text.count("\n```") == 2 * len(blocks), f"{page}: a block has no end"
    return blocks


def shown(page: Path) -> list[Shown]:
    """The page's commands, in order; continued lines are joined, comments left out."""
    commands = []
    for language, text in fences(page):
        text = text.replace("\\\n", " ")
        if language == "console":
            for each in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, printed = each.partition("\n")
                parts = tuple(_joined(part) for part in printed.split("\n…\n"))
                commands.append(Shown(page.name, _joined(command), parts))
        elif language == "bash":
            lines = (_joined(re.sub(r"(^|\s)#.*", "", line)) for line in text.splitlines())
            commands += [Shown(page.name, line) for line in lines if line]
    return commands


def _joined(text: str) -> str:
    return " ".join(text.split())
