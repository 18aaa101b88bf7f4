"""Values as they travel: protobuf's JSON mapping with the field names of the proto files.

The same form goes to the scheduler (the gRPC transport turns it into messages) and, from inside a container, to the
agent's socket, where no protobuf is needed.
"""

from __future__ import annotations

import base64
import hashlib
from datetime import datetime, timezone
from typing import Any

Message = dict[str, Any]

INLINE_BYTES = 256 * 1024
"""Larger payloads go through BlobService."""
CHUNK_BYTES = 1024**2


def blob_ref(data: bytes) -> Message:
    return {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": str(len(data))}


def inline(data: bytes) -> Message:
    return {"inline": base64.b64encode(data).decode()}


def time_of(text: object) -> datetime | None:
    """RFC 3339 with up to nine digits of a second, as an aware UTC datetime."""
    if not isinstance(text, str) or not text:
        return None
    seconds, _, fraction = text.rstrip("Z").partition(".")
    parsed = datetime.strptime(seconds, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc)
    return parsed.replace(microsecond=int((fraction + "000000")[:6]))


def enum_of(text: object, prefix: str) -> str:
    """ "CALL_STATUS_RUNNING" → "RUNNING"."""
    return str(text or "").removeprefix(prefix) or "UNSPECIFIED"
