"""`logs`: what an Attempt wrote, byte for byte, its stdout to ours and its stderr to ours."""

from __future__ import annotations

import sys

import click

from outerproduct._cli import output as out
from outerproduct._cli._connection import RPC_SECONDS, Connection, with_output, with_scheduler
from outerproduct._cli.errors import EXIT_INTERRUPTED, WrongUsage, explained
from outerproduct._cli.names import Kind, Name, parse_name

LOOK_SECONDS = 1.0
"""How long a wait for the next Attempt lasts before the Call is looked at again: it is answered earlier at its end."""


@click.command()
@click.argument("name")
@click.option("--follow", "-f", is_flag=True, help="Go on until the end, from Attempt to Attempt.")
@with_output
@with_scheduler
def logs(connection: Connection, name: str, output: str, *, follow: bool) -> None:
    """Shows the output of NAME: an Attempt, or the latest Attempt of a Call or of a Run's root Call.

    What the function wrote to stderr goes to stderr. With `--output json` each piece is an object on a line of its
    own, its bytes in base64.
    """
    parsed = parse_name(name)
    if parsed.kind is Kind.NODE:
        raise WrongUsage(
            f"{parsed.full!r} has no output", "only Runs, Calls and Attempts have", "see `outerproduct runs`"
        )
    try:
        with explained(str(parsed)):
            if parsed.kind is Kind.ATTEMPT:
                _show_attempt(connection, parsed.full, output, follow=follow)
            else:
                _show_call(connection, _call_name(connection, parsed), output, follow=follow)
    except KeyboardInterrupt:
        if follow:
            click.echo(f"\nIt runs on; `outerproduct cancel` ends it. {parsed}", err=True)
        sys.exit(EXIT_INTERRUPTED)


def _call_name(connection: Connection, name: Name) -> str:
    from outerproduct.v1.run_service_pb2 import GetRunRequest

    if name.kind is Kind.CALL:
        return name.full
    return connection.call(connection.runs.GetRun, GetRunRequest(name=name.full)).root_call.name


def _show_call(connection: Connection, name: str, output: str, *, follow: bool) -> None:
    from outerproduct.v1.call_pb2 import CALL_STATUS_CANCELLING, CALL_STATUS_RUNNING
    from outerproduct.v1.run_service_pb2 import GetCallRequest, WaitCallsRequest

    shown = reason = ""
    while True:
        call = connection.call(connection.runs.GetCall, GetCallRequest(name=name))
        if call.latest_attempt not in {"", shown}:
            if shown:
                click.echo(f"==> {call.latest_attempt}", err=True)
            shown = call.latest_attempt
            _show_attempt(connection, shown, output, follow=follow)
        over = call.status not in {CALL_STATUS_RUNNING, CALL_STATUS_CANCELLING}
        if over or not follow:
            if not shown:
                click.echo(f"no output: no Attempt has begun. {out.clean(call.pending_reason)}".rstrip(), err=True)
            return
        if call.pending_reason not in {"", reason}:
            reason = call.pending_reason
            click.echo(f"waiting: {out.clean(reason)}", err=True)
        wait = WaitCallsRequest(names=[name], timeout_seconds=LOOK_SECONDS)
        connection.call(connection.runs.WaitCalls, wait, LOOK_SECONDS + RPC_SECONDS)


def _show_attempt(connection: Connection, name: str, output: str, *, follow: bool) -> None:
    from outerproduct.v1.run_service_pb2 import LOG_STREAM_STDERR, GetAttemptRequest, ReadLogsResponse

    # The stream is patient with a scheduler that is away; this is not, so a wrong address or name is an error.
    connection.call(connection.runs.GetAttempt, GetAttemptRequest(name=name))
    for piece in connection.transport.read_logs({"attempt": name, "follow": follow}):
        if output == "json":
            # The transport keeps next_offset to itself: 0 would be wrong.
            out.print_json_line(ReadLogsResponse(**piece), with_defaults=False)
            continue
        if piece["dropped_bytes"]:
            click.echo(f"\n[{piece['dropped_bytes']} bytes of output were dropped here]", err=True)
        stream = sys.stderr if piece["stream"] == LOG_STREAM_STDERR else sys.stdout
        stream.buffer.write(piece["data"])
        stream.buffer.flush()
