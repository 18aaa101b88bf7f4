"""What all services share: errors become gRPC statuses, page tokens become positions."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import structlog

from outerproduct_scheduler.errors import InvalidArgument, SchedulerError

log = structlog.get_logger()

T = TypeVar("T")
S = TypeVar("S")
R = TypeVar("R")

DEFAULT_PAGE = 100
MAX_PAGE = 1000


def unary(method: Callable[[S, R, Any], Awaitable[T]]) -> Callable[[S, R, Any], Awaitable[T]]:
    """Decorator of a handler: a SchedulerError is answered with its status and message."""

    async def handler(self: S, request: R, context: Any) -> T:
        try:
            return await method(self, request, context)
        except SchedulerError as error:
            await context.abort(error.code, str(error))
            raise

    functools.update_wrapper(handler, method)
    return handler


def streaming(method: Callable[[S, R, Any], AsyncIterator[T]]) -> Callable[[S, R, Any], AsyncIterator[T]]:
    """The same for a handler that answers a stream."""

    async def handler(self: S, request: R, context: Any) -> AsyncIterator[T]:
        try:
            async for answer in method(self, request, context):
                yield answer
        except SchedulerError as error:
            await context.abort(error.code, str(error))

    functools.update_wrapper(handler, method)
    return handler


def page_size(asked: int) -> int:
    """Entries of a page: 100 unless something else is asked for, at most 1,000."""
    return min(asked or DEFAULT_PAGE, MAX_PAGE)


def to_token(*position: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode()


def from_token(token: str, kinds: tuple[type, ...]) -> tuple[Any, ...] | None:
    """The position in a page token; None at the beginning. Raises InvalidArgument for what is none of ours."""
    if not token:
        return None
    try:
        position = json.loads(base64.urlsafe_b64decode(token))
    except ValueError:
        position = None
    if (
        not isinstance(position, list)
        or len(position) != len(kinds)
        or not all(isinstance(value, kind) for value, kind in zip(position, kinds, strict=True))
    ):
        raise InvalidArgument("page_token is not one that an earlier page gave: begin without one")
    return tuple(position)
