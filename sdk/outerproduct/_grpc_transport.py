"""Straight to the scheduler over gRPC. The only module of the SDK that imports grpc and protobuf."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from outerproduct._errors import BY_CODE, OuterProductError, SchedulerUnavailable
from outerproduct._wire import CHUNK_BYTES, Message

# Read by grpc when it is first imported: without it a fork leaves the child with locks that nobody releases.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "1")

import grpc
from google.protobuf import json_format

from outerproduct.v1 import (
    blob_service_pb2,
    blob_service_pb2_grpc,
    node_service_pb2,
    payload_pb2,
    run_service_pb2,
    run_service_pb2_grpc,
)

log = logging.getLogger("outerproduct")

KEEPALIVE_MILLISECONDS = 30_000
"""Longer than the 20 s that the scheduler allows between pings."""
RETRY_SECONDS = 20.0
"""How long a request is repeated while the scheduler can not be reached: a restart takes less."""
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
SLOW_SECONDS = 600.0
"""Deadline of a transfer of one blob."""

_SERVICES = {
    service.name: service
    for module in (run_service_pb2, node_service_pb2, blob_service_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
}


class GrpcTransport:
    """`base_url` is http://HOST:PORT (plain text, for the loopback interface) or https://HOST:PORT."""

    def __init__(self, base_url: str, api_key: str) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(
                f"base_url={base_url!r} must be http://HOST:PORT or https://HOST:PORT, such as http://127.0.0.1:50051"
            )
        self._address = f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 50051)}"
        self._secure = parts.scheme == "https"
        self._metadata = (("authorization", f"Bearer {api_key}"),)
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._pid = os.getpid()

    def channel(self) -> grpc.Channel:
        """The channel of this process; a forked child gets its own."""
        if self._pid != os.getpid():
            self._lock = threading.Lock()
            self._channel = None
            self._pid = os.getpid()
        with self._lock:
            if self._channel is None:
                options = [
                    ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
                    # Pages of Calls with their outcomes are larger than the 4 MiB that gRPC allows by default.
                    ("grpc.max_receive_message_length", -1),
                    # Without a bound gRPC itself waits up to two minutes before it connects again.
                    ("grpc.max_reconnect_backoff_ms", int(LONGEST_PAUSE_SECONDS * 1000)),
                    # A channel of a forked child must not share the parent's connections.
                    ("grpc.use_local_subchannel_pool", 1),
                ]
                if self._secure:
                    ca_path = os.environ.get("OUTERPRODUCT_CA_CERT")
                    root = None
                    if ca_path:
                        with open(ca_path, "rb") as file:
                            root = file.read()
                    self._channel = grpc.secure_channel(self._address, grpc.ssl_channel_credentials(root), options)
                else:
                    self._channel = grpc.insecure_channel(self._address, options)
            return self._channel

    async def call(self, method: str, request: Message, *, timeout_seconds: float, patient: bool = False) -> Message:
        service_name, _, method_name = method.partition("/")
        descriptor = _SERVICES[service_name].methods_by_name[method_name]
        message = json_format.ParseDict(request, _class_of(descriptor.input_type)())
        loop = asyncio.get_running_loop()
        started = loop.time()
        pause_seconds = FIRST_PAUSE_SECONDS
        warned = False
        while True:
            invoke: Any = self.channel().unary_unary(
                f"/{descriptor.containing_service.full_name}/{descriptor.name}",
                request_serializer=lambda value: value.SerializeToString(),
                response_deserializer=_class_of(descriptor.output_type).FromString,
            )
            try:
                answer = await _as_awaitable(
                    invoke.future(message, timeout=timeout_seconds, metadata=self._metadata), loop
                )
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise self.translated(error) from None
                waited = loop.time() - started
                if not patient and waited > RETRY_SECONDS:
                    raise self.translated(error) from None
                if waited > RETRY_SECONDS and not warned:
                    warned = True
                    log.warning("the scheduler at %s is away; still trying", self._address)
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(pause_seconds * 2, LONGEST_PAUSE_SECONDS)
                continue
            return json_format.MessageToDict(
                answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )

    def translated(self, error: Any) -> Exception:
        """The exception of ours for a gRPC error."""
        code: grpc.StatusCode = error.code()
        details: str = error.details() or code.name
        kind = BY_CODE.get(code.name, OuterProductError)
        if kind is SchedulerUnavailable:
            return SchedulerUnavailable(
                f"The scheduler at {self._address} can not be reached ({details}). Check OUTERPRODUCT_BASE_URL, and "
                "that the scheduler runs (`outerproduct up` on this machine)."
            )
        if kind is OuterProductError:
            return OuterProductError(f"{code.name}: {details}")
        return kind(details)

    async def upload(self, data: bytes, sha256: str) -> None:
        def messages() -> Iterator[blob_service_pb2.UploadBlobRequest]:
            ref = payload_pb2.BlobRef(sha256=sha256, size_bytes=len(data))
            yield blob_service_pb2.UploadBlobRequest(ref=ref)
            view = memoryview(data)
            for start in range(0, len(view), CHUNK_BYTES):
                yield blob_service_pb2.UploadBlobRequest(chunk=bytes(view[start : start + CHUNK_BYTES]))

        def send() -> None:
            stub = blob_service_pb2_grpc.BlobServiceStub(self.channel())
            stub.UploadBlob(messages(), timeout=SLOW_SECONDS, metadata=self._metadata)

        await self._in_thread(send)

    async def download(self, sha256: str, size_bytes: int) -> bytes:
        data = bytearray()

        def fetch() -> None:
            stub = blob_service_pb2_grpc.BlobServiceStub(self.channel())
            # After a lost connection the rest is asked for, not all of it again.
            request = blob_service_pb2.DownloadBlobRequest(sha256=sha256, offset=len(data))
            for piece in stub.DownloadBlob(request, timeout=SLOW_SECONDS, metadata=self._metadata):
                data.extend(piece.chunk)

        await self._in_thread(fetch)
        if len(data) != size_bytes:
            raise OuterProductError(f"blob {sha256} has {len(data)} bytes, {size_bytes} were announced")
        return bytes(data)

    async def _in_thread(self, transfer: Any) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        while True:
            try:
                await asyncio.to_thread(transfer)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE or loop.time() - started > RETRY_SECONDS:
                    raise self.translated(error) from None
                await asyncio.sleep(FIRST_PAUSE_SECONDS)
            else:
                return

    def read_logs(self, request: Message) -> Iterator[Message]:
        offset = int(request.get("offset", 0))
        while True:
            stub = run_service_pb2_grpc.RunServiceStub(self.channel())
            message = run_service_pb2.ReadLogsRequest(
                attempt=request["attempt"], offset=offset, follow=bool(request.get("follow"))
            )
            try:
                for piece in stub.ReadLogs(message, metadata=self._metadata):
                    offset = piece.next_offset
                    yield {"stream": piece.stream, "data": piece.data, "dropped_bytes": piece.dropped_bytes}
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNAVAILABLE and message.follow:
                    threading.Event().wait(LONGEST_PAUSE_SECONDS)
                    continue
                raise self.translated(error) from None
            return

    def close(self) -> None:
        with self._lock:
            if self._channel is not None and self._pid == os.getpid():
                self._channel.close()
            self._channel = None


def _class_of(descriptor: Any) -> Any:
    """The Python class of a message type."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(descriptor)


async def _as_awaitable(call: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """A grpc future, awaited without a thread that waits for it. A cancelled wait cancels the RPC."""
    done = asyncio.Event()
    call.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
    try:
        await done.wait()
    except asyncio.CancelledError:
        call.cancel()
        raise
    return call.result()
