"""How a command fails: three parts on stderr, and an exit code that scripts can rely on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

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

    def __init__(self, happened: str, subject: str, remedy: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(happened)
        self.subject = subject
        self.remedy = remedy
        self.exit_code = exit_code

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {self.message}", file=file, err=True)
        click.echo(_indented(self.subject), file=file, err=True)
        click.echo(_indented(f"→ {self.remedy}"), file=file, err=True)


@contextmanager
def explained(subject: str) -> Iterator[None]:
    """Turns the SDK's errors into CommandError. `subject` is what the command was about."""
    try:
        yield
    except SchedulerUnavailable as error:
        raise CommandError(
            "the scheduler can not be reached",
            str(error),
            "start `outerproduct up`, or correct --base-url",
            EXIT_UNREACHABLE,
        ) from error
    except NotFound as error:
        raise CommandError(
            f"{subject} was not found",
            str(error),
            "see `outerproduct runs` and `outerproduct nodes` for the names",
            EXIT_NOT_FOUND,
        ) from error
    except AccessDenied as error:
        raise CommandError(
            f"{subject}: access was refused",
            str(error),
            "use a key that may do this: `outerproduct keys create` makes one on the scheduler's machine",
            EXIT_REFUSED,
        ) from error
    except (OuterProductError, ValueError) as error:
        raise CommandError(
            f"{subject}: the scheduler did not do it",
            str(error),
            "correct what the scheduler names, and repeat the command",
        ) from error


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
