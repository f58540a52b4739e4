"""Files are replaced whole, or stay as they were."""

import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from fcdp import durable

pytestmark = pytest.mark.unit


def test_a_file_says_the_new_text_or_is_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    for data in (b"first", b"second"):
        durable.replace(file, data)
        assert file.read_bytes() == data
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, "fsync", side_effect=full), pytest.raises(OSError, match="No space"):
        durable.replace(file, b"third")
    assert file.read_bytes() == b"second"
    # Where a file system flushes no folders: who hears of a failure removes what it names.
    with mock.patch.object(durable, "flush", side_effect=OSError):
        durable.replace(file, b"fourth")
    assert file.read_bytes() == b"fourth"
    assert [*tmp_path.iterdir()] == [file], "a draft stays"
