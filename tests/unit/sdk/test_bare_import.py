"""The SDK imports in any image: no other package, and the syntax of the oldest Python that has it."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import outerproduct

PACKAGE = Path(str(outerproduct.__file__)).parent
FILES = sorted(PACKAGE.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_syntax_is_that_of_python_3_10(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 10))


def test_it_imports_and_makes_a_client_with_the_standard_library_alone(tmp_path: Path) -> None:
    package = tmp_path / "outerproduct"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("v1", "_cli", "__pycache__"))
    program = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "import outerproduct as op\n"
        "client = op.init()\n"
        "assert client.run_id == 'runs/r', client.run_id\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
    )
    ended = subprocess.run(
        [sys._base_executable, "-I", "-S", "-c", program],  # type: ignore[attr-defined]
        capture_output=True,
        check=False,
        text=True,
        env={"OUTERPRODUCT_SOCKET": "/nowhere", "OUTERPRODUCT_ATTEMPT": "runs/r/calls/c/attempts/1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert set(ended.stdout.split()) <= {"__main__", "outerproduct"}
