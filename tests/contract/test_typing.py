"""The types of the public interface, as mypy --strict reports them for a user's program."""

from __future__ import annotations

import re
from pathlib import Path

from mypy import api

HERE = Path(__file__).parent
REVEALED = re.compile(r'note: Revealed type is "(.*)"')
NAMES = re.compile(r"(builtins|typing|outerproduct\.[_a-z]+|collections\.abc)\.")


def revealed_types(path: Path) -> list[str]:
    """The types in the order of their `reveal_type`; any error of the checker fails."""
    output, errors, code = api.run(["--strict", "--no-error-summary", "--config-file=", str(path)])
    assert code == 0, output + errors
    return [NAMES.sub("", found) for found in REVEALED.findall(output)]


def test_types_of_results_follow_from_the_function() -> None:
    assert revealed_types(HERE / "typing_user_code.py") == [
        "Run[dict[str, float]] | Call[dict[str, float]]",
        "dict[str, float]",
        "dict[str, float]",
        "list[float]",
        "Run[int] | Call[int]",
        "Iterator[dict[str, float]]",
        "Iterator[list[float]]",
        "Run[Any]",
        "list[Node]",
        "dict[str, float]",
        "list[list[float]]",
        "list[Call[Any]]",
        "list[Call[Any]]",
        "Call[dict[str, float]]",
    ]
