"""What came out of a Call, as the value or the exception that its waiter gets."""

from __future__ import annotations

import base64
from typing import Any

from outerproduct import _serialization
from outerproduct._errors import BY_KIND, Failure, FunctionRaised, ResultNotSerializable, RunFailed
from outerproduct._transport import Transport
from outerproduct._wire import Message, enum_of


async def value_of(outcome: Message, name: str, transport: Transport) -> Any:
    """The result of the Call `name`. Raises the RunFailed that fits when there is none."""
    if "result" in outcome:
        data = await payload_bytes(outcome["result"], transport)
        try:
            return _serialization.loads(data)
        except Exception as error:
            raise ResultNotSerializable(
                f"{name} has completed, but its result can not be unpickled here: {type(error).__name__}: {error}. "
                "Install what it is made of, or return plain data."
            ) from error
    raise await failure_of(outcome.get("failure") or {}, name, transport)


async def failure_of(message: Message, name: str, transport: Transport) -> RunFailed:
    """The exception for a failure, with the original one as its cause where it can be rebuilt."""
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
        exception=message.get("exception") or {},
    )
    kind = BY_KIND.get(failure.kind, RunFailed)
    text = f"{name}: {failure.message}"
    if failure.traceback and kind in {FunctionRaised, BY_KIND["FUNCTION_NOT_LOADED"], ResultNotSerializable}:
        text += f"\n\nIn the container:\n\n{failure.traceback.rstrip()}"
    error = kind(text, failure)
    error.__cause__ = await _original(failure, transport)
    return error


async def _original(failure: Failure, transport: Transport) -> BaseException | None:
    if not failure.exception:
        return None
    try:
        original = _serialization.loads(await payload_bytes(dict(failure.exception), transport))
    except Exception:  # noqa: BLE001 - a class that is missing here, or any error of its own: the text says it all
        return None
    return original if isinstance(original, BaseException) else None


async def payload_bytes(payload: Message, transport: Transport) -> bytes:
    """The content of a Payload."""
    if "blob" in payload:
        ref = payload["blob"]
        return await transport.download(ref["sha256"], int(ref["size_bytes"]))
    return base64.b64decode(payload.get("inline", ""))
