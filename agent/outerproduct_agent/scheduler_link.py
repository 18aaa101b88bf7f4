"""The channel to the scheduler, and the RPCs on it besides the stream: blobs, and what functions ask for."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format, message_factory

from outerproduct.v1 import (
    blob_service_pb2,
    blob_service_pb2_grpc,
    node_service_pb2,
    payload_pb2,
    run_service_pb2,
)

CHUNK_BYTES = 1024**2
TRANSFER_SECONDS = 3600.0
FORWARD_SECONDS = 90.0
PAUSE_SECONDS = 1.0

_FORWARDED = {
    f"{service.name}/{method.name}": method
    for module in (run_service_pb2, node_service_pb2, blob_service_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if service.name == "RunService"
    or f"{service.name}/{method.name}"
    in {
        "NodeService/ListNodes",
        "BlobService/FindMissingBlobs",
    }
    if not method.server_streaming and not method.client_streaming
}
"""Methods that functions may call; the scheduler checks what the Attempt's credential may see."""


class Refused(Exception):
    """An answer of the scheduler that is an error: status name and message, as it goes on to the function."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class SchedulerLink:
    """One channel, shared by everything."""

    def __init__(self, address: str, token: str, ca: bytes | None) -> None:
        options = [
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 5_000),
        ]
        if ca is None:
            self.channel = grpc.aio.insecure_channel(address, options)
        else:
            self.channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca), options)
        self.metadata = (("authorization", f"Bearer {token}"),)
        self._blobs: Any = blob_service_pb2_grpc.BlobServiceStub(self.channel)

    async def close(self) -> None:
        await self.channel.close()

    async def forward(self, method: str, request_json: bytes, token: str) -> bytes:
        """A function's RPC with its Attempt's credential; protobuf JSON in and out. Raises Refused."""
        descriptor = _FORWARDED.get(method)
        if descriptor is None:
            raise Refused("PERMISSION_DENIED", f"{method[:100]} can not be called from inside a container")
        request_class = message_factory.GetMessageClass(descriptor.input_type)
        answer_class = message_factory.GetMessageClass(descriptor.output_type)
        try:
            request = json_format.Parse(request_json, request_class())
        except (json_format.ParseError, ValueError) as error:
            raise Refused("INVALID_ARGUMENT", f"{method}: {error}") from error
        invoke: Any = self.channel.unary_unary(
            f"/{descriptor.containing_service.full_name}/{descriptor.name}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=answer_class.FromString,
        )
        try:
            answer = await invoke(request, timeout=FORWARD_SECONDS, metadata=(("authorization", f"Bearer {token}"),))
        except grpc.aio.AioRpcError as error:
            raise Refused(error.code().name, error.details() or error.code().name) from error
        return json_format.MessageToJson(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=None
        ).encode()

    async def download(self, ref: payload_pb2.BlobRef, target: Path) -> None:
        """A blob into a file, checked; goes on after lost connections until the scheduler is back.

        Raises Refused when the scheduler does not have it.
        """
        temporary = target.with_name(target.name + ".part")
        while True:
            digest = hashlib.sha256()
            try:
                with temporary.open("wb") as file:
                    request = blob_service_pb2.DownloadBlobRequest(sha256=ref.sha256)
                    async for piece in self._blobs.DownloadBlob(
                        request, timeout=TRANSFER_SECONDS, metadata=self.metadata
                    ):
                        digest.update(piece.chunk)
                        await asyncio.to_thread(file.write, piece.chunk)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise Refused(error.code().name, error.details() or "") from error
                await asyncio.sleep(PAUSE_SECONDS)  # Back-off while the scheduler is away.
                continue
            if digest.hexdigest() != ref.sha256:
                raise Refused("DATA_LOSS", f"blob {ref.sha256} came with another content")
            temporary.replace(target)
            return

    async def upload(self, source: Path, ref: payload_pb2.BlobRef) -> None:
        """A file as a blob; goes on until the scheduler has it."""
        while True:
            try:
                await self._blobs.UploadBlob(_messages(source, ref), timeout=TRANSFER_SECONDS, metadata=self.metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise Refused(error.code().name, error.details() or "") from error
                await asyncio.sleep(PAUSE_SECONDS)  # Back-off while the scheduler is away.
                continue
            return


async def _messages(source: Path, ref: payload_pb2.BlobRef) -> AsyncIterator[blob_service_pb2.UploadBlobRequest]:
    yield blob_service_pb2.UploadBlobRequest(ref=ref)
    file = await asyncio.to_thread(source.open, "rb")
    with file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield blob_service_pb2.UploadBlobRequest(chunk=chunk)
