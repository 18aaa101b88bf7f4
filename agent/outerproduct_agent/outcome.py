"""How an Attempt ended, from everything that is known about it: pure rules, in the order in which they are asked."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from outerproduct.v1 import call_pb2 as pb

MIB = 1024**2
HEADROOM = 1.5
"""What to ask for after out of memory: the true need is not known, since it was never reached."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known when the container has ended."""

    attempt: str
    node: str
    memory_limit_bytes: int
    said: pb.Outcome | None = None
    """What the runner brought."""
    exit_code: int = 0
    oom_kills: int = 0
    peak_bytes: int = 0
    shm_bytes: int = 0
    tolerate_oom_kills: bool = False
    stop_kind: int = pb.FAILURE_KIND_UNSPECIFIED
    """Why the agent ended it; unspecified when it did not."""
    stop_message: str = ""
    killed_from_outside: bool = False
    """Docker was told to kill it by somebody else."""
    engine_error: str = ""
    """What Docker said when the container could not be started or has vanished."""


def outcome_of(ending: Ending) -> pb.Outcome:
    """The outcome that the scheduler gets."""
    said = ending.said
    has_result = said is not None and said.WhichOneof("kind") == "result"
    # 1. Memory comes first: a result that was made by what was left of the processes is not to be trusted.
    if ending.oom_kills and not (ending.tolerate_oom_kills and said is not None):
        return pb.Outcome(failure=_out_of_memory(ending), oom_kills=ending.oom_kills)
    # 2. A result is a result, also when a stop was under way.
    if said is not None and has_result:
        said.oom_kills = ending.oom_kills
        return said
    # 3. A stop that was asked for, whatever the function said on its way.
    if ending.stop_kind:
        failure = _failure(ending, ending.stop_kind, ending.stop_message)
        if said is not None:
            failure.traceback = said.failure.traceback
        return pb.Outcome(failure=failure)
    # 4. An exception.
    if said is not None:
        said.failure.node = ending.node
        said.failure.exit_code = ending.exit_code
        return said
    # 5. Nothing was said: Docker failed, somebody killed it, or the process died.
    if ending.engine_error:
        return pb.Outcome(failure=_failure(ending, pb.FAILURE_KIND_CONTAINER_ENGINE, ending.engine_error))
    if ending.killed_from_outside:
        message = (
            f"The container of {ending.attempt} on {ending.node} was killed from outside ({_how(ending.exit_code)}): "
            "neither its function nor the agent did it."
        )
        return pb.Outcome(failure=_failure(ending, pb.FAILURE_KIND_KILLED_EXTERNALLY, message))
    message = (
        f"The process ended without a result ({_how(ending.exit_code)}). Its last output is in the logs: a crash in "
        "native code, os._exit or a signal ends it so."
    )
    return pb.Outcome(failure=_failure(ending, pb.FAILURE_KIND_PROCESS_DIED, message))


def _failure(ending: Ending, kind: int, message: str) -> pb.Failure:
    return pb.Failure(
        kind=pb.FailureKind.ValueType(kind),
        message=message,
        exit_code=ending.exit_code,
        signal=signal_of(ending.exit_code),
        node=ending.node,
    )


def _out_of_memory(ending: Ending) -> pb.Failure:
    # The kernel kills when a charge at the limit fails: the peak is the limit, also where no look has seen it.
    peak = max(ending.peak_bytes, ending.memory_limit_bytes)
    enough = int(ending.memory_limit_bytes * HEADROOM) // MIB * MIB
    count = "a process" if ending.oom_kills == 1 else f"{ending.oom_kills} processes"
    failure = _failure(
        ending,
        pb.FAILURE_KIND_OUT_OF_MEMORY,
        f"Out of memory: the kernel killed {count} at the limit of {_mib(ending.memory_limit_bytes)} (peak "
        f"{_mib(peak)}, of it {_mib(ending.shm_bytes)} in /dev/shm, which counts). Ask for more, such as "
        f"memory_bytes={enough}, or hold less at once.",
    )
    failure.memory_limit_bytes = ending.memory_limit_bytes
    failure.memory_peak_bytes = peak
    failure.shm_bytes = ending.shm_bytes
    failure.oom_kills = ending.oom_kills
    return failure


def signal_of(exit_code: int) -> int:
    """The signal behind a shell-style exit code; 0 when there is none."""
    number = exit_code - 128
    return number if 0 < number <= signal.NSIG else 0


def _how(exit_code: int) -> str:
    number = signal_of(exit_code)
    try:
        return signal.Signals(number).name if number else f"exit code {exit_code}"
    except ValueError:
        return f"exit code {exit_code}"


def _mib(count: int) -> str:
    return f"{count / MIB:,.0f} MiB"
