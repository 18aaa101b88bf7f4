"""Every field of the contract says what it is: operators read it through reflection and in the files."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

PROTOS = sorted((Path(__file__).parents[2] / "proto").rglob("*.proto"))
FIELD = re.compile(r"(?:repeated |optional )?(?:map<.*> |[\w.]+ )(\w+) = \d+;")


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_every_field_has_a_comment(path: Path) -> None:
    lines = [line.strip() for line in path.read_text().splitlines()]
    bare = [line for before, line in pairwise(lines) if FIELD.match(line) and not before.startswith("//")]
    assert bare == []
