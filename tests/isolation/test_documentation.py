"""docs/isolation.md names tests that exist, and leaves no property out."""

from __future__ import annotations

import fnmatch
import re

from tests.isolation.properties import PROPERTIES
from tests.support.engine import ROOT

NOT_PROTECTION = {"may_write_where_programs_expect_to", "thread_pools_are_sized_for_its_cpus"}
"""Properties that say what a Call can do, not what it can not."""


def proofs() -> set[str]:
    """What the last column of the table names."""
    rows = [line.split("|") for line in (ROOT / "docs/isolation.md").read_text().splitlines() if line.startswith("| ")]
    return {name for row in rows for name in re.findall(r"`([a-z0-9_*]+)`", row[-2])}


def existing_tests() -> set[str]:
    files = [path for folder in ("isolation", "integration") for path in (ROOT / "tests" / folder).glob("test_*.py")]
    return {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())}


def test_what_the_table_names_exists() -> None:
    known = set(PROPERTIES) | existing_tests()
    assert [name for name in proofs() if not fnmatch.filter(known, name)] == []


def test_every_property_is_in_the_table() -> None:
    named = {match for name in proofs() for match in fnmatch.filter(PROPERTIES, name)}
    assert set(PROPERTIES) - named == NOT_PROTECTION
