"""Child processes that live and die together: started one after another, watched, and stopped in reverse order.

It knows nothing of schedulers and agents; `up.py` says what is started, and when it counts as ready.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

TAIL_LINES = 20
"""Enough for a traceback's end and the event before it."""
FOLLOW_SECONDS = 0.2
"""How often a log file is looked at for new output with `--verbose`: quick to the eye, nothing to the machine."""

T = TypeVar("T")


class Stopped(Exception):
    """A signal asked for the end."""


class ChildEnded(Exception):
    """A child ended that nobody had asked to."""

    def __init__(self, child: Child) -> None:
        super().__init__(child.name)
        self.child = child


@dataclass(frozen=True)
class Child:
    """One child process and the file that has its output."""

    name: str
    process: asyncio.subprocess.Process
    log_path: Path
    ended: asyncio.Task[int]
    stop_seconds: float
    """How long it may take to stop by itself after SIGTERM."""

    def log_tail(self) -> str:
        """The last lines of its output."""
        with self.log_path.open(errors="replace") as log:
            return "".join(deque(log, TAIL_LINES)).rstrip()


def describe_exit(code: int) -> str:
    """An exit code in words; negative ones are signals."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {-code} ({signal.strsignal(-code)})"


class Supervisor:
    """Use inside a running event loop: signals are handled from `handle_signals` until `stop` has returned."""

    def __init__(self, *, lock_fd: int, verbose: bool) -> None:
        self._children: list[Child] = []
        self._lock_fd = lock_fd
        self._verbose = verbose
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._followers: list[asyncio.Task[None]] = []

    def handle_signals(self) -> None:
        """SIGINT, SIGTERM and SIGHUP (the terminal was closed) ask for the end. Each further one kills the child that
        is being stopped."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def start(
        self, name: str, module: str, arguments: Sequence[str], log_path: Path, stop_seconds: float
    ) -> None:
        """Starts `python -m module`. Its output goes to `log_path`; the previous one is kept beside it as `.1`."""
        if log_path.exists():
            log_path.replace(log_path.with_name(log_path.name + ".1"))
        descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "outerproduct._cli.supervised",
                str(os.getpid()),
                module,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor,
                stderr=asyncio.subprocess.STDOUT,
                # Ctrl-C reaches this process only, which then stops its children in the right order.
                start_new_session=True,
                # The data folder stays locked for as long as anything that uses it lives.
                pass_fds=(self._lock_fd,),
            )
        finally:
            os.close(descriptor)
        ended = asyncio.create_task(process.wait(), name=f"{name} ended")
        self._children.append(Child(name, process, log_path, ended, stop_seconds))
        if self._verbose:
            self._followers.append(asyncio.create_task(_follow(name, log_path, ended), name=f"{name} log"))

    async def until(self, work: Coroutine[object, object, T]) -> T:
        """The result of `work`, unless a child ends (ChildEnded) or a signal comes (Stopped) before."""
        task = asyncio.create_task(work, name="work")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait(
                {task, stopping, *(child.ended for child in self._children)}, return_when=asyncio.FIRST_COMPLETED
            )
            if stopping.done():
                raise Stopped
            for child in self._children:
                if child.ended.done():
                    raise ChildEnded(child)
            return task.result()
        finally:
            task.cancel()
            stopping.cancel()
            await asyncio.gather(task, stopping, return_exceptions=True)

    async def until_ended(self) -> None:
        """Never returns: raises ChildEnded or Stopped."""
        await self.until(asyncio.Event().wait())

    async def stop(self) -> list[str]:
        """Stops the children, the one that was started last first; the names of those that had to be killed."""
        killed = []
        for child in reversed(self._children):
            if not child.ended.done():
                child.process.terminate()
                await self._stopped_or_hurried(child)
            if not child.ended.done():
                child.process.kill()
                await child.ended
                killed.append(child.name)
        await asyncio.gather(*self._followers, return_exceptions=True)
        return killed

    async def _stopped_or_hurried(self, child: Child) -> None:
        """Returns when the child has ended, its time is over, or a further signal asks not to wait for it."""
        hurry = asyncio.create_task(self._hurry.wait(), name="hurry")
        await asyncio.wait({child.ended, hurry}, timeout=child.stop_seconds, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        await asyncio.gather(hurry, return_exceptions=True)
        self._hurry.clear()


async def _follow(name: str, log_path: Path, ended: asyncio.Task[int]) -> None:
    """Copies a growing file to stderr, each line with the name in front, until its writer has ended."""
    with log_path.open(errors="replace") as log:
        while True:
            over = ended.done()
            lines = log.readlines()
            for line in lines:
                sys.stderr.write(f"{name}: {line}")
            if over:
                return
            await asyncio.wait({ended}, timeout=FOLLOW_SECONDS)
