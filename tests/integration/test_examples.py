"""Every example runs as a user would run it, and prints what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.stack import Stack

pytestmark = pytest.mark.docker

EXAMPLES = Path(__file__).parents[2] / "examples"
EXPECTED = {
    "hardware.py": "memory limit     536,870,912   536870912",
    "sweep.py": "best: learning_rate=",
    "tree.py": "4 x the",
    "batch_files.py": " batch_files.py",
    "shared_memory.py": "batches: [1, 2, 3, 4]",
}
MODULES = {"inside.py"}


def test_no_example_is_without_a_test() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == EXPECTED.keys() | MODULES


@pytest.mark.parametrize("name", EXPECTED)
def test_the_example_runs(stack: Stack, base_image: str, name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env={
            **os.environ,
            "OUTERPRODUCT_API_KEY": stack.api_key,
            "OUTERPRODUCT_BASE_URL": stack.base_url,
            "OUTERPRODUCT_BASE_IMAGE": base_image,
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert EXPECTED[name] in done.stdout
