"""Pickling with errors that say what to change."""

from __future__ import annotations

import functools
import io
import pickle
import pickletools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any


@dataclass(frozen=True)
class Pickled:
    """A value as bytes."""

    data: bytes
    modules: frozenset[str]
    """Names of the modules of all functions and classes in it, and of modules that it holds."""


@functools.cache
def _recording_pickler() -> Any:
    import cloudpickle

    class RecordingPickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def __init__(self, file: io.BytesIO) -> None:
            super().__init__(file, protocol=pickle.DEFAULT_PROTOCOL)
            self.modules: set[str] = set()

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (type, FunctionType, BuiltinFunctionType)):
                self.modules.add(str(obj.__module__))
            elif isinstance(obj, ModuleType):
                self.modules.add(obj.__name__)
            return super().reducer_override(obj)

    return RecordingPickler


def dumps(value: object, what: str, parts: Mapping[str, object]) -> Pickled:
    """cloudpickle. Raises TypeError that names the part (an argument, a captured variable) that can not travel."""
    buffer = io.BytesIO()
    pickler = _recording_pickler()(buffer)
    try:
        pickler.dump(value)
    except Exception as error:
        culprits = [name for name, part in parts.items() if not _can_travel(part)]
        where = f" ({', '.join(culprits)})" if culprits else ""
        raise TypeError(
            f"{what}{where} can not be pickled: {error}. Open files, locks, connections and running generators can "
            "not travel: create them inside the function, or pass what is needed to create them."
        ) from error
    return Pickled(buffer.getvalue(), frozenset(pickler.modules))


def _can_travel(value: object) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - user classes may raise anything; the caller reports the first error itself
        return False
    return True


def mentioned_modules(data: bytes) -> set[str]:
    """Names of loaded modules that a pickled function may need: every string in it that is one, so that an import in
    its body counts. More than needed does no harm, since only local modules are sent along."""
    return {text for text in _strings(data) if text in sys.modules}


def _strings(data: bytes) -> Iterator[str]:
    for opcode, argument, _ in pickletools.genops(data):
        if isinstance(argument, str):
            # GLOBAL has "module name" in one string.
            yield argument.partition(" ")[0] if opcode.name == "GLOBAL" else argument


def loads(data: bytes) -> Any:
    """Unpickles what the caller's own function returned."""
    return pickle.loads(data)
