"""`completion`: the script that teaches a shell the commands and flags. click makes it; this prints it."""

from __future__ import annotations

import click

PROGRAM = "outerproduct"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Prints the completion script of SHELL.

    \b
    bash:  outerproduct completion bash > ~/.local/share/bash-completion/completions/outerproduct
    zsh:   eval "$(outerproduct completion zsh)"    in ~/.zshrc
    fish:  outerproduct completion fish > ~/.config/fish/completions/outerproduct.fish
    """
    from click.shell_completion import get_completion_class

    from outerproduct._cli.main import main

    kind = get_completion_class(shell)
    if kind is None:
        raise click.BadParameter(f"click has no completion for {shell}", param_hint="shell")
    click.echo(kind(main, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source())
