"""What the SDK raises. Each message says what happened, to what, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class OuterProductError(Exception):
    """Base of all errors of this package that have no better builtin base."""


class UnsupportedConfiguration(OuterProductError, ValueError):
    """No registered node could ever hold what was asked for."""


class NotFound(OuterProductError, LookupError):
    """There is no Run, Call, Attempt or Node of that name, or it belongs to somebody else."""


class AccessDenied(OuterProductError, PermissionError):
    """The credential is unknown, or may not do this."""


class SchedulerUnavailable(OuterProductError, ConnectionError):
    """The scheduler can not be reached, also after repeated attempts."""


class ChildMismatch(OuterProductError, RuntimeError):
    """A repeated Attempt made another child Call at an index than the Attempt before."""


@dataclass(frozen=True)
class Failure:
    """How an Attempt ended without a result, as the scheduler tells it."""

    kind: str
    """Name of the kind, such as "OUT_OF_MEMORY"."""
    message: str
    exception_type: str = ""
    traceback: str = ""
    exit_code: int = 0
    signal: int = 0
    memory_limit_bytes: int = 0
    memory_peak_bytes: int = 0
    shm_bytes: int = 0
    oom_kills: int = 0
    node: str = ""


class RunFailed(OuterProductError):
    """A Call ended without a result. `failure` has the facts; `__cause__` is the original exception where it can be
    rebuilt here."""

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.failure)

    @property
    def kind(self) -> str:
        """Name of the kind of failure, such as "OUT_OF_MEMORY"; empty when it is not known."""
        return self.failure.kind if self.failure else ""


class FunctionRaised(RunFailed):
    """The function raised; its traceback is in the message."""


class OutOfMemory(RunFailed):
    """The kernel killed a process of the container because memory_bytes was reached."""


class DiskFull(RunFailed):
    """/dev/shm or the container's disk is full."""


class ProcessDied(RunFailed):
    """The process ended without a result: by a signal, or by os._exit."""


class KilledExternally(ProcessDied):
    """Somebody outside the agent killed the container."""


class FunctionNotLoaded(RunFailed):
    """Function or arguments could not be imported or unpickled in the container."""


class ResultNotSerializable(RunFailed):
    """The result could not be pickled in the container, or not unpickled here."""


class ImageUnavailable(RunFailed):
    """The Image can not be had: no such reference, no access, or the registry is away."""


class ImageBuildFailed(RunFailed):
    """A layer of the Image could not be built."""


class ImageHasNoPython(RunFailed):
    """The Image has no Python that the runner can use."""


class PythonVersionMismatch(RunFailed):
    """A function by value met another Python than the caller's."""


class InfrastructureFailed(RunFailed):
    """Something of the platform failed, not the function."""


class NodeLost(InfrastructureFailed):
    """The node was lost while the function may have been running."""


class GpuLost(InfrastructureFailed):
    """A GPU failed or was taken away."""


class Cancelled(RunFailed):
    """Somebody cancelled it."""


class TimedOut(RunFailed):
    """timeout_seconds was reached."""


BY_KIND: Mapping[str, type[RunFailed]] = {
    "EXCEPTION": FunctionRaised,
    "OUT_OF_MEMORY": OutOfMemory,
    "DISK_FULL": DiskFull,
    "PROCESS_DIED": ProcessDied,
    "KILLED_EXTERNALLY": KilledExternally,
    "FUNCTION_NOT_LOADED": FunctionNotLoaded,
    "RESULT_NOT_SERIALIZABLE": ResultNotSerializable,
    "IMAGE_UNAVAILABLE": ImageUnavailable,
    "IMAGE_BUILD_FAILED": ImageBuildFailed,
    "IMAGE_HAS_NO_PYTHON": ImageHasNoPython,
    "PYTHON_VERSION_MISMATCH": PythonVersionMismatch,
    "NODE_LOST": NodeLost,
    "GPU_LOST": GpuLost,
    "CONTAINER_ENGINE": InfrastructureFailed,
    "NODE_MISCONFIGURED": InfrastructureFailed,
    "DECLINED": InfrastructureFailed,
    "CANCELLED": Cancelled,
    "PARENT_ENDED": Cancelled,
    "TIMEOUT": TimedOut,
}
"""FailureKind of the contract → exception."""

BY_CODE: Mapping[str, type[Exception]] = {
    "INVALID_ARGUMENT": ValueError,
    "FAILED_PRECONDITION": UnsupportedConfiguration,
    "NOT_FOUND": NotFound,
    "UNAUTHENTICATED": AccessDenied,
    "PERMISSION_DENIED": AccessDenied,
    "UNAVAILABLE": SchedulerUnavailable,
    "ALREADY_EXISTS": ChildMismatch,
}
"""gRPC status code → exception; every other code is an OuterProductError."""
