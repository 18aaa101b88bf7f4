"""What happens after an Attempt that ended without a result: pure rules, the table of docs/failures.md.

Once the function may have begun, only the RetryStrategy repeats. Before that, failures of the infrastructure have an
allowance of their own and never count against the user.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outerproduct.v1 import call_pb2 as pb

INFRASTRUCTURE_ALLOWANCE = 5
"""Failures before the start that are repeated. A fault that outlasts five tries on different nodes is not a passing
one, and somebody has to be told."""
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


class Blame(Enum):
    """Whose a failure is, as far as repeating goes."""

    USER = "user"
    """The function's own, repeated as RetryStrategy says."""
    INFRASTRUCTURE = "infrastructure"
    """The platform's: repeated by itself while the function can not have begun."""
    FINAL = "final"
    """The same again would fail the same way, or somebody wanted the end."""


BLAME = {
    pb.FAILURE_KIND_UNSPECIFIED: Blame.INFRASTRUCTURE,
    pb.FAILURE_KIND_EXCEPTION: Blame.USER,
    pb.FAILURE_KIND_OUT_OF_MEMORY: Blame.USER,
    pb.FAILURE_KIND_DISK_FULL: Blame.USER,
    pb.FAILURE_KIND_PROCESS_DIED: Blame.USER,
    pb.FAILURE_KIND_RESULT_NOT_SERIALIZABLE: Blame.USER,
    pb.FAILURE_KIND_TIMEOUT: Blame.USER,
    pb.FAILURE_KIND_FUNCTION_NOT_LOADED: Blame.FINAL,
    pb.FAILURE_KIND_IMAGE_UNAVAILABLE: Blame.FINAL,
    pb.FAILURE_KIND_IMAGE_BUILD_FAILED: Blame.FINAL,
    pb.FAILURE_KIND_IMAGE_HAS_NO_PYTHON: Blame.FINAL,
    pb.FAILURE_KIND_PYTHON_VERSION_MISMATCH: Blame.FINAL,
    pb.FAILURE_KIND_CANCELLED: Blame.FINAL,
    pb.FAILURE_KIND_PARENT_ENDED: Blame.FINAL,
    pb.FAILURE_KIND_NODE_LOST: Blame.INFRASTRUCTURE,
    pb.FAILURE_KIND_GPU_LOST: Blame.INFRASTRUCTURE,
    pb.FAILURE_KIND_CONTAINER_ENGINE: Blame.INFRASTRUCTURE,
    pb.FAILURE_KIND_NODE_MISCONFIGURED: Blame.INFRASTRUCTURE,
    pb.FAILURE_KIND_KILLED_EXTERNALLY: Blame.INFRASTRUCTURE,
    pb.FAILURE_KIND_DECLINED: Blame.INFRASTRUCTURE,
}


@dataclass(frozen=True, slots=True)
class Again:
    """The Call gets another Attempt."""

    pause_seconds: float
    avoid_node: bool
    """Another node is tried first."""
    counts: bool
    """Whether the ended Attempt counts against the allowance for failures before the start."""


def after_failure(
    kind: int, *, never_started: bool, started_attempts: int, failures_before_start: int, max_attempts: int
) -> Again | None:
    """What follows a failed Attempt; None: its failure is the Call's.

    `started_attempts`: Attempts whose function may have begun, this one included if it has. `failures_before_start`:
    those that counted so far, without this one. `max_attempts`: 0 and 1 mean one.
    """
    blame = BLAME[pb.FailureKind.ValueType(kind)]
    if blame is Blame.FINAL:
        return None
    if never_started:
        if blame is not Blame.INFRASTRUCTURE:
            return None
        counts = kind != pb.FAILURE_KIND_DECLINED
        if counts and failures_before_start >= INFRASTRUCTURE_ALLOWANCE:
            return None
        return Again(pause_seconds(failures_before_start), avoid_node=True, counts=counts)
    if started_attempts < max(1, max_attempts):
        return Again(0.0, avoid_node=blame is Blame.INFRASTRUCTURE, counts=False)
    return None


def pause_seconds(failures: int) -> float:
    """Doubles with every failure."""
    return min(FIRST_PAUSE_SECONDS * 2.0 ** min(failures, 16), LONGEST_PAUSE_SECONDS)
