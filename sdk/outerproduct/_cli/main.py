"""The root of the command `outerproduct`: which commands there are, and where each lives.

Commands are imported when they are used, so that `--help`, completion and `--version` load neither grpc nor rich.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from outerproduct._cli.errors import EXIT_CODES

COMMANDS: Mapping[str, tuple[str, str]] = {
    "up": ("up", "Run scheduler and agent on this machine until Ctrl-C."),
    "scheduler": ("servers", "Run a scheduler."),
    "agent": ("servers", "Run a node agent."),
    "nodes": ("nodes", "List the nodes: free of total, state, Attempts."),
    "runs": ("runs", "List Runs, newest first."),
    "describe": ("describe", "Show a Run, Call, Attempt or Node."),
    "logs": ("logs", "Show the output of a Run, Call or Attempt."),
    "cancel": ("runs", "Cancel Runs or Calls."),
    "cordon": ("nodes", "Give a node no new Attempts."),
    "uncordon": ("nodes", "Take cordon and drain back."),
    "drain": ("nodes", "Empty a node."),
    "label": ("nodes", "Set the labels of a node."),
    "keys": ("keys", "Create, list and revoke API keys."),
    "completion": ("completion", "Print the shell's completion script."),
}
"""Name → module and one line of help. The line is repeated here so that the list of commands imports none of them."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"outerproduct._cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from outerproduct import __version__

        click.echo(f"outerproduct {__version__}")
        context.exit()


@click.command(cls=LazyGroup, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="The version."
)
def main(**_: Any) -> None:
    """Run Python functions on your own GPU machines."""


if __name__ == "__main__":
    main()
