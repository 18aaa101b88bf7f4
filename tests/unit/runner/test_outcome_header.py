"""Outcomes fit their frame and tell the truth, whatever the function raised or returned."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from outerproduct_runner import frames, outcome, pickling

long_texts = st.builds(lambda text, count: text * count, st.text(min_size=1, max_size=8), st.integers(0, 30_000))


def header_bytes(header: frames.Header) -> int:
    return len(json.dumps(header, ensure_ascii=False).encode("utf-8", "replace"))


@given(long_texts)
def test_the_header_of_any_exception_fits_its_frame(message: str) -> None:
    ended = outcome.of_exception(ValueError(message), caller_python=pickling.PYTHON_VERSION)
    assert header_bytes(ended.header) <= frames.MAX_HEADER_BYTES


@given(st.text(max_size=1000))
def test_a_short_message_is_told_whole(message: str) -> None:
    ended = outcome.of_exception(ValueError(message), caller_python=pickling.PYTHON_VERSION)
    assert ended.header["message"] == (message or "ValueError")


def test_a_long_message_keeps_its_start_and_its_end() -> None:
    ended = outcome.of_exception(ValueError("first" + "x" * 10**6 + "last"), caller_python=pickling.PYTHON_VERSION)
    assert ended.header["message"].startswith("first")
    assert ended.header["message"].endswith("last")
