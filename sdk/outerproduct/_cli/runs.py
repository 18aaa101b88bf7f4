"""Runs: `runs` lists them, `cancel` ends Runs and Calls."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from outerproduct._cli import output as out
from outerproduct._cli._connection import PAGE_SIZE, Connection, pages, with_output, with_scheduler
from outerproduct._cli.errors import WrongUsage, explained
from outerproduct._cli.names import Kind, Name, parse_name

if TYPE_CHECKING:
    from outerproduct.v1.call_pb2 import Call, Run

DEFAULT_LIMIT = 20
"""About a screen."""


def run_status(run: Run) -> str:
    """ "RUNNING", "COMPLETED", ..."""
    from outerproduct.v1.call_pb2 import RunStatus

    return out.word(RunStatus.Name(run.status), "RUN_STATUS_")


def call_status(call: Call) -> str:
    """ "RUNNING", "COMPLETED", ..."""
    from outerproduct.v1.call_pb2 import CallStatus

    return out.word(CallStatus.Name(call.status), "CALL_STATUS_")


@click.command()
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=DEFAULT_LIMIT,
    show_default=True,
    help="At most so many, the newest ones.",
)
@with_output
@with_scheduler
def runs(connection: Connection, limit: int, output: str) -> None:
    """Lists Runs, newest first: one's own, or all with an operator's key."""
    with explained("the list of Runs"):
        found = _newest(connection, limit)
    if output == "json":
        out.print_json({"runs": found})
        return
    now = datetime.now(UTC)
    rows = [
        (
            run.name.removeprefix("runs/"),
            out.one_line(run.display_name or run.root_call.function),
            run_status(run),
            out.resources(run.root_call.compute),
            out.one_line(run.created_by),
            out.age(run.created_at, now),
            out.one_line(run.root_call.pending_reason or run.error_message),
        )
        for run in found
    ]
    out.print_table(("RUN", "FUNCTION", "STATUS", "ASKED FOR", "BY", "AGE>", "WHY"), rows, "No Runs yet.")


def _newest(connection: Connection, limit: int) -> list[Run]:
    from outerproduct.v1.run_service_pb2 import ListRunsRequest

    def page(token: str) -> Any:
        request = ListRunsRequest(page_size=min(limit, PAGE_SIZE), page_token=token)
        return connection.call(connection.runs.ListRuns, request)

    return list(islice((run for answer in pages(page) for run in answer.runs), limit))


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@with_output
@with_scheduler
def cancel(connection: Connection, names: tuple[str, ...], output: str) -> None:
    """Cancels Runs or Calls with all their descendants. Harmless when they have ended.

    NAME is the full name of a Run or Call, or the id of a Run. The functions get SIGTERM, and a grace period to save
    their work.
    """
    parsed = [parse_name(name) for name in names]
    for name in parsed:
        if name.kind not in {Kind.RUN, Kind.CALL}:
            raise WrongUsage(
                f"{name} can not be cancelled",
                "only Runs and Calls can",
                "name its Call, or its Run" if name.kind is Kind.ATTEMPT else "see `outerproduct runs` for the names",
            )
    for name in parsed:
        _cancel_one(connection, name, output)


def _cancel_one(connection: Connection, name: Name, output: str) -> None:
    from outerproduct.v1.run_service_pb2 import CancelCallRequest, CancelRunRequest

    answer: Run | Call
    with explained(str(name)):
        if name.kind is Kind.RUN:
            answer = connection.call(connection.runs.CancelRun, CancelRunRequest(name=name.full))
            status = run_status(answer)
        else:
            answer = connection.call(connection.runs.CancelCall, CancelCallRequest(name=name.full))
            status = call_status(answer)
    if output == "json":
        out.print_json_line(answer)
    else:
        click.echo(f"{out.clean(answer.name)}: {status}")
