"""The code of the Hardware page, as a script of its own with nothing but an address and a key in its environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.stack import Stack

pytestmark = pytest.mark.docker

PROGRAM = Path(__file__).parent / "programs" / "hardware_page.py"


def test_the_hardware_page_runs_as_a_script(stack: Stack, base_image: str) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
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
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["trained"] == 6
    assert got["defaults"] == 6
    assert got["shards"] == [10, 20, 30]
    assert got["available"] == [["", 0]]
    assert "A100-80GB" in got["unsupported"]
