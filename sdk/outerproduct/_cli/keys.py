"""`keys`: API keys, made, listed and revoked on the scheduler's machine by its own command.

Keys are a matter of whoever may read the scheduler's data folder, so there is no RPC for them: the scheduler's
`keys` command does the work, in a process of its own, and this gives it flags and a face like the others'.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any

import click

from outerproduct._cli import output as out
from outerproduct._cli._connection import with_output
from outerproduct._cli.data_folder import default_data_dir, scheduler_dir
from outerproduct._cli.errors import CommandError, WrongUsage
from outerproduct._cli.servers import SCHEDULER, require

ROLES = ("user", "operator", "agent")


def _with_database(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the flags that say which database, and the arguments that they become as `where`."""

    @click.option(
        "--data-dir",
        type=click.Path(path_type=Path, file_okay=False),
        envvar="OUTERPRODUCT_SCHEDULER_DATA_DIR",
        default=lambda: scheduler_dir(default_data_dir()),
        show_default="that of `outerproduct up`",
        help="The scheduler's data folder.",
    )
    @click.option(
        "--database-url",
        envvar="OUTERPRODUCT_SCHEDULER_DATABASE_URL",
        help="SQLAlchemy URL, when the scheduler's database is not in its data folder.",
    )
    @wraps(command)
    def wrapped(data_dir: Path, database_url: str | None, **arguments: Any) -> None:
        require(SCHEDULER)
        if not database_url and not data_dir.is_dir():
            raise WrongUsage(
                "there is no scheduler's data folder",
                str(data_dir),
                "run this on the scheduler's machine, and name its folder with --data-dir",
            )
        where = ["--data-dir", str(data_dir)]
        if database_url:
            where += ["--database-url", database_url]
        command(where, **arguments)

    return wrapped


@click.group()
def keys() -> None:
    """Creates, lists and revokes API keys; on the scheduler's machine."""


@keys.command()
@click.option("--name", required=True, help="Who it is for; shown as created_by.")
@click.option("--role", required=True, type=click.Choice(ROLES), help="What it may do.")
@with_output
@_with_database
def create(where: list[str], name: str, role: str, output: str) -> None:
    """Makes a key and prints it, this once: only its hash is stored."""
    key = _run(f"key {name!r}", ["create", "--name", name, "--role", role, *where]).strip()
    click.echo(json.dumps({"name": name, "role": role, "key": key}) if output == "json" else key)


@keys.command("list")
@with_output
@_with_database
def list_keys(where: list[str], output: str) -> None:
    """Lists the keys, revoked ones too; never the keys themselves."""
    found = [json.loads(line) for line in _run("the list of keys", ["list", *where]).splitlines()]
    if output == "json":
        click.echo(json.dumps({"keys": found}, indent=2))
        return
    rows = [(key["name"], key["role"], _moment(key["created_at"]), _moment(key["revoked_at"])) for key in found]
    out.print_table(("NAME", "ROLE", "CREATED", "REVOKED"), rows, "No keys yet: `outerproduct keys create` makes one.")


@keys.command()
@click.argument("name")
@_with_database
def revoke(where: list[str], name: str) -> None:
    """Refuses the key NAME from now on."""
    _run(f"key {name!r}", ["revoke", *where, "--", name])
    click.echo(f"{out.clean(name)}: revoked")


def _moment(seconds: float | None) -> str:
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _run(subject: str, arguments: list[str]) -> str:
    """What the scheduler's `keys` command prints. Raises CommandError with what it says otherwise."""
    done = subprocess.run(
        [sys.executable, "-m", SCHEDULER.module, "keys", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise CommandError(
            f"{subject}: the scheduler's `keys` command failed",
            done.stderr.strip().removeprefix("Error: ") or f"exit code {done.returncode}",
            "correct what it names, and repeat the command",
        )
    return done.stdout
