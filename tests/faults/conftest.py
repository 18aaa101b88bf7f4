"""Every fault test breaks a stack of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.engine import attempt_containers, ensure_base_image
from tests.support.stack import Stack

import outerproduct as op


@pytest.fixture(scope="session")
def image() -> op.Image:
    return op.Image.from_registry(ensure_base_image())


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Scheduler and one agent; whatever the test did to them, no container may be left when they have stopped."""
    made = Stack(tmp_path)
    try:
        made.start()
        made.add_agent("box")
        yield made
    finally:
        made.stop()
    assert attempt_containers(made.agent_id()) == []
