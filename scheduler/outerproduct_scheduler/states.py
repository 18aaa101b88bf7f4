"""Which state may follow which, for Attempts and Calls: the only place that says so. A Run has the state of its root.

States are the enums of the contract; an illegal transition raises, since it means that the code is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

from outerproduct.v1 import call_pb2 as pb


class IllegalTransition(Exception):
    """The code asked for a transition that no rule allows."""


ATTEMPT_TRANSITIONS: Mapping[int, frozenset[int]] = {
    pb.ATTEMPT_STATUS_PENDING: frozenset(
        {
            pb.ATTEMPT_STATUS_RUNNING,
            pb.ATTEMPT_STATUS_COMPLETED,
            pb.ATTEMPT_STATUS_FAILED,
            pb.ATTEMPT_STATUS_CANCELLED,
            pb.ATTEMPT_STATUS_CANCELLING,
        }
    ),
    pb.ATTEMPT_STATUS_RUNNING: frozenset(
        {
            pb.ATTEMPT_STATUS_COMPLETED,
            pb.ATTEMPT_STATUS_FAILED,
            pb.ATTEMPT_STATUS_CANCELLED,
            pb.ATTEMPT_STATUS_CANCELLING,
        }
    ),
    pb.ATTEMPT_STATUS_CANCELLING: frozenset(
        {pb.ATTEMPT_STATUS_COMPLETED, pb.ATTEMPT_STATUS_FAILED, pb.ATTEMPT_STATUS_CANCELLED}
    ),
    pb.ATTEMPT_STATUS_COMPLETED: frozenset(),
    pb.ATTEMPT_STATUS_FAILED: frozenset(),
    pb.ATTEMPT_STATUS_CANCELLED: frozenset(),
}

CALL_TRANSITIONS: Mapping[int, frozenset[int]] = {
    pb.CALL_STATUS_RUNNING: frozenset(
        {pb.CALL_STATUS_COMPLETED, pb.CALL_STATUS_FAILED, pb.CALL_STATUS_CANCELLED, pb.CALL_STATUS_CANCELLING}
    ),
    pb.CALL_STATUS_CANCELLING: frozenset({pb.CALL_STATUS_COMPLETED, pb.CALL_STATUS_FAILED, pb.CALL_STATUS_CANCELLED}),
    pb.CALL_STATUS_COMPLETED: frozenset(),
    pb.CALL_STATUS_FAILED: frozenset(),
    pb.CALL_STATUS_CANCELLED: frozenset(),
}

ATTEMPT_ENDS = frozenset(state for state, following in ATTEMPT_TRANSITIONS.items() if not following)
CALL_ENDS = frozenset(state for state, following in CALL_TRANSITIONS.items() if not following)

RUN_OF_CALL: Mapping[int, int] = {
    pb.CALL_STATUS_RUNNING: pb.RUN_STATUS_RUNNING,
    pb.CALL_STATUS_CANCELLING: pb.RUN_STATUS_CANCELLING,
    pb.CALL_STATUS_COMPLETED: pb.RUN_STATUS_COMPLETED,
    pb.CALL_STATUS_FAILED: pb.RUN_STATUS_FAILED,
    pb.CALL_STATUS_CANCELLED: pb.RUN_STATUS_CANCELLED,
}


def next_attempt_status(current: int, following: int) -> int:
    """`following`, if it may come after `current`. Raises IllegalTransition."""
    if following not in ATTEMPT_TRANSITIONS[current]:
        raise IllegalTransition(f"Attempt: {_attempt(current)} → {_attempt(following)}")
    return following


def next_call_status(current: int, following: int) -> int:
    """`following`, if it may come after `current`. Raises IllegalTransition."""
    if following not in CALL_TRANSITIONS[current]:
        raise IllegalTransition(f"Call: {_call(current)} → {_call(following)}")
    return following


def _attempt(status: int) -> str:
    return pb.AttemptStatus.Name(pb.AttemptStatus.ValueType(status))


def _call(status: int) -> str:
    return pb.CallStatus.Name(pb.CallStatus.ValueType(status))
