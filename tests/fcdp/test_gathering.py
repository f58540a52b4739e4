"""A gather on the CPU that somebody interrupts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from fcdp.gathering import Gathering
from tests.fcdp.stand_ins import NoFailures


class Message:
    """Arrives once; to wait for it again would take for ever."""

    def __init__(self, interrupted: BaseException | None = None) -> None:
        self.waited = 0
        self._interrupted = interrupted

    def wait(self) -> None:
        self.waited += 1
        assert self.waited == 1
        if self._interrupted is not None:
            raise self._interrupted


@pytest.mark.parametrize("where", ["in the wait", "between two exchanges"])
def test_what_was_interrupted_is_not_waited_for_again(where: str) -> None:
    """Python delivers Ctrl-C as a wait returns, and FSDP2 waits again for what it holds."""
    error = KeyboardInterrupt()
    messages = [Message(error if where == "in the wait" else None), Message()]
    forgotten: list[None] = []

    def parts() -> Iterator[Sequence[Any]]:
        yield messages[:1]
        if where == "between two exchanges":
            raise error
        yield messages[1:]

    failures: Any = NoFailures()
    gathering = Gathering(parts(), failures, lambda: forgotten.append(None))
    with pytest.raises(KeyboardInterrupt):
        gathering.wait()
    assert len(forgotten) == 1, "FSDP2 gathers anew what this gather has not brought"
    assert gathering.wait()
    assert [message.waited for message in messages] == [1, 0]
