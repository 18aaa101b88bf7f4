"""An agent's end of the runner's socket (docs/runner-protocol.md), and the runner as a real process beside it.

Written against the document and without the runner's own code, so that a mistake in its frames is not made twice.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle

import outerproduct_runner

PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
BARE_PYTHON = str(Path(sys.base_prefix) / "bin" / f"python{PYTHON_VERSION}")
"""An interpreter without the packages of the tests' own environment, as an Image has it."""
WAIT_SECONDS = 30.0
MIB = 1024**2


class FakeAgent:
    """One container's socket, source folder and runner process."""

    def __init__(self, folder: Path) -> None:
        self.run_folder = folder / "run"
        library = self.run_folder / "lib"
        for package in (outerproduct_runner, cloudpickle):
            source = Path(str(package.__file__)).parent
            shutil.copytree(source, library / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        self.source = self.run_folder / "source"
        self.source.mkdir()
        self.env: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self._path = folder / "agent.sock"
        self._listener = self._listen()

    # The runner's process.

    def start(self) -> None:
        """Starts the runner as the container's command does."""
        self.process = subprocess.Popen(
            [BARE_PYTHON, "-I", str(self.run_folder / "lib" / "outerproduct_runner")],
            env={"PATH": os.environ["PATH"], "OUTERPRODUCT_SOCKET": str(self._path), **self.env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
        )

    def read_output(self, count: int) -> bytes:
        """The next bytes of the runner's standard output; waits for them."""
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.read(count)

    def terminate(self) -> None:
        """SIGTERM, as `docker stop` sends it."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int:
        """Waits for the runner's end."""
        assert self.process is not None
        return self.process.wait(timeout=WAIT_SECONDS)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        self._listener.close()

    # The agent's end of the socket.

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._path))
        listener.listen()
        listener.settimeout(WAIT_SECONDS)
        return listener

    def restart(self) -> None:
        """What a restart of the agent looks like from inside: another socket at the same path."""
        self._listener.close()
        self._path.unlink()
        self._listener = self._listen()

    def accept(self, state: str) -> socket.socket:
        """The runner's next connection, its hello already read."""
        connection, _ = self._listener.accept()
        connection.settimeout(WAIT_SECONDS)
        hello, _ = receive(connection)
        assert (hello["type"], hello["role"], hello["state"]) == ("hello", "runner", state)
        return connection

    def give_call(
        self,
        name: str = "module:f",
        *,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        function: bytes = b"",
        arguments: bytes | None = None,
        python_version: str = PYTHON_VERSION,
        env_vars: dict[str, str] | None = None,
    ) -> None:
        """Answers the runner that asks, up to `accepted`."""
        pickled = cloudpickle.dumps((args, kwargs or {})) if arguments is None else arguments
        header = {
            "type": "call",
            "attempt": "runs/1/calls/1/attempts/1",
            "number": 1,
            "function": {
                "qualified_name": name,
                "by_value": bool(function),
                "wants_client": False,
                "python_version": python_version,
            },
            "source": True,
            "function_bytes": len(function),
            "arguments_bytes": len(pickled),
        }
        with self.accept("ready") as connection:
            send(connection, header, json.dumps(env_vars or {}).encode())
            for data in (function, pickled):
                for start in range(0, len(data), MIB):
                    send(connection, {"type": "data"}, data[start : start + MIB])
            answer, _ = receive(connection)
            assert answer["type"] == "accepted"

    def take_outcome(self) -> tuple[dict[str, Any], bytes]:
        """Header and bytes of the outcome, which is acknowledged."""
        with self.accept("finished") as connection:
            header, _ = receive(connection)
            data = b""
            while len(data) < header["bytes"]:
                data += receive(connection)[1]
            send(connection, {"type": "received"})
        return header, data

    # Both, for most tests.

    def outcome_of(self, code: str, **call: Any) -> tuple[dict[str, Any], bytes]:
        """Runs `f` of a module with this code."""
        (self.source / "module.py").write_text(code)
        self.start()
        self.give_call(**call)
        return self.take_outcome()

    def result_of(self, code: str, **call: Any) -> Any:
        """The value that `f` of a module with this code returns."""
        header, data = self.outcome_of(code, **call)
        assert header["type"] == "result", header["message"]
        return cloudpickle.loads(data)


def send(connection: socket.socket, header: dict[str, Any], body: bytes = b"") -> None:
    encoded = json.dumps(header).encode()
    connection.sendall(struct.pack(">II", len(encoded), len(body)) + encoded + body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    header_length, body_length = struct.unpack(">II", _exactly(connection, 8))
    assert header_length <= 65_536
    assert body_length <= 4_194_304
    header: dict[str, Any] = json.loads(_exactly(connection, header_length))
    return header, _exactly(connection, body_length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionError("the runner closed the connection")
        data += piece
    return bytes(data)


def pickled_in_main(code: str) -> bytes:
    """`f` of a caller's `__main__` with this code, by value."""
    script = f"{code}\nimport sys, cloudpickle\nsys.stdout.buffer.write(cloudpickle.dumps(f))\n"
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout
