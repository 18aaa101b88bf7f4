"""OuterProductClient: everything a program asks the scheduler for."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, overload

from outerproduct import _source, _wire
from outerproduct._blocking import Blocking, elsewhere, run_blocking, run_elsewhere
from outerproduct._credentials import SOCKET_VARIABLE, find_credentials
from outerproduct._functions import PYTHON_VERSION, FunctionPreparer, PreparedCall
from outerproduct._handles import (
    Attempt,
    Call,
    Run,
    attempt_of,
    call_of,
    run_of,
)
from outerproduct._image import Image, LocalFiles, check_local_files
from outerproduct._node import Node, node_of
from outerproduct._outcome import StoredOutcome, fetch_outcome
from outerproduct._resources import ComputeSpec, compute_spec
from outerproduct._retries import RetryStrategy
from outerproduct._transport import Transport
from outerproduct._wire import Message

if TYPE_CHECKING:
    from typing import Unpack

    from outerproduct._child_indices import ChildIndices

T = TypeVar("T")

REQUEST_SECONDS = 60.0
"""Deadline of one request; waits are made of several."""
BATCH_CALLS = 200
"""Calls created by one request of `map`."""
BATCH_BYTES = 2 * 1024**2
"""Bytes of inline payloads in one request of `map`: base64 of them stays below the 4 MiB of a frame to the agent."""
MAP_WINDOW = 10_000
"""Invocations of one `map` that are submitted and not yet yielded. Beyond it inputs are taken as results are, so that
an endless generator of inputs does not fill the scheduler."""
MAP_WAIT_CALLS = 8
"""Calls that one long poll of `map` asks for: base64 of their inline results stays below the 4 MiB of a frame from the
agent."""
MAX_PAGE = 1000

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED_ENV = frozenset({"NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"})
LOCAL_FILES_VARIABLE = "OUTERPRODUCT_LOCAL_FILES"
"""Blobs of the module's local files, for child Calls that name the same Images inside the container."""


class OuterProductClient:
    """Made by `op.init()`. May be shared by threads and survives a fork."""

    LONG_POLL_SECONDS = 30.0

    def __init__(self, transport: Transport, attempt_name: str | None = None) -> None:
        self._transport = transport
        self._attempt_name = attempt_name
        self._child_indices = _child_indices() if attempt_name else None
        self._uploaded: set[str] = set()
        self.run = _RunMethod(self)
        self.map = _MapMethod(self)

    def __reduce__(self) -> tuple[object, ...]:
        """A client that travels with a function becomes the client of where it arrives; no key travels."""
        return init, ()

    # Who one is.

    @property
    def attempt(self) -> str | None:
        """Full name of the Attempt that this program runs in; None outside a container."""
        return self._attempt_name

    @property
    def call_id(self) -> str | None:
        """Full name of its Call; None outside a container."""
        return self._attempt_name.rpartition("/attempts/")[0] if self._attempt_name else None

    @property
    def run_id(self) -> str | None:
        """Full name of its Run; None outside a container."""
        return self._attempt_name.partition("/calls/")[0] if self._attempt_name else None

    @elsewhere
    async def me(self) -> Mapping[str, str]:
        """`name` and `role` of the credential."""
        return await self._rpc("RunService/GetMe", {})

    async def __aenter__(self) -> OuterProductClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends its connections."""
        self._transport.close()

    # Runs.

    async def _get_run(self, run: str | Run[Any]) -> Run[Any]:
        return run_of(await self._rpc("RunService/GetRun", {"name": run_name(run)}), self)

    async def _list_runs(self, page_size: int | None = None) -> list[Run[Any]]:
        messages = await self._pages("RunService/ListRuns", "runs", {}, page_size)
        return [run_of(message, self) for message in messages]

    async def _cancel_run(self, run: str | Run[Any]) -> Run[Any]:
        return run_of(await self._rpc("RunService/CancelRun", {"name": run_name(run)}), self)

    get_run = Blocking(_get_run)
    """The Run of a name, an id or a handle. Raises NotFound."""
    list_runs = Blocking(_list_runs)
    """Runs, newest first: the first `page_size`, or all."""
    cancel_run = Blocking(_cancel_run)
    """Asks for the end of a Run; harmless when it has ended."""

    # Calls and Attempts.

    @elsewhere
    async def get_call(self, name: str | Call[Any]) -> Call[Any]:
        """The Call of a full name or a handle. Raises NotFound."""
        return call_of(await self._rpc("RunService/GetCall", {"name": full_name(name)}), self)

    @elsewhere
    async def list_calls(
        self,
        run: str | Run[Any],
        page_size: int | None = None,
        parent_call: str | Call[Any] | None = None,
    ) -> list[Call[Any]]:
        """Calls of a Run in order of creation; with `parent_call` only its children."""
        parent = full_name(parent_call) if parent_call is not None else ""
        return await self._list_calls(run_name(run), parent_call=parent, page_size=page_size)

    @elsewhere
    async def cancel_call(self, name: str | Call[Any]) -> Call[Any]:
        """Asks for the end of a Call and its descendants; harmless when it has ended."""
        return call_of(await self._rpc("RunService/CancelCall", {"name": full_name(name)}), self)

    @elsewhere
    async def get_attempt(self, name: str | Attempt[Any]) -> Attempt[Any]:
        """The Attempt of a full name or a handle. Raises NotFound."""
        return attempt_of(await self._rpc("RunService/GetAttempt", {"name": full_name(name)}), self)

    @elsewhere
    async def list_attempts(self, call: str | Call[Any], page_size: int | None = None) -> list[Attempt[Any]]:
        """Attempts of a Call in order of their numbers."""
        return await self._list_attempts(full_name(call), page_size)

    # Nodes.

    async def _list_nodes(self) -> list[Node]:
        return [node_of(message) for message in await self._pages("NodeService/ListNodes", "nodes", {}, None)]

    list_nodes = Blocking(_list_nodes)
    """Nodes that can run Calls now."""

    # What the above is made of.

    async def _rpc(self, method: str, request: Message) -> Message:
        return await self._transport.call(method, request, timeout_seconds=REQUEST_SECONDS)

    async def _wait_calls(self, names: list[str], timeout_seconds: float) -> Message:
        return await self._transport.call(
            "RunService/WaitCalls",
            {"names": names, "timeout_seconds": timeout_seconds},
            timeout_seconds=timeout_seconds + REQUEST_SECONDS,
            patient=True,
        )

    async def _pages(self, method: str, field: str, request: Message, limit: int | None) -> list[Message]:
        """All pages, or as many as give `limit` entries."""
        found: list[Message] = []
        token = ""
        while True:
            size = MAX_PAGE if limit is None else min(MAX_PAGE, limit - len(found))
            answer = await self._rpc(method, {**request, "page_size": size, "page_token": token})
            found += answer[field]
            token = answer.get("next_page_token", "")
            if not token or (limit is not None and len(found) >= limit):
                return found

    async def _list_calls(self, run: str, *, parent_call: str = "", page_size: int | None = None) -> list[Call[Any]]:
        request = {"run": run, "parent_call": parent_call}
        return [call_of(m, self) for m in await self._pages("RunService/ListCalls", "calls", request, page_size)]

    async def _list_attempts(self, call: str, page_size: int | None = None) -> list[Attempt[Any]]:
        messages = await self._pages("RunService/ListAttempts", "attempts", {"call": call}, page_size)
        return [attempt_of(message, self) for message in messages]

    async def _submit(self, specs: list[tuple[int, Message]]) -> list[Run[Any] | Call[Any]]:
        """Creates Runs, or child Calls inside a container. Numbers are child indices, unused outside."""
        if self._attempt_name:
            calls = [{"child_index": index, "spec": spec} for index, spec in specs]
            answer = await self._rpc("RunService/CreateCalls", {"calls": calls})
            return [call_of(message, self) for message in answer["calls"]]
        runs = [{"request_id": str(uuid.uuid4()), "spec": spec} for _, spec in specs]
        answer = await self._rpc("RunService/CreateRuns", {"runs": runs})
        return [run_of(message, self) for message in answer["runs"]]

    def _claim_child_index(self) -> int:
        """The next child index inside a container; 0 outside, where Calls have no place among others."""
        return 0 if self._child_indices is None else self._child_indices.claim()

    async def _call_spec(self, settings: _Settings, prepared: PreparedCall) -> Message:
        """The spec of one Call; everything large is uploaded."""
        function: Message = {
            "qualified_name": prepared.qualified_name,
            "by_value": prepared.by_value,
            "python_version": PYTHON_VERSION,
            "wants_client": prepared.wants_client,
            "source_text": prepared.source_text,
        }
        if prepared.by_value:
            function["pickled"] = await self._payload(prepared.pickled_function)
        if prepared.source:
            function["source"] = await self._store(prepared.source)
        return {
            **settings.message,
            "function": function,
            "arguments": await self._payload(prepared.pickled_arguments),
            "argument_previews": [{"name": name, "value": value} for name, value in prepared.previews],
        }

    async def _payload(self, data: bytes) -> Message:
        if len(data) <= _wire.INLINE_BYTES:
            return _wire.inline(data)
        return {"blob": await self._store(data)}

    async def _store(self, data: bytes) -> Message:
        """Uploads a blob, unless it is stored already."""
        ref = _wire.blob_ref(data)
        digest = ref["sha256"]
        if digest not in self._uploaded:
            answer = await self._rpc("BlobService/FindMissingBlobs", {"blobs": [ref]})
            if answer["missing"]:
                await self._transport.upload(data, digest)
            self._uploaded.add(digest)
        return ref

    async def _local_files(self, files: LocalFiles) -> Message:
        """The blob of a local file or folder. Inside a container: the one that the caller's program has uploaded."""
        if files.local_path in self._known_local_files():
            return self._known_local_files()[files.local_path]
        check_local_files(files)
        path = Path(files.local_path)
        read = _source.folder_archive if files.is_directory else Path.read_bytes
        return await self._store(await asyncio.to_thread(read, path))

    def _known_local_files(self) -> dict[str, Message]:
        """Local path → blob, of what the caller's program has uploaded; nothing outside a container."""
        if not self._attempt_name:
            return {}
        known: dict[str, Message] = json.loads(os.environ.get(LOCAL_FILES_VARIABLE, "{}"))
        return known

    async def _image(self, image: Image) -> Message:
        mounts = []
        for files in image.mounts:
            mode = 0
            if not files.is_directory and os.path.exists(files.local_path):
                mode = os.stat(files.local_path).st_mode & 0o777
            mounts.append(
                {
                    "remote_path": files.remote_path,
                    "content": await self._local_files(files),
                    "is_directory": files.is_directory,
                    "mode": mode or 0o644,
                }
            )
        return {
            "base": image.base,
            "layers": [{"packages": list(packages)} for packages in image.layers],
            "mounts": mounts,
        }

    async def _files_of_module_images(self, fn: Callable[..., Any]) -> str:
        """Uploads the files of every module-level Image of the function's module, so that its children can name
        those Images; the answer is for LOCAL_FILES_VARIABLE."""
        module = sys.modules.get(getattr(fn, "__module__", "") or "")
        images = [value for value in vars(module).values() if isinstance(value, Image)] if module else []
        files = {mount.local_path: mount for image in images for mount in image.mounts}
        known = self._known_local_files()
        for path, mount in files.items():
            # What is not there is an error for the Call that names the Image, and for no other.
            if os.path.exists(path):
                known[path] = await self._local_files(mount)
        return json.dumps(known, sort_keys=True) if known else ""


class _Settings:
    """What all Calls of one `run` or `map` share, checked before anything is sent."""

    def __init__(
        self,
        *,
        compute: ComputeSpec,
        image: object,
        name: object,
        env_vars: Mapping[str, object] | None,
        volumes: object,
        retry_strategy: object,
        timeout_seconds: object,
        priority: object,
        labels: Mapping[str, str] | None,
        node_labels: Mapping[str, str] | None,
        tolerate_oom_kills: object,
    ) -> None:
        if not isinstance(image, Image):
            raise TypeError(f'image={image!r} must be an op.Image, such as op.Image.from_registry("python:3.12-slim")')
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name={name!r} must be a str, a label for people")
        if volumes:
            raise ValueError("volumes: this version has none yet. Pass data as arguments, or with Image.add_local_dir.")
        if retry_strategy is not None and not isinstance(retry_strategy, RetryStrategy):
            raise TypeError(f"retry_strategy={retry_strategy!r} must be an op.RetryStrategy or None")
        if isinstance(priority, bool) or not isinstance(priority, int) or not -1000 <= priority <= 1000:
            raise ValueError(f"priority={priority!r} must be a whole number from -1000 to 1000; higher goes first")
        self.image = image
        self.message: Message = {
            "compute": {
                "cpus": compute.cpus,
                "memory_bytes": str(compute.memory_bytes),
                "accelerator": compute.accelerator,
                "accelerator_count": compute.accelerator_count,
            },
            "display_name": name or "",
            "env_vars": _checked_env(env_vars or {}),
            "retry_strategy": {"max_attempts": (retry_strategy.max_attempts if retry_strategy else None) or 0},
            "timeout_seconds": _checked_timeout(timeout_seconds),
            "priority": priority,
            "labels": _checked_labels("labels", labels or {}),
            "node_labels": _checked_labels("node_labels", node_labels or {}),
            "tolerate_oom_kills": bool(tolerate_oom_kills),
        }

    async def complete(self, client: OuterProductClient, fn: Callable[..., Any]) -> None:
        """Uploads the Image's local files and puts the Image into the message; nothing when it has done so already."""
        if "image" in self.message:
            return
        self.message["image"] = await client._image(self.image)
        files = await client._files_of_module_images(fn)
        if files:
            self.message["env_vars"] = {**self.message["env_vars"], LOCAL_FILES_VARIABLE: files}


