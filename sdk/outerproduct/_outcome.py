"""What came out of a Call, as the value or the exception that its waiter gets.

In two steps: `fetch_outcome` gets the bytes, on the SDK's loop; `StoredOutcome.value` unpickles them, where the waiter
is (`_blocking` says why).
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from outerproduct import _serialization
from outerproduct._errors import (
    BY_KIND,
    Failure,
    FunctionNotLoaded,
    FunctionRaised,
    OuterProductError,
    ResultNotSerializable,
    RunFailed,
)
from outerproduct._transport import Transport
from outerproduct._wire import Message, enum_of

T = TypeVar("T")

_WITH_TRACEBACK = frozenset({FunctionRaised, FunctionNotLoaded, ResultNotSerializable})


@dataclass(frozen=True)
class StoredOutcome(Generic[T]):
    """How the Call `name` ended, still as bytes."""

    name: str
    failure: Failure | None
    """None when there is a result."""
    pickled: bytes
    """The result, or the exception; empty for an exception that could not be pickled."""

    def value(self) -> T:
        """The result. Raises the RunFailed that fits when there is none."""
        if self.failure is not None:
            raise self._error(self.failure)
        try:
            result: T = _serialization.loads(self.pickled)
        except Exception as error:
            raise ResultNotSerializable(
                f"{self.name} has completed, but its result can not be unpickled here: {type(error).__name__}: "
                f"{error}. Install what it is made of, or return plain data."
            ) from error
        return result

    def _error(self, failure: Failure) -> RunFailed:
        """The exception for a failure, with the original one as its cause where it can be rebuilt."""
        kind = BY_KIND.get(failure.kind, RunFailed)
        text = f"{self.name}: {failure.message}"
        if failure.traceback and kind in _WITH_TRACEBACK:
            text += f"\n\nIn the container:\n\n{failure.traceback.rstrip()}"
        error = kind(text, failure)
        error.__cause__ = self._original()
        return error

    def _original(self) -> BaseException | None:
        if not self.pickled:
            return None
        try:
            original = _serialization.loads(self.pickled)
        except Exception:  # noqa: BLE001 - a class that is missing here, or any error of its own: the text says it all
            return None
        return original if isinstance(original, BaseException) else None


async def fetch_outcome(outcome: Message | None, name: str, transport: Transport) -> StoredOutcome[Any]:
    """The outcome of a Call that has ended, with its bytes."""
    if not outcome:
        raise RunFailed(f"{name} has ended, and its outcome is no longer stored")
    if "result" in outcome:
        return StoredOutcome(name, None, await _payload_bytes(outcome["result"], transport))
    message = outcome.get("failure") or {}
    failure = Failure(
        kind=enum_of(message.get("kind"), "FAILURE_KIND_"),
        message=message.get("message", ""),
        exception_type=message.get("exception_type", ""),
        traceback=message.get("traceback", ""),
        exit_code=int(message.get("exit_code", 0)),
        signal=int(message.get("signal", 0)),
        memory_limit_bytes=int(message.get("memory_limit_bytes", 0)),
        memory_peak_bytes=int(message.get("memory_peak_bytes", 0)),
        shm_bytes=int(message.get("shm_bytes", 0)),
        oom_kills=int(message.get("oom_kills", 0)),
        node=message.get("node", ""),
    )
    try:
        pickled = await _payload_bytes(message.get("exception") or {}, transport)
    except OuterProductError:
        pickled = b""  # The failure is told without its cause rather than hidden by another error.
    return StoredOutcome(name, failure, pickled)


async def _payload_bytes(payload: Message, transport: Transport) -> bytes:
    if "blob" in payload:
        ref = payload["blob"]
        return await transport.download(ref["sha256"], int(ref["size_bytes"]))
    return base64.b64decode(payload.get("inline", ""))
