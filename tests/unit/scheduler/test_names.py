"""Names are parsed and made in one place, and give back what went in."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerproduct_scheduler import names
from outerproduct_scheduler.errors import InvalidArgument
from outerproduct_scheduler.names import CallKey

RUN = str(uuid.UUID(int=7))


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(1, 9)), max_size=6), st.integers(1, 1000))
def test_a_name_gives_back_the_key_that_made_it(steps: list[tuple[int, int]], number: int) -> None:
    key = CallKey(RUN, names.ROOT_CALL)
    for index, start in steps:
        key = key.child(index, start)
    assert names.parse_call(key.name) == key
    assert names.parse_attempt(key.attempt(number)) == (key, number)
    assert names.parse_run(key.run_name) == RUN
    assert key.depth == len(steps)


@pytest.mark.parametrize("text", ["", "runs/", "runs/x", f"runs/{RUN}/../x", f"runs/{RUN.upper()}x", f"runs/{RUN}\n"])
def test_what_is_no_name_is_refused(text: str) -> None:
    for parse in (names.parse_run, names.parse_call, names.parse_attempt):
        with pytest.raises(InvalidArgument, match="is not the name"):
            parse(text)