def _checked_env(env_vars: Mapping[Any, Any]) -> dict[str, str]:
    for name, value in env_vars.items():
        if not isinstance(name, str) or not _ENV_NAME.fullmatch(name):
            raise ValueError(f"env_vars: {name!r} is not a name: letters, digits and _, not beginning with a digit")
        if name in RESERVED_ENV or name.startswith("OUTERPRODUCT_"):
            raise ValueError(f"env_vars: {name} is set by the agent and says which GPUs or agent the container has")
        # The value itself may be a secret: only its type is named.
        if not isinstance(value, str):
            raise TypeError(f"env_vars: the value of {name} must be a str, not {type(value).__name__}")
        if "\0" in value:
            raise ValueError(f"env_vars: the value of {name} holds a NUL character")
    return {name: str(value) for name, value in env_vars.items()}


def _checked_timeout(value: object) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"timeout_seconds={value!r} must be a number of seconds above 0, or None for no limit")
    return float(value)


def _checked_labels(field: str, labels: Mapping[Any, Any]) -> dict[str, str]:
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str) or not name:
            raise TypeError(f"{field}: {name!r}: {value!r} must be a str with a str")
    return dict(labels)


class MapSettings(TypedDict, total=False):
    """Parameters that `run` and `map` share; `run` documents them."""

    name: str | None
    cpu: int
    memory_bytes: int | None
    gpu: int | None
    gpu_type: str | None
    volumes: Mapping[str, object] | None
    env_vars: Mapping[str, str] | None
    retry_strategy: RetryStrategy | None
    timeout_seconds: float | None
    priority: int
    labels: Mapping[str, str] | None
    node_labels: Mapping[str, str] | None
    tolerate_oom_kills: bool


class CallSettings(MapSettings, total=False):
    """Parameters of `run` besides `fn` and `image`."""

    args: Iterable[Any]
    kwargs: Mapping[str, Any] | None


