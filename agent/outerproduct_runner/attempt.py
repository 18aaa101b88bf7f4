"""The life of a runner: get the Call, run its function in the main thread, bring the outcome.

What the function finds here is an ordinary program: an empty `__main__`, its own sources first on the import path,
unbuffered output, the image's PYTHONPATH and user site although the interpreter itself was started isolated.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import io
import os
import signal
import site
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from outerproduct_runner import connection, load, outcome

if TYPE_CHECKING:
    from pathlib import Path

    from outerproduct_runner.connection import Assignment
    from outerproduct_runner.outcome import Outcome

_DEFAULT_SOCKET = "/run/outerproduct/agent.sock"


def run(lib: Path) -> NoReturn:
    """Runs one Attempt and ends the process, with 0 after a result and 1 after an exception.

    Args:
        lib: The folder that the runner lies in; `source` with the Call's files lies beside it.
    """
    _make_output_unbuffered()
    socket_path = os.environ.get("OUTERPRODUCT_SOCKET", _DEFAULT_SOCKET)
    assignment = connection.receive_assignment(socket_path)
    _prepare_interpreter(assignment, lib)
    runner_pid = os.getpid()
    ended = _attempt(assignment)
    # What the function printed comes before its outcome.
    _flush_output()
    if os.getpid() != runner_pid:
        # The function forked and its child came back from it too: the outcome is the parent's to bring.
        os._exit(ended.exit_code)
    connection.deliver(socket_path, ended)
    try:
        # Exit hooks of libraries still run; threads that the function left behind are not waited for.
        atexit._run_exitfuncs()
        _flush_output()
    finally:
        os._exit(ended.exit_code)


def _attempt(assignment: Assignment) -> Outcome:
    caller_python = assignment.python_version
    termination = _Termination()
    try:
        call = load.load(assignment)
        value = termination.deliver_during(call)
    except load.NotLoaded as error:
        return outcome.of_exception(
            error.__cause__ or error, kind=error.kind, message=str(error), caller_python=caller_python
        )
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the outcome
        return outcome.of_exception(error, caller_python=caller_python)
    return outcome.of_result(value, caller_python)


class _Termination:
    """Turns the first SIGTERM during the function into KeyboardInterrupt in the main thread, and ignores all others.

    KeyboardInterrupt, since programs that clean up do so for it, and since the caller can rebuild it.

    The first one only, so that the function's clean-up is not interrupted in turn; none afterwards, so that the
    outcome is brought whole. The agent's SIGKILL bounds both.
    """

    def __init__(self) -> None:
        self._armed = False

    def deliver_during(self, call: Callable[[], Any]) -> Any:
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._armed = True
        try:
            return _call(call)
        finally:
            self._armed = False

    def _on_sigterm(self, _number: int, _frame: object) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt("the Attempt was asked to stop (SIGTERM)")


def _call(call: Callable[[], Any]) -> Any:
    value = call()
    if inspect.isawaitable(value):
        return asyncio.run(_awaited(value))
    return value


async def _awaited(value: Any) -> Any:
    return await value


def _make_output_unbuffered() -> None:
    """What `python -u` does, which the isolated interpreter was not told; bytes that are no text pass as escapes."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = open(descriptor, "wb", buffering=0, closefd=False)  # noqa: SIM115 - lives as long as the process
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The function may have closed them or put anything in their place: no reason to lose its outcome.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _prepare_interpreter(assignment: Assignment, lib: Path) -> None:
    os.environ.update(assignment.env_vars)
    python_path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = [str(lib.parent / "source"), *python_path]
    user_site = site.getusersitepackages()
    if os.path.isdir(user_site):
        site.addsitedir(user_site)
    sys.path.append(str(lib))
    sys.argv = [assignment.qualified_name]
    # Without __file__ and __spec__, so that multiprocessing's spawn does not run the runner once more.
    sys.modules["__main__"] = types.ModuleType("__main__")
