"""Who may call what: credentials, and one table that names the roles of every RPC.

A credential comes as `authorization: Bearer <key>`. Users, operators and agents have API keys, stored as SHA-256 (they
are 256 random bits, so a slow hash would add nothing). An Attempt's token is its name with a MAC under a secret of
this scheduler: nothing needs to be stored, and it is good for as long as the Attempt lives.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import grpc
import sqlalchemy as sa
import structlog

from outerproduct_scheduler import errors, schema
from outerproduct_scheduler.database import Database

log = structlog.get_logger()

KEY_PREFIX = "op-"
TOKEN_PREFIX = "attempt:"  # noqa: S105 - how a token begins, not one
SECRET_SETTING = "attempt_token_secret"  # noqa: S105 - the name of a row


class Role(StrEnum):
    """What a credential is for."""

    USER = "user"
    OPERATOR = "operator"
    AGENT = "agent"
    ATTEMPT = "attempt"


USERS = frozenset({Role.USER, Role.OPERATOR})
CALLERS = USERS | {Role.ATTEMPT}
EVERYBODY = CALLERS | {Role.AGENT}
OPERATORS = frozenset({Role.OPERATOR})

_V1 = "/outerproduct.v1."

ROLES: Mapping[str, frozenset[Role]] = {
    f"{_V1}RunService/GetMe": EVERYBODY,
    f"{_V1}RunService/CreateRuns": USERS,
    f"{_V1}RunService/CreateCalls": frozenset({Role.ATTEMPT}),
    f"{_V1}RunService/GetRun": CALLERS,
    f"{_V1}RunService/ListRuns": USERS,
    f"{_V1}RunService/CancelRun": CALLERS,
    f"{_V1}RunService/GetCall": CALLERS,
    f"{_V1}RunService/ListCalls": CALLERS,
    f"{_V1}RunService/CancelCall": CALLERS,
    f"{_V1}RunService/WaitCalls": CALLERS,
    f"{_V1}RunService/GetAttempt": CALLERS,
    f"{_V1}RunService/ListAttempts": CALLERS,
    f"{_V1}RunService/ReadLogs": CALLERS,
    f"{_V1}RunService/ListLiveAttempts": USERS,
    f"{_V1}BlobService/FindMissingBlobs": EVERYBODY,
    f"{_V1}BlobService/UploadBlob": EVERYBODY,
    f"{_V1}BlobService/DownloadBlob": EVERYBODY,
    f"{_V1}NodeService/ListNodes": CALLERS,
    f"{_V1}NodeService/GetNode": USERS,
    f"{_V1}NodeService/CordonNode": OPERATORS,
    f"{_V1}NodeService/UncordonNode": OPERATORS,
    f"{_V1}NodeService/DrainNode": OPERATORS,
    f"{_V1}NodeService/SetNodeLabels": OPERATORS,
    f"{_V1}NodeService/ForgetNode": OPERATORS,
    f"{_V1}AgentGateway/Connect": frozenset({Role.AGENT}),
}
"""Method → roles. What is not here is refused."""

OPEN_PREFIXES = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/", "/grpc.reflection.v1.")
"""Say nothing about anybody's work, and are what an operator reaches for when a key does not work."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is asking. For an Attempt, `name` is its full name."""

    name: str
    role: Role


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def attempt_token(secret: bytes, attempt: str) -> str:
    """The credential of an Attempt: its name and a MAC."""
    mac = hmac.new(secret, attempt.encode(), hashlib.sha256).hexdigest()
    return f"{TOKEN_PREFIX}{attempt}:{mac}"


class Authenticator:
    """Knows the keys. `still_runs` tells whether an Attempt is live."""

    def __init__(self, database: Database, secret: bytes, still_runs: Callable[[str], bool]) -> None:
        self._database = database
        self._secret = secret
        self._still_runs = still_runs

    async def identify(self, metadata: Mapping[str, Any]) -> Identity:
        """Raises Unauthenticated."""
        scheme, _, key = str(metadata.get("authorization", "")).partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise errors.Unauthenticated(
                "no credential came with the request: send metadata `authorization: Bearer <API key>`"
            )
        if key.startswith(TOKEN_PREFIX):
            return self._identify_attempt(key)

        def find(connection: sa.Connection) -> Any:
            keys = schema.api_keys
            return connection.execute(
                sa.select(keys.c.name, keys.c.role).where(keys.c.digest == digest_of(key), keys.c.revoked_at.is_(None))
            ).first()

        row = await self._database.read(find)
        if row is None:
            raise errors.Unauthenticated("the API key is unknown or revoked: ask an operator for a new one")
        return Identity(row.name, Role(row.role))

    def _identify_attempt(self, token: str) -> Identity:
        attempt = token.removeprefix(TOKEN_PREFIX).rpartition(":")[0]
        if not hmac.compare_digest(token.encode(), attempt_token(self._secret, attempt).encode()):
            raise errors.Unauthenticated("the Attempt's token is not one of this scheduler")
        if not self._still_runs(attempt):
            raise errors.Unauthenticated(f"{attempt} has ended: its token is good for as long as it lives")
        return Identity(attempt, Role.ATTEMPT)


async def load_secret(database: Database) -> bytes:
    """The secret of Attempt tokens; made at the first start."""

    def get_or_make(connection: sa.Connection) -> str:
        table = schema.settings
        found = connection.execute(sa.select(table.c.value).where(table.c.name == SECRET_SETTING)).scalar()
        if found is None:
            found = secrets.token_hex(32)
            connection.execute(sa.insert(table).values(name=SECRET_SETTING, value=found))
        return str(found)

    return bytes.fromhex(await database.write(get_or_make))


_current: ContextVar[Identity] = ContextVar("identity")


def current_identity() -> Identity:
    """Who the request that is being handled comes from."""
    return _current.get()


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Refuses what the table does not allow, before any handler sees it."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(OPEN_PREFIXES):
            return handler
        try:
            identity = await self._authenticator.identify(dict(details.invocation_metadata))
            allowed = ROLES.get(details.method, frozenset())
            if identity.role not in allowed:
                raise errors.PermissionDenied(
                    f"{details.method} is not for the role {identity.role.value!r} of {identity.name!r}"
                    + (f": it takes {', '.join(sorted(allowed))}" if allowed else "")
                )
        except errors.SchedulerError as error:
            log.info("request_refused", method=details.method, code=error.code.name)
            return _refusing(handler, error)
        # grpc.aio runs the handler in the task that ran the interceptors, so a context variable reaches it.
        _current.set(identity)
        return handler


def _refusing(handler: Any, error: errors.SchedulerError) -> Any:
    """A handler of the same kind that answers with the error."""

    async def refuse(_request: Any, context: Any) -> None:
        await context.abort(error.code, str(error))

    async def refuse_stream(_request: Any, context: Any) -> Any:
        await context.abort(error.code, str(error))
        yield

    kinds = {
        (False, False): (grpc.unary_unary_rpc_method_handler, refuse),
        (False, True): (grpc.unary_stream_rpc_method_handler, refuse_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, refuse),
        (True, True): (grpc.stream_stream_rpc_method_handler, refuse_stream),
    }
    make, behaviour = kinds[handler.request_streaming, handler.response_streaming]
    return make(behaviour, handler.request_deserializer, handler.response_serializer)
