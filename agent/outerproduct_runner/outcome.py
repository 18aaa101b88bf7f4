"""What the runner brings back: a result or an exception, as a header and pickled bytes."""

from __future__ import annotations

import asyncio
import errno
import importlib
import json
import reprlib
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from outerproduct_runner import pickling

if TYPE_CHECKING:
    from types import TracebackType

    from outerproduct_runner.frames import Header

_PREVIEW_CHARACTERS = 200
# Bytes of the JSON string, escapes included: with all of them in it, the header stays below its 64 KiB.
_MESSAGE_JSON_BYTES = 16 * 1024
_TRACEBACK_JSON_BYTES = 32 * 1024
_CUT = "\n… cut …\n"
_MACHINERY = (
    *(str(Path(file).resolve().parent) + "/" for file in (__file__, asyncio.__file__, importlib.__file__)),
    "<frozen importlib",
)


class Outcome(NamedTuple):
    """How the function ended."""

    header: Header
    payload: bytes

    @property
    def exit_code(self) -> int:
        """0 after a result, 1 after an exception."""
        return 0 if self.header["type"] == "result" else 1


def of_result(value: Any, caller_python: str) -> Outcome:
    """The outcome of a function that returned; an exception when `value` cannot be pickled for the caller."""

    def dumps(part: Any) -> bytes:
        return pickling.dumps(part, read_by=caller_python)

    try:
        payload = dumps(value)
    except Exception as error:  # noqa: BLE001 - classes of users may raise anything while they are pickled
        path, culprit = pickling.find_unpicklable(value, "result", dumps)
        return of_exception(
            error,
            kind="RESULT_NOT_SERIALIZABLE",
            message=f"{path} of type {type_name(type(culprit))} cannot be sent back to the caller: {_text(error)}. "
            "Return plain data instead, or write it to a file or an object store and return where it is.",
            caller_python=caller_python,
        )
    return Outcome({"type": "result", "bytes": len(payload), "preview": preview(value)}, payload)


def of_exception(
    error: BaseException, *, caller_python: str, kind: str = "EXCEPTION", message: str | None = None
) -> Outcome:
    """The outcome of a function that raised, or that could not be loaded."""
    if message is None:
        message = _text(error)
    if kind == "EXCEPTION":
        full = _disk_full(error)
        if full is not None:
            kind = "DISK_FULL"
            where = repr(full.filename) if full.filename is not None else "a file"
            message = (
                f"no space left on device while writing {where}: {_text(error)}. /dev/shm holds at most memory_bytes; "
                "anything else is on the disk of the node. Write less, or ask for more memory_bytes."
            )
    payload = _pickled(error, caller_python)
    header = {
        "type": "exception",
        "kind": kind,
        "exception_type": type_name(type(error))[:_PREVIEW_CHARACTERS],
        "message": _cut(message, _MESSAGE_JSON_BYTES),
        "traceback": _cut(_formatted(error), _TRACEBACK_JSON_BYTES),
        "bytes": len(payload),
    }
    return Outcome(header, payload)


def type_name(kind: type) -> str:
    """ "module.QualName"."""
    return f"{kind.__module__}.{kind.__qualname__}"


def preview(value: Any) -> str:
    """`repr(value)` for people, cut short without building all of it; a `__repr__` that raises does no harm."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = _PREVIEW_CHARACTERS
    try:
        return short.repr(value)[:_PREVIEW_CHARACTERS]
    except Exception:  # noqa: BLE001 - any repr may raise, that of a huge int for one
        return f"<{type_name(type(value))}>"[:_PREVIEW_CHARACTERS]


def _text(error: BaseException) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:  # noqa: BLE001 - __str__ of a user's class
        return type(error).__name__


def _disk_full(error: BaseException | None) -> OSError | None:
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return error
        error = error.__cause__
    return None


def _pickled(error: BaseException, caller_python: str) -> bytes:
    """The pickled exception; nothing when it cannot be rebuilt from its pickle, as with many a custom `__init__`."""
    if type(error).__module__.startswith(f"{__package__}."):
        return b""  # the caller has no such module
    try:
        payload = pickling.dumps(error, read_by=caller_python)
        rebuilt = pickling.loads(payload)
    except Exception:  # noqa: BLE001 - classes of users may raise anything; type, message and traceback go as text
        return b""
    return payload if type(rebuilt) is type(error) else b""


def _formatted(error: BaseException) -> str:
    _drop_machinery(error)
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception:  # noqa: BLE001 - __str__ of a user's class
        return "".join(traceback.format_tb(error.__traceback__)) + type_name(type(error))


def _cut(text: str, max_json_bytes: int) -> str:
    """The start and the end of `text`, as much of them as fits."""
    shortened, kept = text, min(len(text), max_json_bytes)
    while len(json.dumps(shortened, ensure_ascii=False).encode("utf-8", "replace")) > max_json_bytes:
        kept = kept * 3 // 4
        shortened = text[: kept // 2] + _CUT + text[len(text) - kept // 2 :]
    return shortened


def _drop_machinery(error: BaseException | None) -> None:
    """Lets the tracebacks of an error and of what it came from begin at the user's first frame."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = _from_the_user_on(error.__traceback__)
        error = error.__cause__ or error.__context__


def _from_the_user_on(start: TracebackType | None) -> TracebackType | None:
    """Without the runner, and what it called to get to the user's code; all of it when there is nothing else."""
    entry = start
    while entry is not None and entry.tb_frame.f_code.co_filename.startswith(_MACHINERY):
        entry = entry.tb_next
    return entry or start
