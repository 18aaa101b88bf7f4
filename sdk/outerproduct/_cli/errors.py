"""How a command fails: three parts on stderr, and an exit code that scripts can rely on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from outerproduct._cli.output import clean
from outerproduct._errors import AccessDenied, NotFound, OuterProductError, SchedulerUnavailable

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_NOT_FOUND = 4
EXIT_REFUSED = 5
EXIT_INTERRUPTED = 130

EXIT_CODES = f"""\b
Exit codes:
  0    done
  {EXIT_FAILED}    it could not be done
  {EXIT_USAGE}    the command line is wrong
  {EXIT_UNREACHABLE}    the scheduler can not be reached, or none is configured
  {EXIT_NOT_FOUND}    there is nothing of that name, or it belongs to somebody else
  {EXIT_REFUSED}    the key is unknown, or may not do this
  {EXIT_INTERRUPTED}  Ctrl-C
"""


class CommandError(click.ClickException):
    """What happened, to what, and what to do."""

    exit_code = EXIT_FAILED

    def __init__(self, happened: str, subject: str, remedy: str) -> None:
        super().__init__(happened)
        self.subject = subject
        self.remedy = remedy

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {clean(self.message)}", file=file, err=True)
        click.echo(_indented(self.subject), file=file, err=True)
        click.echo(_indented(f"→ {self.remedy}"), file=file, err=True)


class WrongUsage(CommandError):
    """The command line is wrong."""

    exit_code = EXIT_USAGE


class Unreachable(CommandError):
    """The scheduler can not be reached, or none is configured."""

    exit_code = EXIT_UNREACHABLE


class Missing(CommandError):
    """There is nothing of that name."""

    exit_code = EXIT_NOT_FOUND


class Refused(CommandError):
    """The key is unknown, or may not do this."""

    exit_code = EXIT_REFUSED


@contextmanager
def explained(subject: str) -> Iterator[None]:
    """Turns the SDK's errors into CommandError. `subject` is what the command was about."""
    try:
        yield
    except SchedulerUnavailable as error:
        raise Unreachable(
            "the scheduler can not be reached",
            str(error),
            "start `outerproduct up`, or correct --base-url",
        ) from error
    except NotFound as error:
        raise Missing(
            f"{subject} was not found",
            str(error),
            "see `outerproduct runs` and `outerproduct nodes` for the names",
        ) from error
    except AccessDenied as error:
        raise Refused(
            f"{subject}: access was refused",
            str(error),
            "use a key that may do this: `outerproduct keys create` makes one on the scheduler's machine",
        ) from error
    except (OuterProductError, ValueError) as error:
        raise CommandError(
            f"{subject}: the scheduler did not do it",
            str(error),
            "correct what the scheduler names, and repeat the command",
        ) from error


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in clean(text).splitlines())
