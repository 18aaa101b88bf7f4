"""Starts a second dockerd whose NVIDIA hook is the stand-in, in a network namespace of its own.

In the machine's namespace it would delete the first engine's bridge. Its data folder, its containers and its namespace
go with it. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import docker

_RUNTIME = """#!/bin/sh
case " $* " in *" create "*) echo "$*" >>"$(dirname "$0")/created" ;; esac
exec runc "$@"
"""
READY_SECONDS = 60
STOP_SECONDS = 30
HOOK = "nvidia-container-runtime-hook"
"""The name that Docker looks for on its PATH to offer the `nvidia` device driver (moby, daemon/nvidia_linux.go)."""


@dataclass(frozen=True)
class Asked:
    """What one container with GPUs was given."""

    uuids: tuple[str, ...]
    capabilities: frozenset[str]


@dataclass(frozen=True)
class GpuEngine:
    """A running engine."""

    folder: Path

    @property
    def url(self) -> str:
        return f"unix://{self.folder}/docker.sock"

    def asked(self) -> list[Asked]:
        """Of every container with GPUs so far."""
        record = self.folder / "bin" / "asked.jsonl"
        lines = record.read_text().splitlines() if record.exists() else []
        found = [json.loads(line) for line in lines]
        return [Asked(tuple(one["uuids"]), frozenset(one["capabilities"].split(","))) for one in found]

    def containers_of_nvidias_runtime(self) -> int:
        """How many were created by the engine's default runtime, which stands for NVIDIA's."""
        record = self.folder / "bin" / "created"
        return len(record.read_text().splitlines()) if record.exists() else 0

    def load_image(self, image: str) -> None:
        """Copies an image from the machine's own engine."""
        save = subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE)
        subprocess.run(["docker", "-H", self.url, "load", "--quiet"], stdin=save.stdout, check=True, timeout=120)
        assert save.wait() == 0


@contextlib.contextmanager
def gpu_engine(folder: Path, uuids: Sequence[str]) -> Iterator[GpuEngine]:
    """An engine on a machine with these GPUs, in the order of their indices. `folder` must be short: a socket is in it.

    Raises AssertionError with its log when it does not start.
    """
    programs = folder / "bin"
    programs.mkdir(parents=True)
    hook = programs / HOOK
    hook.write_text(f"#!{sys.executable}\n" + Path(__file__).with_name("hook.py").read_text())
    hook.chmod(0o755)
    (programs / "gpus.json").write_text(json.dumps(list(uuids)))
    engine = GpuEngine(folder)
    command = [
        "unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh",
        "dockerd", "--host", engine.url, "--data-root", str(folder / "data"), "--exec-root", str(folder / "exec"),
        "--pidfile", str(folder / "pid"), "--config-file", str(folder / "daemon.json"),
    ]  # fmt: skip
    runtime = programs / "nvidia-container-runtime"
    runtime.write_text(_RUNTIME)
    runtime.chmod(0o755)
    # As `nvidia-ctk runtime configure --set-as-default` leaves it.
    settings = {"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": str(runtime)}}}
    (folder / "daemon.json").write_text(json.dumps(settings))
    with (folder / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
            start_new_session=True,
        )
    try:
        _wait_until_it_answers(engine, process)
        yield engine
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        finally:
            process.kill()
            shutil.rmtree(folder, ignore_errors=True)


def _wait_until_it_answers(engine: GpuEngine, process: subprocess.Popen[bytes]) -> None:
    client = docker.DockerClient(base_url=engine.url, version="1.41", timeout=READY_SECONDS)
    try:
        for _ in range(READY_SECONDS * 10):
            if process.poll() is not None:
                break
            try:
                client.ping()
            except (docker.errors.DockerException, OSError):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
            else:
                return
    finally:
        client.close()
    raise AssertionError(f"dockerd did not start:\n{(engine.folder / 'dockerd.log').read_text()[-4000:]}")
