"""The scheduler's command line: `python -m outerproduct_scheduler`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from outerproduct_scheduler import keys as api_keys
from outerproduct_scheduler.config import SchedulerConfig
from outerproduct_scheduler.database import make_engine, migrate
from outerproduct_scheduler.errors import SchedulerError
from outerproduct_scheduler.server import serve
from outerproduct_service import logs
from outerproduct_service.settings import EXIT_FAILED, exit_for_configuration, flags_of


def _load(config_file: Path | None, flags: dict[str, Any]) -> SchedulerConfig:
    try:
        return SchedulerConfig.load(config_file, flags)
    except (ValidationError, OSError, ValueError) as error:
        exit_for_configuration(error)


@click.group(invoke_without_command=True)
@flags_of(SchedulerConfig)
@click.pass_context
def main(context: click.Context, /, config_file: Path | None, **flags: Any) -> None:
    """Runs the scheduler until SIGTERM."""
    if context.invoked_subcommand is not None:
        return
    config = _load(config_file, flags)
    logs.configure(config.log_format)
    try:
        asyncio.run(serve(config))
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_FAILED)


@main.group()
def keys() -> None:
    """API keys of users, operators and agents."""


def _engine(data_dir: Path | None, database_url: str | None) -> Any:
    flags = {"data_dir": data_dir, "database_url": database_url}
    config = _load(None, flags)
    config.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    engine = make_engine(config.url)
    migrate(engine)
    return engine


_DATA_DIR = click.option("--data-dir", type=click.Path(path_type=Path), help="the scheduler's data folder")
_DATABASE_URL = click.option("--database-url", help="SQLAlchemy URL, when it is not SQLite in the data folder")


@keys.command("create")
@click.option("--name", required=True, help="who it is for; shown as created_by")
@click.option("--role", required=True, type=click.Choice(api_keys.KEY_ROLES))
@_DATA_DIR
@_DATABASE_URL
def create_key(name: str, role: str, data_dir: Path | None, database_url: str | None) -> None:
    """Makes a key and prints it, this once."""
    try:
        click.echo(api_keys.create(_engine(data_dir, database_url), name, role))
    except SchedulerError as error:
        raise click.ClickException(str(error)) from error


@keys.command("list")
@_DATA_DIR
@_DATABASE_URL
def list_keys(data_dir: Path | None, database_url: str | None) -> None:
    """One JSON object a line: name, role, created_at, revoked_at."""
    for key in api_keys.list_keys(_engine(data_dir, database_url)):
        click.echo(
            json.dumps({"name": key.name, "role": key.role, "created_at": key.created_at, "revoked_at": key.revoked_at})
        )


@keys.command("revoke")
@click.argument("name")
@_DATA_DIR
@_DATABASE_URL
def revoke_key(name: str, data_dir: Path | None, database_url: str | None) -> None:
    """Refuses a key from now on."""
    try:
        api_keys.revoke(_engine(data_dir, database_url), name)
    except SchedulerError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
