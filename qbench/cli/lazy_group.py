"""A group of commands that imports a command's module only when that command runs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from qbench.errors import did_you_mean


class LazyGroup(click.Group):
    """A group that knows its commands by name and one line of help.

    The command ``x`` is the object ``command`` in the module ``<package>.x``.
    """

    def __init__(self, *args: Any, commands_by_name: Mapping[str, str], package: str, **kw: Any):
        super().__init__(*args, **kw)
        self.commands_by_name = dict(commands_by_name)
        self.package = package

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of the path."""
        return list(self.commands_by_name)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command, or return ``None`` if there is none of that name."""
        if cmd_name not in self.commands_by_name:
            return None
        module = importlib.import_module(f"{self.package}.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first argument names.

        Raises:
            click.UsageError: If there is none; near misses and every name are told.
        """
        if args and args[0] not in self.commands_by_name and not args[0].startswith("-"):
            names = list(self.commands_by_name)
            raise click.UsageError(
                f"no such command {args[0]!r}{did_you_mean(args[0], names)}; "
                f"commands: {', '.join(names)}",
                ctx,
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self.commands_by_name.items()))
