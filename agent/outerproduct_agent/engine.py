"""Docker, as far as the agent needs it: every call on a bounded thread pool and with a deadline, errors typed.

No policy: what is created is decided in container_spec, what an error means for an Attempt in attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import docker
import docker.errors
import requests.exceptions
import structlog

from outerproduct_agent.network import NotBlocked, block_metadata, bridge_of, unblock_metadata

log = structlog.get_logger()

T = TypeVar("T")

THREADS = 32
"""Waits for containers do not take one: they poll."""
CALL_SECONDS = 60.0
"""No single call should take longer; one that does counts as failed, whatever becomes of it."""
PULL_SECONDS = 3600.0
DISCARDED = ("discarded", "without swap", "not support", "not enabled")
"""What Docker's warnings about limits that it ignores have in common."""


class EngineError(Exception):
    """Docker refused, failed or did not answer."""


class NotThere(EngineError):
    """Docker has no such container, image or network."""


class AlreadyThere(EngineError):
    """The name is taken."""


class LimitDiscarded(EngineError):
    """Docker would have run the container without a limit that was asked for."""


@dataclass(frozen=True, slots=True)
class ContainerState:
    """How a container is."""

    id: str
    running: bool
    started: bool
    """Whether it was ever started."""
    pid: int
    exit_code: int
    oom_killed: bool
    error: str
    image: str
    labels: dict[str, str]


