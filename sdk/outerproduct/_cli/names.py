"""What a name on the command line means: a Run, a Call, an Attempt, or else a node.

Full names and bare ids of Runs are taken, as the SDK does. Pure; whether the thing exists is for the scheduler to say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class Kind(Enum):
    """What a name names."""

    RUN = "Run"
    CALL = "Call"
    ATTEMPT = "Attempt"
    NODE = "Node"


@dataclass(frozen=True)
class Name:
    """A full name and what it names."""

    kind: Kind
    full: str

    def __str__(self) -> str:
        return f"{self.kind.value} {self.full}"


_KIND_BY_PARTS = {2: Kind.RUN, 4: Kind.CALL, 6: Kind.ATTEMPT}


def parse_name(text: str) -> Name:
    """Never fails: what is no name of a Run, Call or Attempt can only be a node's."""
    text = text.strip().rstrip("/")
    if _UUID.fullmatch(text):
        return Name(Kind.RUN, f"runs/{text.lower()}")
    parts = text.split("/")
    if parts[0] == "runs" and len(parts) in _KIND_BY_PARTS and parts[2::2] == ["calls", "attempts"][: len(parts[2::2])]:
        return Name(_KIND_BY_PARTS[len(parts)], text)
    return Name(Kind.NODE, text)
