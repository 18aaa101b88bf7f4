"""`describe`: all that is known of one Run, Call, Attempt or node, on one screen.

With `--output json` it is one object whose keys say what is in it: the thing itself, and what belongs to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from outerproduct._cli import output as out
from outerproduct._cli._connection import PAGE_SIZE, Connection, pages, with_output, with_scheduler
from outerproduct._cli.errors import explained
from outerproduct._cli.names import Kind, parse_name
from outerproduct._cli.nodes import condition
from outerproduct._cli.runs import call_status, run_status

if TYPE_CHECKING:
    from outerproduct.v1.call_pb2 import Attempt, Call, Failure, Outcome, Run
    from outerproduct.v1.node_service_pb2 import Node
    from outerproduct.v1.resources_pb2 import Allocation, Gpu

Facts = Iterable[tuple[str, str]]

MAX_LISTED = 100
"""Calls of a Run, or Attempts of a Call, that are shown: more is no longer one screen."""


@click.command()
@click.argument("name")
@with_output
@with_scheduler
def describe(connection: Connection, name: str, output: str) -> None:
    """Shows NAME: a Run, a Call, an Attempt (full name; of a Run also the id), or a node."""
    parsed = parse_name(name)
    show = {Kind.RUN: _run, Kind.CALL: _call, Kind.ATTEMPT: _attempt, Kind.NODE: _node}[parsed.kind]
    show(connection, parsed.full, as_json=output == "json")


# --- Run


def _run(connection: Connection, name: str, *, as_json: bool) -> None:
    from outerproduct.v1.run_service_pb2 import GetRunRequest

    with explained(f"Run {name}"):
        run = connection.call(connection.runs.GetRun, GetRunRequest(name=name))
        calls = _list_calls(connection, run.name)
        attempts = _list_attempts(connection, run.root_call.name)
    if as_json:
        out.print_json({"run": run, "calls": calls, "attempts": attempts})
        return
    out.print_card(f"Run {run.name}", _run_facts(run))
    click.echo()
    _print_call(run.root_call, attempts)
    # The root Call has a card of its own.
    _print_calls("Calls below it", [call for call in calls if call.name != run.root_call.name])


def _run_facts(run: Run) -> Facts:
    return [
        ("label", run.display_name),
        ("status", run_status(run)),
        ("created by", run.created_by),
        ("created", out.moment(run.created_at)),
    ]


# --- Call


def _call(connection: Connection, name: str, *, as_json: bool) -> None:
    from outerproduct.v1.run_service_pb2 import GetCallRequest

    with explained(f"Call {name}"):
        call = connection.call(connection.runs.GetCall, GetCallRequest(name=name))
        children = _list_calls(connection, call.run, call.name)
        attempts = _list_attempts(connection, call.name)
    if as_json:
        out.print_json({"call": call, "children": children, "attempts": attempts})
        return
    _print_call(call, attempts)
    _print_calls("Children", children)


def _print_call(call: Call, attempts: list[Attempt]) -> None:
    out.print_card(f"Call {call.name}", _call_facts(call))
    if attempts:
        out.print_heading("Attempts")
        rows = [
            (
                str(attempt.number),
                attempt_status(attempt),
                attempt.node,
                _pinned(attempt.allocation),
                _took(attempt.started_at, attempt.finished_at),
                out.one_line(attempt.detail or attempt.error_message),
            )
            for attempt in attempts
        ]
        out.print_table(("NUMBER>", "STATUS", "NODE", "PINNED", "TOOK>", "WHY"), rows, "")


def _call_facts(call: Call) -> Facts:
    repeats = call.retry_strategy.max_attempts
    arguments = ", ".join(f"{item.name}={item.value}" if item.name else item.value for item in call.argument_previews)
    return [
        ("function", f"{call.function}({arguments})"),
        ("status", call_status(call)),
        ("waits", call.pending_reason),
        ("asked for", out.resources(call.compute)),
        ("image", call.image),
        ("label", call.display_name),
        ("labels", _pairs(call.labels)),
        ("parent", call.parent_call),
        ("retries", f"up to {repeats} Attempts in all" if repeats > 1 else ""),
        ("time limit", out.duration(call.timeout_seconds) if call.timeout_seconds else ""),
        ("created", out.moment(call.created_at)),
        ("started", out.moment(call.started_at)),
        ("finished", out.moment(call.finished_at)),
        ("took", _took(call.started_at, call.finished_at)),
        *_outcome_facts(call.outcome),
    ]


def _print_calls(heading: str, calls: list[Call]) -> None:
    if not calls:
        return
    out.print_heading(heading)
    rows = [
        (call.name, call.function, call_status(call), out.one_line(call.pending_reason or call.error_message))
        for call in calls
    ]
    out.print_table(("CALL", "FUNCTION", "STATUS", "WHY"), rows, "")
    if len(calls) >= MAX_LISTED:
        click.echo(f"Only the first {MAX_LISTED} are shown.", err=True)


def _list_calls(connection: Connection, run: str, parent_call: str = "") -> list[Call]:
    from outerproduct.v1.run_service_pb2 import ListCallsRequest

    request = ListCallsRequest(run=run, parent_call=parent_call, page_size=MAX_LISTED)
    return list(connection.call(connection.runs.ListCalls, request).calls)


# --- Attempt


def _attempt(connection: Connection, name: str, *, as_json: bool) -> None:
    from outerproduct.v1.run_service_pb2 import GetAttemptRequest

    with explained(f"Attempt {name}"):
        attempt = connection.call(connection.runs.GetAttempt, GetAttemptRequest(name=name))
    if as_json:
        out.print_json({"attempt": attempt})
        return
    out.print_card(
        f"Attempt {attempt.name}",
        [
            ("status", attempt_status(attempt)),
            ("now", attempt.detail),
            ("node", attempt.node),
            ("pinned", _pinned(attempt.allocation)),
            ("container", attempt.container_id),
            ("created", out.moment(attempt.created_at)),
            ("started", out.moment(attempt.started_at)),
            ("finished", out.moment(attempt.finished_at)),
            ("took", _took(attempt.started_at, attempt.finished_at)),
            *_outcome_facts(attempt.outcome),
        ],
    )


def attempt_status(attempt: Attempt) -> str:
    """ "PENDING", "RUNNING", ..."""
    from outerproduct.v1.call_pb2 import AttemptStatus

    return out.word(AttemptStatus.Name(attempt.status), "ATTEMPT_STATUS_")


def _list_attempts(connection: Connection, call: str) -> list[Attempt]:
    from outerproduct.v1.run_service_pb2 import ListAttemptsRequest

    def page(token: str) -> Any:
        request = ListAttemptsRequest(call=call, page_size=PAGE_SIZE, page_token=token)
        return connection.call(connection.runs.ListAttempts, request)

    found = [attempt for answer in pages(page) for attempt in answer.attempts]
    # The newest ones are those that explain the state.
    return found[-MAX_LISTED:]


def _pinned(allocation: Allocation) -> str:
    parts = []
    if allocation.cpu_ids:
        parts.append(f"CPUs {allocation.cpu_ids}")
    if allocation.numa_nodes:
        parts.append(f"NUMA {allocation.numa_nodes}")
    if allocation.memory_bytes:
        parts.append(out.size(allocation.memory_bytes))
    parts += allocation.gpu_uuids
    return ", ".join(parts)


def _took(started: Any, finished: Any) -> str:
    """How long it has run; until now while it runs."""
    if not started.seconds:
        return ""
    end = finished.ToDatetime(UTC) if finished.seconds else datetime.now(UTC)
    return out.duration((end - started.ToDatetime(UTC)).total_seconds())


# --- Outcome


def _outcome_facts(outcome: Outcome) -> Facts:
    facts = [("result", outcome.result_preview)]
    if outcome.oom_kills:
        facts.append(("killed for memory", f"{outcome.oom_kills} processes, tolerated"))
    if outcome.HasField("failure"):
        facts += _failure_facts(outcome.failure)
    return facts


def _failure_facts(failure: Failure) -> Facts:
    from outerproduct.v1.call_pb2 import FailureKind

    memory = ""
    if failure.memory_limit_bytes:
        peak = out.size(failure.memory_peak_bytes) if failure.memory_peak_bytes else "unknown"
        memory = f"limit {out.size(failure.memory_limit_bytes)}, peak {peak}, /dev/shm {out.size(failure.shm_bytes)}"
    return [
        ("failure", out.word(FailureKind.Name(failure.kind), "FAILURE_KIND_")),
        ("on node", failure.node),
        ("exit code", str(failure.exit_code) if failure.exit_code else ""),
        ("signal", str(failure.signal) if failure.signal else ""),
        ("memory", memory),
        ("message", failure.message),
        # The message of an exception has its traceback already, where the agent put it there.
        ("traceback", "" if failure.traceback and failure.traceback in failure.message else failure.traceback.rstrip()),
    ]


# --- Node


def _node(connection: Connection, name: str, *, as_json: bool) -> None:
    from outerproduct.v1.node_service_pb2 import GetNodeRequest

    with explained(f"node {name}"):
        node = connection.call(connection.nodes.GetNode, GetNodeRequest(name=name))
    if as_json:
        out.print_json({"node": node})
        return
    out.print_card(f"Node {node.name}", _node_facts(node))
    if node.gpus:
        out.print_heading("GPUs")
        rows = [
            (
                str(gpu.index),
                gpu.type,
                gpu_state(gpu),
                out.size(gpu.memory_bytes),
                "" if gpu.numa_node < 0 else str(gpu.numa_node),
                gpu.uuid,
                gpu.attempt or out.one_line(gpu.reason),
            )
            for gpu in node.gpus
        ]
        out.print_table(("GPU>", "TYPE", "STATE", "MEMORY>", "NUMA>", "UUID", "ATTEMPT OR REASON"), rows, "")


def _node_facts(node: Node) -> Facts:
    total, used = node.total_resources, node.status.allocated_resources
    gpus = f"{used.accelerator_count} of {total.accelerator_count} {total.accelerator} given out"
    return [
        ("state", condition(node)),
        ("reason", node.status.reason),
        ("CPUs", f"{used.cpus} of {total.cpus} given out" if total.cpus else ""),
        ("memory", f"{out.size(used.memory_bytes)} of {out.size(total.memory_bytes)} given out" if total.cpus else ""),
        ("GPUs", gpus if total.accelerator_count else ""),
        ("Attempts", str(node.status.attempt_count)),
        ("last seen", out.moment(node.status.last_seen_at)),
        ("drained at", out.moment(node.status.drain_deadline)),
        ("labels", _pairs(node.labels)),
        ("agent", node.agent_version),
    ]


def gpu_state(gpu: Gpu) -> str:
    """ "FREE", "ALLOCATED", ..."""
    from outerproduct.v1.resources_pb2 import GpuState

    return out.word(GpuState.Name(gpu.state), "GPU_STATE_")


def _pairs(labels: Any) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))
