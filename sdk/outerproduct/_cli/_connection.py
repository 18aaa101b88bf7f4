"""The way of the commands to the scheduler: the SDK's credentials and channel, the generated stubs, and pages.

Credentials are found as `op.init` finds them, with `--base-url` and `--api-key-file` in front.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from outerproduct._cli.errors import Unreachable, WrongUsage
from outerproduct._credentials import find_credentials

if TYPE_CHECKING:
    import grpc

    from outerproduct._grpc_transport import GrpcTransport
    from outerproduct.v1.node_service_pb2 import Node
    from outerproduct.v1.node_service_pb2_grpc import NodeServiceStub
    from outerproduct.v1.run_service_pb2_grpc import RunServiceStub

RPC_SECONDS = 30.0
"""Deadline of one request: every one that commands make is answered from memory or by one look into the database."""
PAGE_SIZE = 1000
"""The most that one answer may list."""

Request = TypeVar("Request")
Response = TypeVar("Response")


class Connection:
    """One channel to the scheduler. Close it, or use it as a context manager."""

    def __init__(self, transport: GrpcTransport, api_key: str) -> None:
        self.transport = transport
        self._metadata = (("authorization", f"Bearer {api_key}"),)

    @functools.cached_property
    def runs(self) -> RunServiceStub:
        from outerproduct.v1.run_service_pb2_grpc import RunServiceStub

        return RunServiceStub(self.transport.channel())

    @functools.cached_property
    def nodes(self) -> NodeServiceStub:
        from outerproduct.v1.node_service_pb2_grpc import NodeServiceStub

        return NodeServiceStub(self.transport.channel())

    def call(
        self,
        method: grpc.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        timeout_seconds: float = RPC_SECONDS,
    ) -> Response:
        """The answer to one request. Raises the SDK's errors (`outerproduct._errors`)."""
        import grpc

        try:
            return method(request, timeout=timeout_seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self.transport.translated(error) from None

    def all_nodes(self) -> list[Node]:
        """Every node, those that can not run Calls now included."""
        from outerproduct.v1.node_service_pb2 import ListNodesRequest

        def page(token: str) -> Any:
            request = ListNodesRequest(include_unavailable=True, page_size=PAGE_SIZE, page_token=token)
            return self.call(self.nodes.ListNodes, request)

        return [node for answer in pages(page) for node in answer.nodes]

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()


def pages(ask: Callable[[str], Any]) -> Iterator[Any]:
    """The answers of a List method, page after page. `ask` takes the page token."""
    token = ""
    while True:
        answer = ask(token)
        yield answer
        token = answer.next_page_token
        if not token:
            return


def connect(base_url: str | None, api_key_file: Path | None) -> Connection:
    """Finds the credentials; no traffic yet. Raises Unreachable or WrongUsage."""
    api_key = None
    if api_key_file is not None:
        try:
            api_key = api_key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise WrongUsage(
                "the key can not be read", f"{api_key_file}: {error}", "name a file that holds a key"
            ) from error
    try:
        credentials = find_credentials(api_key=api_key, base_url=base_url)
    except RuntimeError as error:
        raise Unreachable(
            "no scheduler is configured",
            str(error),
            "start `outerproduct up`, or give --base-url and --api-key-file",
        ) from error
    from outerproduct._grpc_transport import GrpcTransport

    try:
        return Connection(GrpcTransport(credentials.base_url, credentials.api_key), credentials.api_key)
    except ValueError as error:
        raise WrongUsage("the address of the scheduler is wrong", str(error), "correct --base-url") from error


def with_scheduler(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command `--base-url` and `--api-key-file`, and the Connection as its first argument."""

    @click.option("--base-url", metavar="URL", help="The scheduler.  [default: $OUTERPRODUCT_BASE_URL, else `up`'s]")
    @click.option(
        "--api-key-file",
        type=click.Path(path_type=Path),
        # A key among the arguments would be in every listing of processes.
        help="File that holds the API key.  [default: $OUTERPRODUCT_API_KEY, else `up`'s]",
    )
    @functools.wraps(command)
    def wrapped(base_url: str | None, api_key_file: Path | None, **arguments: Any) -> None:
        with connect(base_url, api_key_file) as connection:
            command(connection, **arguments)

    return wrapped


with_output = click.option(
    "--output",
    "-o",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="For people, or protobuf JSON as grpcurl prints it.",
)
