"""Pickling with the cloudpickle that lies beside the runner, whatever version the image has.

The copy is loaded under a private name. Streams from outside refer to `cloudpickle.cloudpickle`: `loads` resolves that
to the copy, and `dumps` writes such references so that the receiver uses its own. Code objects never cross between
minor versions of Python: such bytes can crash an interpreter.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import pickle
import pkgutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PRIVATE_NAME = "outerproduct_runner._cloudpickle"
_PUBLIC_NAME = "cloudpickle.cloudpickle"
PYTHON_VERSION = "{}.{}".format(*sys.version_info[:2])


class PythonVersionMismatch(Exception):
    """Something pickled by value would cross between two minor versions of Python."""


@functools.lru_cache(maxsize=1)
def _cloudpickle() -> Any:
    path = Path(__file__).resolve().parent.parent / "cloudpickle" / "cloudpickle.py"
    spec = importlib.util.spec_from_file_location(_PRIVATE_NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"the agent did not bring cloudpickle: {path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PRIVATE_NAME] = module
    spec.loader.exec_module(module)
    return module


def loads(data: bytes | bytearray, written_by: str = PYTHON_VERSION) -> Any:
    """Unpickles `data` that Python `written_by` ("major.minor") has pickled.

    Raises:
        PythonVersionMismatch: `data` holds code of another minor version.
        Exception: whatever the classes in it raise.
    """

    def resolve(name: str) -> Any:
        module, _, attribute = name.partition(":")
        return _find(module, attribute) if module == _PUBLIC_NAME else pkgutil.resolve_name(name)

    def builtin_type(name: str) -> Any:
        if name == "CodeType" and written_by != PYTHON_VERSION:
            raise PythonVersionMismatch(
                f"it holds a function or class pickled by value with Python {written_by}, and the Image has Python "
                f"{PYTHON_VERSION}: use an Image with Python {written_by}, or move the function to a module of its own"
            )
        return _cloudpickle()._builtin_type(name)

    def find(module: str, name: str) -> Any:
        if (module, name) == ("pkgutil", "resolve_name"):
            return resolve
        if module in ("cloudpickle", _PUBLIC_NAME):
            return builtin_type if name == "_builtin_type" else _find(module, name)
        return None

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return find(module, name) or super().find_class(module, name)

    return Unpickler(io.BytesIO(data)).load()


def _find(module: str, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), _cloudpickle())
    except AttributeError as error:
        raise pickle.UnpicklingError(f"{module}.{name} is not known to the runner's cloudpickle") from error


def dumps(value: Any, read_by: str = PYTHON_VERSION) -> bytes:
    """Pickles `value` for Python `read_by` ("major.minor").

    Raises:
        PythonVersionMismatch: `value` holds code that would go to another minor version.
        Exception: whatever the classes in it raise.
    """
    cloudpickle = _cloudpickle()

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc, name-defined]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (types.FunctionType, type)) and obj.__module__ == _PRIVATE_NAME:
                return pkgutil.resolve_name, (f"{_PUBLIC_NAME}:{obj.__qualname__}",)
            if isinstance(obj, types.CodeType) and read_by != PYTHON_VERSION:
                raise PythonVersionMismatch(
                    f"it holds the function or class {obj.co_name!r} by value, which Python {PYTHON_VERSION} of the "
                    f"Image cannot hand to Python {read_by} of the caller: define it in a module of its own"
                )
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def find_unpicklable(value: Any, path: str, dumps: Callable[[Any], bytes]) -> tuple[str, Any]:
    """Follows `value` into its items and attributes to the smallest part that `dumps` refuses.

    Returns:
        How to reach that part from `path`, and the part.
    """
    for _ in range(20):  # deeper than this a path explains nothing
        for step, part in _parts(value):
            if not _picklable(part, dumps):
                path, value = path + step, part
                break
        else:
            return path, value
    return path, value


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]"[:80], part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    return [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items() if isinstance(name, str)]


def _picklable(value: Any, dumps: Callable[[Any], bytes]) -> bool:
    try:
        dumps(value)
    except Exception:  # noqa: BLE001 - classes of users may raise anything while they are pickled
        return False
    return True
