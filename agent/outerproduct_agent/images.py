"""Images on this machine: pulled, built, probed. Whoever waits for the same one shares one pull and one build.

An Image with layers is made by installing each layer's packages with `uv` in a container and committing it, named by
the recipe up to there, so equal beginnings are built once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker.auth
import structlog
from uv import find_uv_bin

from outerproduct.v1 import call_pb2 as pb
from outerproduct_agent.engine import Engine, EngineError
from outerproduct_agent.state import AgentState

log = structlog.get_logger()

PROBE_SECONDS = 60.0
BUILD_SECONDS = 3600.0
LAYER_REPOSITORY = "outerproduct-layer"
IMAGE_LABEL = "outerproduct.image"
PULL_TRIES = 3
FIRST_PAUSE_SECONDS = 0.5
SHOWN_BUILD_LINES = 20
MINIMUM_PYTHON = (3, 9)
PROBE_MEMORY_BYTES = 256 * 1024**2

_CANDIDATES = ("python3", "python", "/usr/local/bin/python3", "/usr/bin/python3", "/opt/conda/bin/python3")
_PROBE = "import sys; print(*sys.version_info[:2], sys.executable)"
_NO_SUCH = ("no such image", "manifest unknown", "not found", "repository does not exist", "invalid reference")


class ImageFailed(Exception):
    """The Image can not be had; `kind` is the FailureKind."""

    def __init__(self, kind: int, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class ReadyImage:
    """An image that a container can be made of."""

    id: str
    python: str
    """Interpreter, as an entrypoint names it."""
    python_version: str
    """ "major.minor"."""


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """How layers are built."""

    network: str
    ca_bundle: Path | None = None
    package_index: str = ""
    auth_file: Path | None = None


class ImageStore:
    """See the module."""

    def __init__(self, engine: Engine, state: AgentState, settings: BuildSettings) -> None:
        self._engine = engine
        self._state = state
        self._settings = settings
        self._locks: dict[str, asyncio.Lock] = {}

    async def ensure(self, image: pb.Image, detail: Callable[[str], None]) -> ReadyImage:
        """The image, pulled and built if need be; `detail` is told what is being done. Raises ImageFailed."""
        image_id = await self._once(f"base {image.base}", lambda: self._base(image.base, detail))
        ready = await self._python(image_id, image.base)
        recipe = hashlib.sha256(image_id.encode())
        for number, layer in enumerate(image.layers, 1):
            recipe.update(json.dumps(list(layer.packages)).encode())
            tag = recipe.hexdigest()[:32]
            detail(f"building layer {number} of {len(image.layers)}: {' '.join(layer.packages)[:100]}")
            parent, packages = ready, list(layer.packages)
            layer_id = await self._once(tag, lambda: self._layer(parent, packages, tag))  # noqa: B023 - awaited here
            ready = ReadyImage(layer_id, ready.python, ready.python_version)
        await self._state.image_used(image.base, ready.id, time.time())
        return ready

    async def _once(self, key: str, make: Callable[[], Any]) -> Any:
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            return await make()

    async def _base(self, reference: str, detail: Callable[[str], None]) -> str:
        found = await self._engine.image(reference)
        if found is None:
            await self._pull(reference, detail)
            found = await self._engine.image(reference)
        if found is None:
            raise ImageFailed(
                pb.FAILURE_KIND_IMAGE_UNAVAILABLE,
                f"image {reference} was pulled and is not there: another architecture?",
            )
        return str(found["Id"])

    async def _pull(self, reference: str, detail: Callable[[str], None]) -> None:
        detail(f"pulling {reference}")
        progress = PullProgress(reference, detail)
        pause = FIRST_PAUSE_SECONDS
        for last in (*(False,) * (PULL_TRIES - 1), True):
            try:
                await self._engine.pull(reference, self._auth(reference), progress.event)
            except EngineError as error:
                text = str(error)
                missing = any(words in text.lower() for words in _NO_SUCH)
                if missing or last:
                    raise ImageFailed(
                        pb.FAILURE_KIND_IMAGE_UNAVAILABLE,
                        f"image {reference} can not be pulled: {text}. Check the reference, and the registry's "
                        "credentials in the agent's registry_auth_file.",
                    ) from error
                log.warning("pull_failed", image=reference, error=text)
                await asyncio.sleep(pause)  # Back-off: a registry that is busy or restarting.
                pause *= 4
            else:
                return

    def _auth(self, reference: str) -> dict[str, str] | None:
        """Credentials of the reference's registry from a config.json of Docker."""
        if self._settings.auth_file is None:
            return None
        registry, _ = docker.auth.resolve_repository_name(reference)
        known = docker.auth.load_config(str(self._settings.auth_file))
        found: dict[str, str] | None = docker.auth.resolve_authconfig(known, registry)
        return found

    async def _python(self, image_id: str, reference: str) -> ReadyImage:
        """The interpreter of an image: looked for once, in a container that can do nothing."""
        known = await self._state.python_of(image_id)
        if known is None:
            known = await self._once(f"python {image_id}", lambda: self._probe(image_id))
            await self._state.save_python(image_id, known)
        if not known["python"]:
            raise ImageFailed(
                pb.FAILURE_KIND_IMAGE_HAS_NO_PYTHON,
                f"image {reference} has no Python {MINIMUM_PYTHON[0]}.{MINIMUM_PYTHON[1]} or later"
                f"{known['seen'] and ': it has ' + known['seen']} (tried {', '.join(_CANDIDATES)}). Use an image with "
                "Python, such as python:3.12-slim.",
            )
        return ReadyImage(image_id, known["python"], known["version"])

    async def _probe(self, image_id: str) -> dict[str, str]:
        seen = ""
        for candidate in _CANDIDATES:
            config = {
                "Image": image_id,
                "Entrypoint": [candidate, "-I", "-c", _PROBE],
                "Cmd": [],
                "Labels": {IMAGE_LABEL: "probe"},
                "HostConfig": {
                    "NetworkMode": "none",
                    "Memory": PROBE_MEMORY_BYTES,
                    "MemorySwap": PROBE_MEMORY_BYTES,
                    "Runtime": "runc",
                    "CapDrop": ["ALL"],
                    "SecurityOpt": ["no-new-privileges"],
                    "PidsLimit": 64,
                },
            }
            try:
                code, output = await self._engine.run_once(config, PROBE_SECONDS)
            except EngineError as error:
                if _is_missing_program(str(error)):
                    continue
                raise
            words = output.decode(errors="replace").split()
            if code == 0 and len(words) >= 3 and words[0].isdigit() and words[1].isdigit():
                version = f"{words[0]}.{words[1]}"
                if (int(words[0]), int(words[1])) >= MINIMUM_PYTHON:
                    return {"python": candidate, "version": version, "seen": version}
                seen = f"Python {version}"
        return {"python": "", "version": "", "seen": seen}

    async def _layer(self, parent: ReadyImage, packages: list[str], tag: str) -> str:
        """Installs packages over an image."""
        existing = await self._engine.image(f"{LAYER_REPOSITORY}:{tag}")
        if existing is not None:
            return str(existing["Id"])
        original = (await self._engine.image(parent.id) or {}).get("Config") or {}
        environment = ["UV_NO_CACHE=1", "UV_LINK_MODE=copy"]
        mounts = [_read_only(Path(find_uv_bin()).resolve(), "/run/outerproduct-uv")]
        if self._settings.ca_bundle is not None:
            mounts.append(_read_only(self._settings.ca_bundle, "/run/outerproduct-ca.pem"))
            environment += ["SSL_CERT_FILE=/run/outerproduct-ca.pem"]
        if self._settings.package_index:
            environment.append(f"UV_DEFAULT_INDEX={self._settings.package_index}")
        config = {
            "Image": parent.id,
            # Debian's Python refuses installs without the flag; in a container there is no system to break.
            "Entrypoint": [
                "/run/outerproduct-uv", "pip", "install", "--python", parent.python, "--system",
                "--break-system-packages", "--no-progress", *packages,
            ],
            "Cmd": [],
            "User": "0:0",
            "Env": environment,
            "Labels": {IMAGE_LABEL: "build"},
            "HostConfig": {
                "NetworkMode": self._settings.network,
                "Runtime": "runc",
                "Mounts": mounts,
                "SecurityOpt": ["no-new-privileges"],
            },
        }  # fmt: skip
        container_id = await self._engine.create("", config)
        try:
            await self._engine.start(container_id)
            code = await asyncio.wait_for(self._engine.wait_exit(container_id), BUILD_SECONDS)
            if code != 0:
                output = b"".join(data for _, data in await asyncio.to_thread(self._output, container_id))
                lines = output.decode(errors="replace").strip().splitlines()[-SHOWN_BUILD_LINES:]
                raise ImageFailed(
                    pb.FAILURE_KIND_IMAGE_BUILD_FAILED,
                    f"`uv pip install {' '.join(packages)}` failed with exit code {code}:\n" + "\n".join(lines),
                )
            restored = {
                name: original.get(name) for name in ("Entrypoint", "Cmd", "Env", "User", "WorkingDir", "Labels")
            }
            await self._engine.commit(container_id, LAYER_REPOSITORY, tag, restored)
        finally:
            await asyncio.shield(self._engine.remove(container_id))
        built = await self._engine.image(f"{LAYER_REPOSITORY}:{tag}")
        if built is None:
            raise ImageFailed(pb.FAILURE_KIND_IMAGE_BUILD_FAILED, f"layer {tag} was committed and is not there")
        return str(built["Id"])

    def _output(self, container_id: str) -> list[tuple[int, bytes]]:
        return list(self._engine.follow_output(container_id))


