"""The tables of transitions: total, and nothing follows an end."""

from __future__ import annotations

import pytest

from outerproduct.v1 import call_pb2 as pb
from outerproduct_scheduler import states

ATTEMPT_STATES = [value for value in pb.AttemptStatus.values() if value]
CALL_STATES = [value for value in pb.CallStatus.values() if value]


def test_every_state_has_a_row() -> None:
    assert set(states.ATTEMPT_TRANSITIONS) == set(ATTEMPT_STATES)
    assert set(states.CALL_TRANSITIONS) == set(CALL_STATES)
    assert set(states.RUN_OF_CALL) == set(CALL_STATES)


@pytest.mark.parametrize("current", ATTEMPT_STATES)
@pytest.mark.parametrize("following", ATTEMPT_STATES)
def test_an_attempt_goes_only_where_the_table_says(current: int, following: int) -> None:
    if following in states.ATTEMPT_TRANSITIONS[current]:
        assert states.next_attempt_status(current, following) == following
    else:
        with pytest.raises(states.IllegalTransition):
            states.next_attempt_status(current, following)


@pytest.mark.parametrize("end", sorted(states.CALL_ENDS))
@pytest.mark.parametrize("following", CALL_STATES)
def test_nothing_follows_the_end_of_a_call(end: int, following: int) -> None:
    with pytest.raises(states.IllegalTransition):
        states.next_call_status(end, following)
