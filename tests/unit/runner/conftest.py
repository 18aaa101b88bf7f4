"""One agent's socket with its runner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.runner.fake_agent import FakeAgent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    made = FakeAgent(tmp_path)
    yield made
    made.close()
