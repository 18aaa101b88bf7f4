"""How an Attempt ended, from what is known: the order of the rules is the specification."""

from __future__ import annotations

from typing import Any

import pytest

from outerproduct.v1 import call_pb2 as pb
from outerproduct_agent.outcome import Ending, outcome_of, signal_of

MIB = 1024**2


def ending(**facts: Any) -> Ending:
    return Ending(**{"attempt": "a", "node": "box", "memory_limit_bytes": 128 * MIB, **facts})


def result() -> pb.Outcome:
    return pb.Outcome(result={"inline": b"x"})


def raised() -> pb.Outcome:
    return pb.Outcome(failure=pb.Failure(kind=pb.FAILURE_KIND_EXCEPTION, message="ValueError: no", traceback="T"))


def kind(**facts: Any) -> str:
    outcome = outcome_of(ending(**facts))
    if outcome.WhichOneof("kind") == "result":
        return "result"
    return pb.FailureKind.Name(outcome.failure.kind).removeprefix("FAILURE_KIND_")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"said": result()}, "result"),
        ({"said": raised(), "exit_code": 1}, "EXCEPTION"),
        ({"exit_code": 3}, "PROCESS_DIED"),
        ({"exit_code": 137}, "PROCESS_DIED"),
        ({"exit_code": 137, "oom_kills": 1}, "OUT_OF_MEMORY"),
        ({"exit_code": 137, "killed_from_outside": True}, "KILLED_EXTERNALLY"),
        ({"exit_code": 137, "stop_kind": pb.FAILURE_KIND_CANCELLED}, "CANCELLED"),
        ({"exit_code": 143, "stop_kind": pb.FAILURE_KIND_TIMEOUT}, "TIMEOUT"),
        ({"engine_error": "vanished"}, "CONTAINER_ENGINE"),
        # A child was killed for memory: what the rest made is not to be trusted, unless the user said so.
        ({"said": result(), "oom_kills": 1}, "OUT_OF_MEMORY"),
        ({"said": result(), "oom_kills": 1, "tolerate_oom_kills": True}, "result"),
        ({"exit_code": 137, "oom_kills": 1, "tolerate_oom_kills": True}, "OUT_OF_MEMORY"),
        # The function finished while it was being stopped: a result is a result; an exception on the way is the stop's.
        ({"said": result(), "stop_kind": pb.FAILURE_KIND_CANCELLED}, "result"),
        ({"said": raised(), "stop_kind": pb.FAILURE_KIND_CANCELLED}, "CANCELLED"),
        # Memory was why, although somebody wanted to stop it too.
        ({"oom_kills": 1, "stop_kind": pb.FAILURE_KIND_CANCELLED}, "OUT_OF_MEMORY"),
    ],
    ids=str,
)
def test_what_is_known_decides_how_it_ended(facts: dict[str, Any], expected: str) -> None:
    assert kind(**facts) == expected


def test_out_of_memory_says_limit_peak_shm_and_what_to_ask_for() -> None:
    failure = outcome_of(ending(oom_kills=2, peak_bytes=100 * MIB, shm_bytes=50 * MIB)).failure
    for words in ("128 MiB", "50 MiB in /dev/shm", "memory_bytes=201326592", "2 processes"):
        assert words in failure.message
    assert failure.memory_peak_bytes == failure.memory_limit_bytes == 128 * MIB


def test_tolerated_kills_are_counted_in_the_outcome() -> None:
    assert outcome_of(ending(said=result(), oom_kills=3, tolerate_oom_kills=True)).oom_kills == 3


def test_a_stop_keeps_the_traceback_of_what_was_interrupted() -> None:
    assert outcome_of(ending(said=raised(), stop_kind=pb.FAILURE_KIND_CANCELLED)).failure.traceback == "T"


@pytest.mark.parametrize(("code", "number"), [(0, 0), (1, 0), (128, 0), (137, 9), (143, 15), (255, 0)])
def test_a_signal_is_read_from_a_shell_style_exit_code(code: int, number: int) -> None:
    assert signal_of(code) == number
