"""Names of Runs, Calls and Attempts, parsed and made in this module only.

A Run is "runs/<uuid>". Its root Call is ".../calls/0"; the child that a Call creates at index 3 has the id of its
parent with ".3" behind it, and "-2", "-3", ... when it had to start again. An Attempt is ".../attempts/<number>".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from outerproduct_scheduler.errors import InvalidArgument

ROOT_CALL = "0"

_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_CALL = r"0(?:\.\d{1,9}(?:-\d{1,9})?)*"
_RUN_NAME = re.compile(rf"runs/({_UUID})")
_CALL_NAME = re.compile(rf"runs/({_UUID})/calls/({_CALL})")
_ATTEMPT_NAME = re.compile(rf"runs/({_UUID})/calls/({_CALL})/attempts/(\d{{1,9}})")
_REQUEST_ID = re.compile(_UUID)


@dataclass(frozen=True, slots=True, order=True)
class CallKey:
    """Which Call."""

    run_id: str
    call_id: str

    @property
    def name(self) -> str:
        return f"runs/{self.run_id}/calls/{self.call_id}"

    @property
    def run_name(self) -> str:
        return f"runs/{self.run_id}"

    @property
    def depth(self) -> int:
        return self.call_id.count(".")

    def attempt(self, number: int) -> str:
        return f"{self.name}/attempts/{number}"

    def child(self, index: int, start: int) -> CallKey:
        """The child at an index; `start` counts how often it was begun, from 1."""
        return CallKey(self.run_id, f"{self.call_id}.{index}" + (f"-{start}" if start > 1 else ""))


def run_name(run_id: str) -> str:
    return f"runs/{run_id}"


def parse_run(name: str) -> str:
    """The id of a Run. Raises InvalidArgument."""
    match = _RUN_NAME.fullmatch(name)
    if not match:
        raise InvalidArgument(f'name={name[:200]!r} is not the name of a Run: "runs/<uuid>"')
    return match[1]


def parse_call(name: str) -> CallKey:
    """Raises InvalidArgument."""
    match = _CALL_NAME.fullmatch(name)
    if not match:
        raise InvalidArgument(f'name={name[:200]!r} is not the name of a Call: "runs/<uuid>/calls/<id>"')
    return CallKey(match[1], match[2])


def parse_attempt(name: str) -> tuple[CallKey, int]:
    """The Call of an Attempt and its number. Raises InvalidArgument."""
    match = _ATTEMPT_NAME.fullmatch(name)
    if not match:
        raise InvalidArgument(
            f'name={name[:200]!r} is not the name of an Attempt: "runs/<uuid>/calls/<id>/attempts/<n>"'
        )
    return CallKey(match[1], match[2]), int(match[3])


def is_request_id(text: str) -> bool:
    return _REQUEST_ID.fullmatch(text) is not None