class Engine:
    """One Docker engine."""

    def __init__(self, base_url: str | None) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "docker")
        self._client = (
            docker.DockerClient(base_url=base_url, timeout=int(CALL_SECONDS))
            if base_url
            else docker.from_env(timeout=int(CALL_SECONDS))
        )
        self._api = self._client.api
        self._not_blocked = ""

    async def call(self, function: Callable[..., T], *args: Any, seconds: float = CALL_SECONDS, **kwargs: Any) -> T:
        """Runs a blocking function of the docker package. Raises EngineError."""
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            raise EngineError(f"Docker did not answer within {seconds:.0f} s ({function.__name__})") from None
        except docker.errors.NotFound as error:
            raise NotThere(_text(error)) from error
        except docker.errors.APIError as error:
            kind = AlreadyThere if error.status_code == 409 else EngineError
            raise kind(_text(error)) from error
        except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
            raise EngineError(f"Docker can not be reached: {error}. Is the Docker service running?") from error

    async def version(self) -> str:
        """Docker's version."""
        answer = await self.call(self._client.version)
        return str(answer["Version"])

    async def info(self) -> dict[str, Any]:
        """`docker info`."""
        answer: dict[str, Any] = await self.call(self._client.info)
        return answer

    async def ensure_network(self, name: str) -> None:
        """A bridge whose containers reach neither each other nor a cloud's metadata service."""
        try:
            network = await self.call(self._client.networks.get, name)
        except NotThere:
            try:
                network = await self.call(
                    self._client.networks.create,
                    name,
                    driver="bridge",
                    options={"com.docker.network.bridge.enable_icc": "false"},
                    labels={"outerproduct.network": name},
                )
            except AlreadyThere:
                network = await self.call(self._client.networks.get, name)
        try:
            await self.call(block_metadata, bridge_of(network.attrs))
            problem = ""
        except NotBlocked as error:
            problem = str(error)
        if problem and problem != self._not_blocked:
            log.warning("cloud_metadata_not_blocked", network=name, reason=problem)
        self._not_blocked = problem

    async def remove_network(self, name: str) -> None:
        """Harmless when it is not there."""
        try:
            network = await self.call(self._client.networks.get, name)
            await self.call(network.remove)
        except NotThere:
            return
        with suppress(NotBlocked):  # Then there are no rules to take away.
            await self.call(unblock_metadata, bridge_of(network.attrs))

    async def create(self, name: str, config: dict[str, Any]) -> str:
        """The new container's id. Raises LimitDiscarded instead of running without a limit."""
        answer = await self.call(self._api.create_container_from_config, config, name)
        container_id = str(answer["Id"])
        for warning in answer.get("Warnings") or ():
            if any(word in warning.lower() for word in DISCARDED):
                await self.remove(container_id)
                raise LimitDiscarded(
                    f"Docker would not enforce a limit: {warning}. Enable the controller in the kernel (swap "
                    "accounting: swapaccount=1 on the kernel's command line) or the cgroup delegation."
                )
        return container_id

    async def start(self, container_id: str) -> None:
        await self.call(self._api.start, container_id)

    async def inspect(self, name: str) -> ContainerState | None:
        """None when there is no such container."""
        try:
            found = await self.call(self._api.inspect_container, name)
        except NotThere:
            return None
        state = found["State"]
        return ContainerState(
            id=found["Id"],
            running=bool(state["Running"]),
            started=not state["StartedAt"].startswith("0001"),
            pid=int(state["Pid"]),
            exit_code=int(state["ExitCode"]),
            oom_killed=bool(state["OOMKilled"]),
            error=state.get("Error", ""),
            image=found["Image"],
            labels=found["Config"].get("Labels") or {},
        )

    async def list_containers(self, label: str) -> dict[str, dict[str, str]]:
        """Ids of containers with a label (NAME or NAME=VALUE), running or not, and all their labels."""
        found = await self.call(self._api.containers, all=True, filters={"label": label})
        return {entry["Id"]: entry.get("Labels") or {} for entry in found}

    async def signal(self, container_id: str, name: str) -> None:
        """Harmless when it has ended."""
        try:
            await self.call(self._api.kill, container_id, name)
        except (NotThere, AlreadyThere):
            return

    async def remove(self, container_id: str) -> None:
        """Kills it if need be; harmless when it is gone."""
        try:
            await self.call(self._api.remove_container, container_id, force=True, v=True)
        except NotThere:
            return
        except AlreadyThere:
            # Another removal is under way: it is over when the container is gone.
            await self.wait_gone(container_id)

    async def wait_gone(self, container_id: str) -> None:
        async with asyncio.timeout(CALL_SECONDS):
            # Docker has no event that one could wait for without missing it.
            while await self.inspect(container_id) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def wait_exit(self, container_id: str) -> int:
        """The exit code, when it has ended. Raises NotThere when it is removed meanwhile."""
        answer = await self._in_thread_of_its_own(lambda: self._api.wait(container_id, timeout=None))
        return int(answer["StatusCode"])

    async def killed_from_outside(self, container_id: str, since: float) -> bool:
        """Whether somebody asked Docker to kill it (the agent itself asks only when it ends an Attempt)."""

        def look() -> bool:
            events = self._api.events(
                since=int(since),
                until=int(time.time()) + 1,
                filters={"container": container_id, "event": ["kill", "stop"]},
                decode=True,
            )
            return any(True for _ in events)

        return await self.call(look)

    def follow_output(self, container_id: str) -> Iterator[tuple[int, bytes]]:
        """Pieces of output (1: stdout, 2: stderr) from the beginning until the container has ended. Blocks; for a
        thread of its own. The stream is multiplexed: https://docs.docker.com/reference/api/engine/ (attach)."""
        url = f"{self._api.base_url}/v{self._api.api_version}/containers/{container_id}/logs"
        parameters = {"stdout": 1, "stderr": 1, "follow": 1}
        with self._api.get(url, params=parameters, stream=True, timeout=None) as response:
            response.raise_for_status()
            raw = response.raw
            while len(header := _exactly(raw, 8)) == 8:
                yield header[0], _exactly(raw, int.from_bytes(header[4:], "big"))

    async def _in_thread_of_its_own(self, function: Callable[[], T]) -> T:
        """For calls that last as long as a container: they must not use up the pool."""
        loop = asyncio.get_running_loop()
        threads = ThreadPoolExecutor(1, "docker-wait")
        try:
            return await loop.run_in_executor(threads, function)
        except docker.errors.NotFound as error:
            raise NotThere(_text(error)) from error
        except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
            raise EngineError(f"Docker can not be reached: {error}") from error
        finally:
            threads.shutdown(wait=False)

    # Images.

    async def image(self, reference: str) -> dict[str, Any] | None:
        """`docker image inspect`; None when it is not here."""
        try:
            found: dict[str, Any] = await self.call(self._api.inspect_image, reference)
        except NotThere:
            return None
        return found

    async def pull(
        self, reference: str, auth: dict[str, str] | None, progress: Callable[[dict[str, Any]], None]
    ) -> None:
        """Pulls one tag or digest; `progress` gets Docker's own events, from a thread."""
        repository, tag = split_reference(reference)

        def pull() -> None:
            for event in self._api.pull(repository, tag=tag, auth_config=auth, stream=True, decode=True):
                if "error" in event:
                    raise docker.errors.APIError(event["error"])
                progress(event)

        await self.call(pull, seconds=PULL_SECONDS)

    async def run_once(self, config: dict[str, Any], seconds: float) -> tuple[int, bytes]:
        """Creates, runs and removes a container: exit code and output."""
        container_id = await self.create("", config)
        try:
            await self.start(container_id)
            answer = await self.call(self._api.wait, container_id, seconds=seconds)
            output: Any = await self.call(self._api.logs, container_id)
            return int(answer["StatusCode"]), output
        finally:
            await asyncio.shield(self.remove(container_id))

    async def commit(self, container_id: str, repository: str, tag: str, config: dict[str, Any]) -> None:
        """Makes an image of a container's files."""
        await self.call(self._api.commit, container_id, repository=repository, tag=tag, conf=config, seconds=600)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()


def split_reference(reference: str) -> tuple[str, str]:
    """Repository, and tag or digest ("latest" when there is none)."""
    if "@" in reference:
        repository, _, digest = reference.partition("@")
        return repository, digest
    head, colon, tail = reference.rpartition(":")
    if colon and "/" not in tail:
        return head, tail
    return reference, "latest"


def _exactly(raw: Any, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = raw.read(count - len(data))
        if not piece:
            break
        data += piece
    return data


def _text(error: docker.errors.APIError) -> str:
    return str(error.explanation or error)
