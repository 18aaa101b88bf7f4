"""What commands print: tables and cards for people, protobuf JSON for programs.

Everything that came from outside (names, errors, reasons) goes through `clean`, since a terminal obeys control
characters, and reaches rich as `Text`, since rich obeys markup.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from google.protobuf.timestamp_pb2 import Timestamp
    from rich.console import RenderableType

    from outerproduct.v1.resources_pb2 import ComputeResources, ComputeSpec

PIPE_COLUMNS = 1000
"""Width of what is not a terminal: wide enough that no cell is folded, so that grep and awk see whole values."""

COLOURS: Mapping[str, str] = {
    "READY": "green",
    "COMPLETED": "green",
    "FAILED": "red",
    "LOST": "red",
    "UNREACHABLE": "red",
    "QUARANTINED": "red",
    "UNHEALTHY": "red",
    "CANCELLED": "yellow",
    "CANCELLING": "yellow",
    "CORDONED": "yellow",
    "DRAINING": "yellow",
}


def clean(text: str) -> str:
    """Without colours and control characters: they would be orders to the terminal. Line breaks and tabs stay."""
    plain = click.unstyle(text)
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in plain)


def one_line(text: str) -> str:
    """The first line, for a cell of a table."""
    lines = clean(text).strip().splitlines()
    return lines[0] if lines else ""


def size(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1: 1536 → "1.5 KiB"."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1023.95:
            return f"{_short(value)} {unit}"
    return f"{_short(value / 1024)} TiB"


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def duration(seconds: float) -> str:
    """The two largest units: 3725 → "1h 2m"."""
    whole = max(0, int(seconds))
    days, rest = divmod(whole, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    parts = [f"{value}{unit}" for value, unit in ((days, "d"), (hours, "h"), (minutes, "m"), (left, "s")) if value]
    return " ".join(parts[:2]) or "0s"


def age(time: Timestamp, now: datetime) -> str:
    """How long ago; empty for a time that is not set."""
    return duration((now - time.ToDatetime(UTC)).total_seconds()) if time.seconds else ""


def moment(time: Timestamp) -> str:
    """A time in UTC to the second; empty when it is not set."""
    return f"{time.ToDatetime(UTC):%Y-%m-%d %H:%M:%S} UTC" if time.seconds else ""


def resources(value: ComputeResources | ComputeSpec) -> str:
    """ "8 CPUs, 32 GiB, 2 x L4" """
    parts = [f"{value.cpus} CPU{'' if value.cpus == 1 else 's'}", size(value.memory_bytes)]
    if value.accelerator_count:
        parts.append(f"{value.accelerator_count} x {clean(value.accelerator) or 'any GPU'}")
    return ", ".join(parts)


def word(enum_name: str, prefix: str) -> str:
    """ "NODE_CONDITION_READY" without its prefix."""
    return enum_name.removeprefix(prefix)


def print_json(value: Message | Mapping[str, Message | Sequence[Message]]) -> None:
    """Protobuf JSON as grpcurl prints it, fields with default values included."""
    click.echo(json.dumps(_jsonable(value), indent=2, ensure_ascii=False))


def print_json_line(value: Message, *, with_defaults: bool = True) -> None:
    """The same on one line, for streams."""
    click.echo(json.dumps(_jsonable(value, with_defaults=with_defaults), ensure_ascii=False))


def _jsonable(value: Any, *, with_defaults: bool = True) -> Any:
    from google.protobuf.json_format import MessageToDict

    if isinstance(value, Mapping):
        return {name: _jsonable(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [_jsonable(item) for item in value]
    return MessageToDict(value, always_print_fields_with_no_presence=with_defaults)


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> None:
    """A table on stdout; `empty` on stderr when there are no rows. Columns whose header ends in ">" go right."""
    from rich.table import Table
    from rich.text import Text

    filled = [list(row) for row in rows]
    if not filled:
        click.echo(empty, err=True)
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(
            Text(header.removesuffix(">")), justify="right" if header.endswith(">") else "left", overflow="fold"
        )
    for row in filled:
        table.add_row(*(Text(clean(cell), style=COLOURS.get(cell, "")) for cell in row))
    _print(table)


def print_card(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """A title and what is known below it, one fact a line; facts without a value are left out."""
    from rich.table import Table
    from rich.text import Text

    _print(Text(clean(title), style="bold"))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        if value:
            table.add_row(Text(f"  {name}", style="dim"), Text(clean(value), style=COLOURS.get(value, "")))
    _print(table)


def print_heading(text: str) -> None:
    from rich.text import Text

    _print(Text(f"\n{clean(text)}", style="bold"))


def _print(renderable: RenderableType) -> None:
    """To stdout, without the blanks that rich puts behind the last column."""
    from rich.console import Console

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    for line in capture.get().splitlines():
        click.echo(line.rstrip())
