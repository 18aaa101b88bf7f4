"""BlobService: bytes in and out, in chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from outerproduct.v1 import blob_service_pb2, blob_service_pb2_grpc, payload_pb2
from outerproduct_scheduler.adapters import streaming, unary
from outerproduct_scheduler.blobs import BlobStore
from outerproduct_scheduler.errors import InvalidArgument

MAX_BATCH = 1000


class BlobService(blob_service_pb2_grpc.BlobServiceServicer):
    """See proto/outerproduct/v1/blob_service.proto."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs

    @unary
    async def FindMissingBlobs(  # noqa: N802
        self, request: blob_service_pb2.FindMissingBlobsRequest, context: Any
    ) -> blob_service_pb2.FindMissingBlobsResponse:
        if not 1 <= len(request.blobs) <= MAX_BATCH:
            raise InvalidArgument(f"blobs: 1 to {MAX_BATCH} are taken, {len(request.blobs)} came")
        missing = [ref for ref in request.blobs if not self._blobs.has(ref.sha256, ref.size_bytes)]
        return blob_service_pb2.FindMissingBlobsResponse(missing=missing)

    @unary
    async def UploadBlob(  # noqa: N802
        self, request: AsyncIterator[blob_service_pb2.UploadBlobRequest], context: Any
    ) -> payload_pb2.BlobRef:
        first = await anext(request, None)
        if first is None or first.WhichOneof("content") != "ref":
            raise InvalidArgument("the first message of an upload must have `ref`: digest and size of what follows")
        ref = first.ref
        if not self._blobs.has(ref.sha256, ref.size_bytes):
            await self._blobs.store(ref.sha256, ref.size_bytes, _chunks(request))
        return ref

    @streaming
    async def DownloadBlob(  # noqa: N802
        self, request: blob_service_pb2.DownloadBlobRequest, context: Any
    ) -> AsyncIterator[blob_service_pb2.DownloadBlobResponse]:
        async for chunk in self._blobs.read(request.sha256, request.offset):
            yield blob_service_pb2.DownloadBlobResponse(chunk=chunk)


async def _chunks(requests: AsyncIterator[blob_service_pb2.UploadBlobRequest]) -> AsyncIterator[bytes]:
    async for message in requests:
        if message.WhichOneof("content") != "chunk":
            raise InvalidArgument("an upload has one `ref`, then chunks")
        yield message.chunk
