"""What the scheduler answers instead of a result: a small hierarchy, one class for each gRPC status that is used.

A message has three parts: what happened, to what, what to do.
"""

from __future__ import annotations

import grpc


class SchedulerError(Exception):
    """Base; `code` is the gRPC status."""

    code = grpc.StatusCode.INTERNAL


class InvalidArgument(SchedulerError):
    """A field can not be right, whatever the state of anything."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class Unsupported(SchedulerError):
    """No registered node could ever hold it."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class NotFound(SchedulerError):
    """It does not exist, or is somebody else's."""

    code = grpc.StatusCode.NOT_FOUND


class Conflict(SchedulerError):
    """The same name stands for something else already."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Unauthenticated(SchedulerError):
    """No credential, or an unknown or revoked one."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(SchedulerError):
    """The credential may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class TooMuch(SchedulerError):
    """A limit of size or number is reached."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class WrongState(SchedulerError):
    """It can not be done as things are now."""

    code = grpc.StatusCode.FAILED_PRECONDITION
