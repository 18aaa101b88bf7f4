"""States of Runs, Calls and Attempts."""

from __future__ import annotations

from enum import Enum


class _Status(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class RunStatus(_Status):
    """State of a Run."""

    UNSPECIFIED = "unspecified"
    RUNNING = "running"
    """Waiting or running."""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CANCELLING = "cancelling"


class CallStatus(_Status):
    """State of a Call. One that waits, for capacity or between two Attempts, is running."""

    UNSPECIFIED = "unspecified"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CANCELLING = "cancelling"


class AttemptStatus(_Status):
    """State of an Attempt."""

    UNSPECIFIED = "unspecified"
    PENDING = "pending"
    """Dispatched; its function can not have begun."""
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CANCELLING = "cancelling"


ENDED = frozenset({"completed", "failed", "cancelled"})
