"""The Call as it arrives, and how its function and arguments become objects."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outerproduct_runner import frames
from outerproduct_runner.private_cloudpickle import cloudpickle

SOURCE_FOLDER = "/run/outerproduct/source"
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


class NotLoaded(Exception):
    """The function or its arguments can not be had here. `kind` is the FailureKind."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Call:
    """One Call, still as bytes."""

    qualified_name: str
    by_value: bool
    wants_client: bool
    caller_python: str
    has_source: bool
    env_vars: dict[str, str]
    function: bytes | bytearray
    arguments: bytes | bytearray


def ask(connection: socket.socket) -> Call:
    """The runner's first conversation: says that it is there and waits for the Call, for as long as it takes."""
    frames.send(
        connection,
        {
            "type": "hello",
            "protocol": frames.PROTOCOL,
            "role": "runner",
            "state": "ready",
            "python": PYTHON_VERSION,
            "pid": os.getpid(),
        },
    )
    header, body = frames.receive_type(connection, "call")
    function = header["function"]
    call = Call(
        qualified_name=function["qualified_name"],
        by_value=function["by_value"],
        wants_client=function["wants_client"],
        caller_python=function["python_version"],
        has_source=header["source"],
        env_vars=json.loads(body) if body else {},
        function=frames.receive_data(connection, header["function_bytes"]),
        arguments=frames.receive_data(connection, header["arguments_bytes"]),
    )
    frames.send(connection, {"type": "accepted"})
    return call


def load(call: Call) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Function, positional and keyword arguments. Raises NotLoaded with what to change."""
    if call.by_value and call.caller_python != PYTHON_VERSION:
        # Before anything is unpickled: bytecode of another version ends in strange errors or a crash.
        raise NotLoaded(
            "PYTHON_VERSION_MISMATCH",
            f"{call.qualified_name} was sent by value from Python {call.caller_python}, and the Image has Python "
            f"{PYTHON_VERSION}. Use an Image with Python {call.caller_python}, or move the function into a module "
            "that can be imported: then it goes by name, which works across versions.",
        )
    if call.has_source:
        sys.path.insert(0, os.environ.get("OUTERPRODUCT_SOURCE", SOURCE_FOLDER))
        importlib.invalidate_caches()
    function = _unpickle(call.function, call.qualified_name) if call.by_value else _import(call.qualified_name)
    args, kwargs = _unpickle(call.arguments, f"the arguments of {call.qualified_name}")
    if call.wants_client:
        args = (_client(), *args)
    return function, args, kwargs


def _import(qualified_name: str) -> Any:
    module_name, _, path = qualified_name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name)
    except Exception as error:
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        hint = (
            f"The Image has no module {missing!r}: add it with Image.with_uv_pip_install."
            if missing and missing.partition(".")[0] != module_name.partition(".")[0]
            else "The module must be importable in the container as it is at the caller."
        )
        raise NotLoaded(
            "FUNCTION_NOT_LOADED",
            f"{qualified_name} could not be imported: {type(error).__name__}: {error}. {hint}",
        ) from error
    return found


def _unpickle(data: bytes | bytearray, what: str) -> Any:
    try:
        with cloudpickle():
            return pickle.loads(data)
    except Exception as error:
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        hint = (
            f"The Image has no module {missing!r}: add it with Image.with_uv_pip_install."
            if missing
            else "Every module that they use must be importable in the container."
        )
        raise NotLoaded(
            "FUNCTION_NOT_LOADED", f"{what} could not be unpickled: {type(error).__name__}: {error}. {hint}"
        ) from error


def _client() -> Any:
    return importlib.import_module("outerproduct").init()
