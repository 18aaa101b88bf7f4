"""Connections to the agent's socket that outlast the agent: it may restart at any moment, the runner waits."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from outerproduct_runner import frames

T = TypeVar("T")

SOCKET_PATH = "/run/outerproduct/agent.sock"
FIRST_PAUSE_SECONDS = 0.01
LONGEST_PAUSE_SECONDS = 2.0
"""An agent that starts again is met soon, and a container that waits for hours costs next to nothing."""


def socket_path() -> str:
    return os.environ.get("OUTERPRODUCT_SOCKET", SOCKET_PATH)


def converse(conversation: Callable[[socket.socket], T]) -> T:
    """Holds the conversation on a connection of its own, and begins it anew when the connection is lost.

    It never gives up: the agent that comes back decides what becomes of this container. A conversation that the
    agent understands differently (ProtocolError) is begun anew as well, since another version may answer next.
    """
    pause_seconds = FIRST_PAUSE_SECONDS
    while True:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(socket_path())
                return conversation(connection)
        except (OSError, frames.ProtocolError) as error:
            if pause_seconds >= LONGEST_PAUSE_SECONDS:
                print(f"outerproduct: no agent: {error}", file=sys.__stderr__)
            # Back-off between attempts to connect: there is nothing to wait on while nobody listens.
            time.sleep(pause_seconds)
            pause_seconds = min(pause_seconds * 2, LONGEST_PAUSE_SECONDS)
