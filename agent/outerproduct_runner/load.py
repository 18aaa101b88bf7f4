"""From an Assignment to a function and its arguments, inside the container."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from outerproduct_runner import pickling

if TYPE_CHECKING:
    from outerproduct_runner.connection import Assignment


class NotLoaded(Exception):
    """The function or its arguments could not be had; `kind` is the FailureKind."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def load(assignment: Assignment) -> Callable[[], Any]:
    """Imports or unpickles the function and its arguments; the result is ready to be called.

    Raises:
        NotLoaded: with the original exception as its cause where there is one.
    """
    function = _by_value(assignment) if assignment.by_value else _by_name(assignment.qualified_name)
    args, kwargs = _unpickled(assignment.arguments, "its arguments", assignment)
    if assignment.wants_client:
        args = (_client(), *args)
    return functools.partial(function, *args, **kwargs)


def _by_value(assignment: Assignment) -> Any:
    if assignment.python_version != pickling.PYTHON_VERSION:
        raise NotLoaded(
            "PYTHON_VERSION_MISMATCH",
            f"{assignment.qualified_name} was sent by value from Python {assignment.python_version}, and the Image has "
            f"Python {pickling.PYTHON_VERSION}: use an Image with Python {assignment.python_version}, or move the "
            "function to a module of its own, which works across versions",
        )
    function = _unpickled(assignment.function, "it", assignment)
    # What the function's __main__ had under these names is what `pickle` looks for there, in pools of processes say.
    namespace = getattr(function, "__globals__", {})
    if namespace.get("__name__") == "__main__":
        names = {name: value for name, value in namespace.items() if not name.startswith("__")}
        vars(sys.modules["__main__"]).update(names)
        if function.__qualname__.isidentifier():
            setattr(sys.modules["__main__"], function.__qualname__, function)
    return function


def _by_name(qualified_name: str) -> Any:
    module_name, _, qualname = qualified_name.partition(":")
    try:
        return functools.reduce(getattr, qualname.split("."), importlib.import_module(module_name))
    except BaseException as error:
        raise NotLoaded(
            "FUNCTION_NOT_LOADED",
            f"{qualified_name} cannot be imported in the container: {type(error).__name__}: {error}{_advice(error)}",
        ) from error


def _unpickled(data: bytearray, what: str, assignment: Assignment) -> Any:
    try:
        return pickling.loads(data, written_by=assignment.python_version)
    except pickling.PythonVersionMismatch as error:
        raise NotLoaded(
            "PYTHON_VERSION_MISMATCH",
            f"{assignment.qualified_name}: {what} cannot be unpickled in the container: {error}",
        ) from None
    except BaseException as error:
        raise NotLoaded(
            "FUNCTION_NOT_LOADED",
            f"{assignment.qualified_name}: {what} cannot be unpickled in the container: {type(error).__name__}: "
            f"{error}{_advice(error)}",
        ) from error


def _advice(error: BaseException) -> str:
    missing = _missing_module(error)
    if missing is None:
        return ""
    return (
        f". The Image lacks the module {missing!r}: add its package with image.with_uv_pip_install(…), or, if it is "
        "yours, import it in the function's module, so that it is sent along"
    )


def _missing_module(error: BaseException) -> str | None:
    return error.name if isinstance(error, ModuleNotFoundError) else None


def _client() -> Any:
    try:
        return importlib.import_module("outerproduct").init()
    except Exception as error:
        raise NotLoaded(
            "FUNCTION_NOT_LOADED",
            f"the function's client cannot be made in the container of {os.environ.get('OUTERPRODUCT_ATTEMPT')}: "
            f"{type(error).__name__}: {error}",
        ) from error
