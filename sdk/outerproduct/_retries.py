"""How often a Call may be repeated."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ATTEMPTS = 1000
"""More is a loop, not a retry."""


@dataclass(frozen=True)
class RetryStrategy:
    """Repeats a Call after its function may have begun.

    `max_attempts` counts Attempts in all; None, 0 and 1 mean one. Failures before the function can have begun are
    repeated by themselves and do not count.
    """

    max_attempts: int | None = None

    def __post_init__(self) -> None:
        value = self.max_attempts
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"max_attempts={value!r} must be a whole number (int) or None")
        if not 0 <= value <= MAX_ATTEMPTS:
            raise ValueError(f"max_attempts={value} must be between 0 and {MAX_ATTEMPTS}")
