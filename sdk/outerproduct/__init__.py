"""Run Python functions on your own GPU machines.

import outerproduct as op

client = op.init()
run = client.run(fn=train_model, args=(data,), image=op.Image.from_registry("python:3.12-slim"), cpu=8)
print(run.wait())
"""

from outerproduct._client import OuterProductClient, init
from outerproduct._errors import (
    AccessDenied,
    Cancelled,
    ChildMismatch,
    DiskFull,
    Failure,
    FunctionNotLoaded,
    FunctionRaised,
    GpuLost,
    ImageBuildFailed,
    ImageHasNoPython,
    ImageUnavailable,
    InfrastructureFailed,
    KilledExternally,
    NodeLost,
    NotFound,
    OuterProductError,
    OutOfMemory,
    ProcessDied,
    PythonVersionMismatch,
    ResultNotSerializable,
    RunFailed,
    SchedulerUnavailable,
    TimedOut,
    UnsupportedConfiguration,
)
from outerproduct._handles import Attempt, Call, LogPiece, Run
from outerproduct._image import Image
from outerproduct._node import Node, NodeStatus
from outerproduct._resources import ComputeResources
from outerproduct._retries import RetryStrategy
from outerproduct._statuses import AttemptStatus, CallStatus, RunStatus

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "Attempt",
    "AttemptStatus",
    "Call",
    "CallStatus",
    "Cancelled",
    "ChildMismatch",
    "ComputeResources",
    "DiskFull",
    "Failure",
    "FunctionNotLoaded",
    "FunctionRaised",
    "GpuLost",
    "Image",
    "ImageBuildFailed",
    "ImageHasNoPython",
    "ImageUnavailable",
    "InfrastructureFailed",
    "KilledExternally",
    "LogPiece",
    "Node",
    "NodeLost",
    "NodeStatus",
    "NotFound",
    "OutOfMemory",
    "OuterProductClient",
    "OuterProductError",
    "ProcessDied",
    "PythonVersionMismatch",
    "ResultNotSerializable",
    "RetryStrategy",
    "Run",
    "RunFailed",
    "RunStatus",
    "SchedulerUnavailable",
    "TimedOut",
    "UnsupportedConfiguration",
    "init",
]
