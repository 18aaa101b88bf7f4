"""The nodes: `nodes`, and the operator's levers `cordon`, `uncordon`, `drain` and `label`."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from outerproduct._cli import output as out
from outerproduct._cli._connection import Connection, with_output, with_scheduler
from outerproduct._cli.errors import explained

if TYPE_CHECKING:
    from outerproduct.v1.node_service_pb2 import Node

_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_UNIT_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def _duration(text: str) -> float:
    """Seconds, from "90", "90s", "10m", "2h" or "1d"."""
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise click.BadParameter(f"{text!r} must be a number of seconds, or one with s, m, h or d behind it: 90, 10m")
    return float(match[1]) * _UNIT_SECONDS[match[2]]


def condition(node: Node) -> str:
    """ "READY", "CORDONED", ..."""
    from outerproduct.v1.node_service_pb2 import NodeCondition

    return out.word(NodeCondition.Name(node.status.condition), "NODE_CONDITION_")


def _free(node: Node) -> tuple[str, str, str]:
    """CPUs, memory and GPUs, each as free/total."""
    total, used = node.total_resources, node.status.allocated_resources
    gpus = ""
    if total.accelerator_count:
        free = max(0, total.accelerator_count - used.accelerator_count)
        gpus = f"{free}/{total.accelerator_count} {total.accelerator}"
    if not total.cpus:
        # "<machine>/<type>" has GPUs only; CPUs and memory are in the machine's own row.
        return "", "", gpus
    memory = f"{out.size(max(0, total.memory_bytes - used.memory_bytes))}/{out.size(total.memory_bytes)}"
    return f"{max(0, total.cpus - used.cpus)}/{total.cpus}", memory, gpus


@click.command()
@with_output
@with_scheduler
def nodes(connection: Connection, output: str) -> None:
    """Lists the nodes, also those that can not run Calls now.

    CPUs, memory and GPUs are shown as free/total. A machine with two kinds of GPU has a further row NODE/TYPE for each
    further kind.
    """
    with explained("the list of nodes"):
        found = connection.all_nodes()
    if output == "json":
        out.print_json({"nodes": found})
        return
    now = datetime.now(UTC)
    rows = [
        (
            node.name,
            condition(node),
            *_free(node),
            str(node.status.attempt_count),
            out.age(node.status.last_seen_at, now),
            out.one_line(node.status.reason),
        )
        for node in found
    ]
    headers = ("NODE", "STATE", "CPUS>", "MEMORY>", "GPUS", "ATTEMPTS>", "SEEN>", "REASON")
    out.print_table(headers, rows, "No node has registered yet: start an agent, or `outerproduct up`.")


def _print_changed(node: Node, output: str) -> None:
    if output == "json":
        out.print_json(node)
        return
    deadline = out.moment(node.status.drain_deadline)
    reason = f" ({out.one_line(node.status.reason)})" if node.status.reason else ""
    click.echo(
        f"{out.clean(node.name)}: {condition(node)}{reason}, {node.status.attempt_count} Attempts on it"
        + (f", stopped at {deadline}" if deadline else "")
    )


@click.command()
@click.argument("node")
@click.option("--reason", default="", help="For people; shown as the node's reason.")
@with_output
@with_scheduler
def cordon(connection: Connection, node: str, reason: str, output: str) -> None:
    """Gives NODE no new Attempts; those on it go on. For operators."""
    from outerproduct.v1.node_service_pb2 import CordonNodeRequest

    with explained(f"node {node}"):
        changed = connection.call(connection.nodes.CordonNode, CordonNodeRequest(name=node, reason=reason))
    _print_changed(changed, output)


@click.command()
@click.argument("node")
@with_output
@with_scheduler
def uncordon(connection: Connection, node: str, output: str) -> None:
    """Takes cordon and drain of NODE back. For operators."""
    from outerproduct.v1.node_service_pb2 import UncordonNodeRequest

    with explained(f"node {node}"):
        changed = connection.call(connection.nodes.UncordonNode, UncordonNodeRequest(name=node))
    _print_changed(changed, output)


@click.command()
@click.argument("node")
@click.option(
    "--deadline",
    type=_duration,
    metavar="DURATION",
    default="0",
    help="After this time (90, 90s, 10m, 2h) what still runs is stopped and placed elsewhere.  [default: never]",
)
@click.option("--reason", default="", help="For people; shown as the node's reason.")
@with_output
@with_scheduler
def drain(connection: Connection, node: str, deadline: float, reason: str, output: str) -> None:
    """Empties NODE: no new Attempts, and those on it end by themselves or at the deadline. For operators."""
    from outerproduct.v1.node_service_pb2 import DrainNodeRequest

    request = DrainNodeRequest(name=node, deadline_seconds=deadline, reason=reason)
    with explained(f"node {node}"):
        changed = connection.call(connection.nodes.DrainNode, request)
    _print_changed(changed, output)


@click.command()
@click.argument("node")
@click.argument("labels", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--clear", is_flag=True, help="Take all labels away that were given before.")
@with_output
@with_scheduler
def label(connection: Connection, node: str, labels: tuple[str, ...], output: str, *, clear: bool) -> None:
    """Sets the labels of NODE: they replace all that were given to it before. For operators."""
    from outerproduct.v1.node_service_pb2 import SetNodeLabelsRequest

    if bool(labels) == clear:
        raise click.UsageError("Give the labels that NODE is to have as KEY=VALUE, or --clear for none.")
    pairs = {}
    for text in labels:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{text!r} must be KEY=VALUE, such as site=berlin", param_hint="labels")
        pairs[key] = value
    with explained(f"node {node}"):
        changed = connection.call(connection.nodes.SetNodeLabels, SetNodeLabelsRequest(name=node, labels=pairs))
    if output == "json":
        out.print_json(changed)
    else:
        shown = ", ".join(f"{key}={value}" for key, value in sorted(changed.labels.items())) or "no labels"
        click.echo(out.clean(f"{changed.name}: {shown}"))