class _RunMethod:
    """`client.run`: see `__call__`."""

    def __init__(self, client: OuterProductClient) -> None:
        self._client = client

    @overload
    def __call__(
        self, *, fn: Callable[..., Coroutine[Any, Any, T]], image: Image, **settings: Unpack[CallSettings]
    ) -> Run[T] | Call[T]: ...
    @overload
    def __call__(self, *, fn: Callable[..., T], image: Image, **settings: Unpack[CallSettings]) -> Run[T] | Call[T]: ...
    def __call__(
        self,
        *,
        fn: Callable[..., Any],
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        image: Image,
        cpu: int = 1,
        memory_bytes: int | None = None,
        gpu: int | None = None,
        gpu_type: str | None = None,
        volumes: Mapping[str, object] | None = None,
        env_vars: Mapping[str, str] | None = None,
        retry_strategy: RetryStrategy | None = None,
        timeout_seconds: float | None = None,
        priority: int = 0,
        labels: Mapping[str, str] | None = None,
        node_labels: Mapping[str, str] | None = None,
        tolerate_oom_kills: bool = False,
    ) -> Run[Any] | Call[Any]:
        """Submits `fn(*args, **kwargs)` and returns at once: a Run, or inside a container a child Call.

        `cpu`: logical CPUs, all on one machine. `memory_bytes`: hard limit in bytes that includes /dev/shm; 2 GiB per
        CPU when left out. `gpu_type` names a GPU ("L4", "A100-80GB"), `gpu` counts; a type alone means one, a count
        alone that many of any one type. `timeout_seconds` bounds the run time of an Attempt. `priority`: higher goes
        first. `labels` are kept with the Call; `node_labels` must be on the node. `tolerate_oom_kills`: a process that
        the kernel kills for memory does not fail the Call as long as the function itself goes on.

        Raises TypeError or ValueError for a parameter that can not be right, UnsupportedConfiguration when no node
        could ever hold it, AccessDenied, SchedulerUnavailable.
        """
        return run_blocking(self._start(**_keywords(locals())))

    @overload
    def aio(
        self, *, fn: Callable[..., Coroutine[Any, Any, T]], image: Image, **settings: Unpack[CallSettings]
    ) -> Awaitable[Run[T] | Call[T]]: ...
    @overload
    def aio(
        self, *, fn: Callable[..., T], image: Image, **settings: Unpack[CallSettings]
    ) -> Awaitable[Run[T] | Call[T]]: ...
    def aio(self, **parameters: Any) -> Awaitable[Run[Any] | Call[Any]]:
        """The same, to be awaited. The child index is claimed at the call, before anything is awaited."""
        return run_elsewhere(self._start(**parameters))

    def _start(
        self,
        *,
        fn: Callable[..., Any],
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Coroutine[Any, Any, Run[Any] | Call[Any]]:
        """Checks everything, then gives the coroutine that submits."""
        client = self._client
        checked = _settings(**settings)
        prepared = FunctionPreparer(fn).prepare(tuple(args), {} if kwargs is None else kwargs)
        index = client._claim_child_index()

        async def submit() -> Run[Any] | Call[Any]:
            await checked.complete(client, fn)
            [handle] = await client._submit([(index, await client._call_spec(checked, prepared))])
            return handle

        return submit()


class _MapMethod:
    """`client.map`: see `__call__`."""

    def __init__(self, client: OuterProductClient) -> None:
        self._client = client

    @overload
    def __call__(
        self,
        fn: Callable[..., Coroutine[Any, Any, T]],
        inputs: Iterable[Any],
        *additional_inputs: Iterable[Any],
        image: Image,
        **settings: Unpack[MapSettings],
    ) -> Iterator[T]: ...
    @overload
    def __call__(
        self,
        fn: Callable[..., T],
        inputs: Iterable[Any],
        *additional_inputs: Iterable[Any],
        image: Image,
        **settings: Unpack[MapSettings],
    ) -> Iterator[T]: ...
    def __call__(
        self,
        fn: Callable[..., Any],
        inputs: Iterable[Any],
        *additional_inputs: Iterable[Any],
        image: Image,
        **settings: Unpack[MapSettings],
    ) -> Iterator[Any]:
        """Calls `fn` once for each of the zipped inputs, each in a container of its own, and yields the results in
        input order. Stops at the shortest iterable. Takes the parameters of `run`, except `args` and `kwargs`.

        The first step submits every invocation (with more than 10,000 unfinished ones, the rest as results are
        taken). A failure raises when its place is reached. Closing the iterator leaves submitted work running.
        """
        under_way: _MapUnderWay[Any] = self._start(fn, (inputs, *additional_inputs), image, settings)

        def steps() -> Iterator[Any]:
            while True:
                while batch := under_way.take_batch():
                    run_blocking(under_way.submit(batch))
                if under_way.is_done():
                    return
                yield run_blocking(under_way.next_outcome()).value()

        return steps()

    @overload
    def aio(
        self,
        fn: Callable[..., Coroutine[Any, Any, T]],
        inputs: Iterable[Any],
        *additional_inputs: Iterable[Any],
        image: Image,
        **settings: Unpack[MapSettings],
    ) -> AsyncIterator[T]: ...
    @overload
    def aio(
        self,
        fn: Callable[..., T],
        inputs: Iterable[Any],
        *additional_inputs: Iterable[Any],
        image: Image,
        **settings: Unpack[MapSettings],
    ) -> AsyncIterator[T]: ...
    def aio(
        self,
        fn: Callable[..., Any],
        inputs: Iterable[Any],
        *additional_inputs: Iterable[Any],
        image: Image,
        **settings: Unpack[MapSettings],
    ) -> AsyncIterator[Any]:
        """The same as an async iterator."""
        under_way: _MapUnderWay[Any] = self._start(fn, (inputs, *additional_inputs), image, settings)

        async def steps() -> AsyncIterator[Any]:
            while True:
                while batch := under_way.take_batch():
                    await run_elsewhere(under_way.submit(batch))
                if under_way.is_done():
                    return
                yield (await run_elsewhere(under_way.next_outcome())).value()

        return steps()

    def _start(
        self, fn: Callable[..., Any], inputs: tuple[Iterable[Any], ...], image: Image, settings: MapSettings
    ) -> _MapUnderWay[Any]:
        checked = _settings(image=image, **settings)
        return _MapUnderWay(self._client, fn, zip(*inputs, strict=False), checked)


class _MapUnderWay(Generic[T]):
    """One `map`. Its iterator takes the inputs and unpickles the results; the rest is for the SDK's loop."""

    def __init__(
        self, client: OuterProductClient, fn: Callable[..., T], inputs: Iterator[tuple[Any, ...]], settings: _Settings
    ) -> None:
        self._client = client
        self._fn = fn
        self._preparer = FunctionPreparer(fn)
        self._inputs = inputs
        self._exhausted = False
        self._settings = settings
        self._waiting: deque[str] = deque()
        """Names of Calls whose results were not taken yet, in input order."""
        self._ended: dict[str, Message | None] = {}
        """Outcomes of those among them that are known."""

    def is_done(self) -> bool:
        """Whether every result was taken; true only after `take_batch` gave nothing."""
        return not self._waiting

    def take_batch(self) -> list[tuple[int, PreparedCall]]:
        """The next invocations with their child indices, as many as one request may have; empty when it is the
        results' turn."""
        batch: list[tuple[int, PreparedCall]] = []
        size = 0
        room = min(BATCH_CALLS, MAP_WINDOW - len(self._waiting))
        while not self._exhausted and len(batch) < room and size < BATCH_BYTES:
            args = next(self._inputs, None)
            if args is None:
                self._exhausted = True
                break
            prepared = self._preparer.prepare(args, {})
            size += min(len(prepared.pickled_arguments), _wire.INLINE_BYTES)
            size += min(len(prepared.pickled_function), _wire.INLINE_BYTES) + len(prepared.source_text)
            batch.append((self._client._claim_child_index(), prepared))
        return batch

    async def submit(self, batch: list[tuple[int, PreparedCall]]) -> None:
        """Creates the Calls of a batch."""
        await self._settings.complete(self._client, self._fn)
        specs = [(index, await self._client._call_spec(self._settings, prepared)) for index, prepared in batch]
        for handle in await self._client._submit(specs):
            self._waiting.append(handle.root_call.name if isinstance(handle, Run) else handle.name)

    async def next_outcome(self) -> StoredOutcome[T]:
        """The outcome whose turn it is, once its Call has ended."""
        name = self._waiting[0]
        while name not in self._ended:
            asked = [other for other in islice(self._waiting, MAP_WAIT_CALLS) if other not in self._ended]
            answer = await self._client._wait_calls(asked, self._client.LONG_POLL_SECONDS)
            self._ended.update({call["name"]: call.get("outcome") for call in answer["calls"]})
        outcome = await fetch_outcome(self._ended[name], name, self._client._transport)
        self._ended.pop(self._waiting.popleft())
        return outcome


def _settings(
    *,
    image: object = None,
    name: object = None,
    cpu: object = 1,
    memory_bytes: object = None,
    gpu: object = None,
    gpu_type: object = None,
    volumes: object = None,
    env_vars: Mapping[str, object] | None = None,
    retry_strategy: object = None,
    timeout_seconds: object = None,
    priority: object = 0,
    labels: Mapping[str, str] | None = None,
    node_labels: Mapping[str, str] | None = None,
    tolerate_oom_kills: object = False,
) -> _Settings:
    return _Settings(
        compute=compute_spec(cpu, memory_bytes, gpu, gpu_type),
        image=image,
        name=name,
        env_vars=env_vars,
        volumes=volumes,
        retry_strategy=retry_strategy,
        timeout_seconds=timeout_seconds,
        priority=priority,
        labels=labels,
        node_labels=node_labels,
        tolerate_oom_kills=tolerate_oom_kills,
    )


def _keywords(names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in names.items() if name != "self"}


def full_name(value: object) -> str:
    """The name of a handle, or the text itself."""
    name = getattr(value, "name", value)
    if not isinstance(name, str) or not name:
        raise TypeError(f"{value!r} must be a name or a handle")
    return name


def run_name(value: object) -> str:
    """ "runs/<uuid>" for a name, a bare id or a handle."""
    name = full_name(value)
    return name if name.startswith("runs/") else f"runs/{name}"


def init(api_key: str | None = None, base_url: str | None = None) -> OuterProductClient:
    """A client. No network traffic.

    Credentials: the arguments, else OUTERPRODUCT_API_KEY and OUTERPRODUCT_BASE_URL, else what `outerproduct up` left
    for this user on this machine. Inside a container: a client with the Attempt's own rights.

    Raises RuntimeError that says what to set when there is nothing.
    """
    socket_path = os.environ.get(SOCKET_VARIABLE)
    if socket_path and not (api_key or base_url):
        from outerproduct._socket_transport import SocketTransport

        return _client_in_container(SocketTransport(socket_path))
    credentials = find_credentials(api_key, base_url)
    from outerproduct._grpc_transport import GrpcTransport

    return OuterProductClient(GrpcTransport(credentials.base_url, credentials.api_key))


def _child_indices() -> ChildIndices:
    # Only for containers: outside it may be an operating system that does not have what the module uses.
    from outerproduct._child_indices import ChildIndices

    return ChildIndices()


_in_container: OuterProductClient | None = None


def _client_in_container(transport: Transport) -> OuterProductClient:
    """One per process: child indices are counted by the Attempt, not by each `op.init()`."""
    global _in_container  # noqa: PLW0603
    if _in_container is None:
        _in_container = OuterProductClient(transport, os.environ.get("OUTERPRODUCT_ATTEMPT"))
    return _in_container
