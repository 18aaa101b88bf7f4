"""What the runner tells the agent at the end: a result or an exception, as header fields and bytes."""

from __future__ import annotations

import errno
import pickle
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from outerproduct_runner.private_cloudpickle import cloudpickle

MAX_TRACEBACK_CHARACTERS = 24 * 1024
MAX_MESSAGE_CHARACTERS = 4 * 1024
MAX_PREVIEW_CHARACTERS = 200
"""Header and escapes stay far below the 64 KiB that a frame's header may have."""


@dataclass(frozen=True)
class Outcome:
    """`header` is the frame that opens the outcome; `data` the pickled result or exception."""

    header: dict[str, Any]
    data: bytes

    @property
    def exit_code(self) -> int:
        return 0 if self.header["type"] == "result" else 1


def of_result(value: object) -> Outcome:
    """The result, or RESULT_NOT_SERIALIZABLE when it can not be pickled."""
    try:
        with cloudpickle() as ours:
            data = ours.dumps(value, protocol=pickle.DEFAULT_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - user classes may raise anything while they are pickled
        kind = type(value)
        return of_exception(
            error,
            "RESULT_NOT_SERIALIZABLE",
            f"The result, a {kind.__module__}.{kind.__qualname__}, can not be pickled: {_text(error)}. "
            "Return plain data, or convert it before it is returned.",
        )
    return Outcome({"type": "result", "bytes": len(data), "preview": preview(value)}, data)


def of_exception(error: BaseException, kind: str = "EXCEPTION", message: str = "") -> Outcome:
    """The exception with its traceback as text, and pickled where it can be rebuilt from that."""
    if kind == "EXCEPTION" and isinstance(error, OSError) and error.errno == errno.ENOSPC:
        kind = "DISK_FULL"
        where = f" at {error.filename}" if error.filename else ""
        message = (
            f"No space left on device{where}. /dev/shm is as large as memory_bytes; every other path shares the "
            "container's disk. Free files that are no longer needed, or ask for more."
        )
    data = _rebuildable(error)
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    header = {
        "type": "exception",
        "kind": kind,
        "exception_type": name[:512],
        "message": (message or _text(error))[:MAX_MESSAGE_CHARACTERS],
        "traceback": traceback_text(error),
        "bytes": len(data),
    }
    return Outcome(header, data)


def _rebuildable(error: BaseException) -> bytes:
    """The pickled exception if unpickling gives it back, else nothing: an exception whose __init__ takes other
    arguments than it hands on pickles well and fails at the caller, which would hide the real error."""
    try:
        with cloudpickle() as ours:
            data: bytes = ours.dumps(error, protocol=pickle.DEFAULT_PROTOCOL)
            rebuilt = pickle.loads(data)
    except Exception:  # noqa: BLE001 - user classes may raise anything here; the text of the error is sent anyway
        return b""
    return data if type(rebuilt) is type(error) else b""


def preview(value: object) -> str:
    """repr for people; one that raises does no harm."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a user's __repr__ may raise anything
        text = f"<{type(value).__qualname__}, whose repr raises {type(error).__qualname__}>"
    return text if len(text) <= MAX_PREVIEW_CHARACTERS else text[: MAX_PREVIEW_CHARACTERS - 1] + "…"


def traceback_text(error: BaseException) -> str:
    """The traceback from the user's first frame on; the end of it is kept when it is long."""
    shortened = traceback.TracebackException(type(error), error, _from_the_user_on(error.__traceback__))
    text = "".join(shortened.format())
    return text if len(text) <= MAX_TRACEBACK_CHARACTERS else "…\n" + text[-MAX_TRACEBACK_CHARACTERS:]


def _from_the_user_on(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames of this package at its top. All of it when there is nothing else."""
    current = trace
    while current is not None and current.tb_frame.f_globals.get("__package__") == __package__:
        current = current.tb_next
    return current or trace


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything
        text = ""
    return f"{type(error).__qualname__}: {text}" if text else type(error).__qualname__
