"""The runner's two conversations with its agent: get the Call, bring the outcome.

Both are repeated with back-off until they are through, however often the agent restarts in between: only the end of
the container ends them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from outerproduct_runner import frames

if TYPE_CHECKING:
    from outerproduct_runner.outcome import Outcome

_FIRST_BACKOFF_SECONDS = 0.02
_MAX_BACKOFF_SECONDS = 2.0  # bounds how long an agent that is back waits for its runners

_T = TypeVar("_T")


class Assignment(NamedTuple):
    """One Call as the agent sends it."""

    qualified_name: str
    """"module:qualname"."""
    by_value: bool
    wants_client: bool
    python_version: str
    """The caller's, as "major.minor"."""
    env_vars: dict[str, str]
    function: bytearray
    """The pickled function; empty when it is imported by name."""
    arguments: bytearray
    """The pickled `(args, kwargs)`."""


def receive_assignment(socket_path: str) -> Assignment:
    """Waits for the Call, accepts it and closes the connection."""

    def converse(connection: socket.socket) -> Assignment:
        frames.send(
            connection,
            {
                "type": "hello",
                "protocol": 1,
                "role": "runner",
                "state": "ready",
                "python": "{}.{}".format(*sys.version_info[:2]),
                "pid": os.getpid(),
            },
        )
        header, body = frames.receive(connection)
        if header["type"] != "call":
            raise frames.ProtocolError(f"expected frame 'call', got {header['type']!r}")
        function = header["function"]
        assignment = Assignment(
            qualified_name=function["qualified_name"],
            by_value=function["by_value"],
            wants_client=function["wants_client"],
            python_version=function["python_version"],
            env_vars=json.loads(body) if body else {},
            function=frames.receive_data(connection, header["function_bytes"]),
            arguments=frames.receive_data(connection, header["arguments_bytes"]),
        )
        frames.send(connection, {"type": "accepted"})
        return assignment

    return _until_through(socket_path, converse)


def deliver(socket_path: str, outcome: Outcome) -> None:
    """Brings the outcome; returns when the agent has stored it."""

    def converse(connection: socket.socket) -> None:
        frames.send(connection, {"type": "hello", "protocol": 1, "role": "runner", "state": "finished"})
        frames.send(connection, outcome.header)
        frames.send_data(connection, outcome.payload)
        header, _ = frames.receive(connection)
        if header["type"] != "received":
            raise frames.ProtocolError(f"expected frame 'received', got {header['type']!r}")

    _until_through(socket_path, converse)


def _until_through(socket_path: str, converse: Callable[[socket.socket], _T]) -> _T:
    backoff_seconds = _FIRST_BACKOFF_SECONDS
    while True:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(socket_path)
                return converse(connection)
        except (OSError, KeyError, ValueError) as error:
            # KeyError and ValueError: a frame of another shape than agreed, as unusable as a lost connection.
            if backoff_seconds == _MAX_BACKOFF_SECONDS:
                print(f"outerproduct: no connection to the agent, trying again: {error}", file=sys.stderr)  # noqa: T201
        time.sleep(backoff_seconds)
        backoff_seconds = min(2 * backoff_seconds, _MAX_BACKOFF_SECONDS)