class PullProgress:
    """Docker's events of a pull as one line: how much of how much, never less than before."""

    def __init__(self, reference: str, detail: Callable[[str], None]) -> None:
        self._reference = reference
        self._detail = detail
        self._layers: dict[str, tuple[int, int]] = {}
        self._most = 0

    def event(self, event: dict[str, Any]) -> None:
        """Takes one event; is called from a thread."""
        progress = event.get("progressDetail") or {}
        if event.get("status") == "Downloading" and progress.get("total"):
            self._layers[event.get("id", "")] = (progress.get("current", 0), progress["total"])
        elif event.get("status") == "Download complete" and event.get("id") in self._layers:
            total = self._layers[event["id"]][1]
            self._layers[event["id"]] = (total, total)
        else:
            return
        done = max(self._most, sum(current for current, _ in self._layers.values()))
        total = sum(whole for _, whole in self._layers.values())
        self._most = done
        self._detail(f"pulling {self._reference}: {done / 1e6:.0f} of {total / 1e6:.0f} MB")


def _read_only(path: Path, target: str) -> dict[str, Any]:
    return {"Type": "bind", "Source": str(path), "Target": target, "ReadOnly": True}


def _is_missing_program(text: str) -> bool:
    lowered = text.lower()
    return (
        "executable file not found" in lowered or "no such file or directory" in lowered or "not a directory" in lowered
    )
