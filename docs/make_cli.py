"""Write docs/cli.md from the commands' own help. ``make docs`` runs it; a test compares."""

from __future__ import annotations

from pathlib import Path

import click

from qbench.cli.main import cli

PAGE = Path(__file__).with_name("cli.md")
_HEAD = """\
# The command line

Written by `make docs` from the commands' own help; do not edit.

Exit codes: 0 done · 1 measured, and the verdict is not good (its name is in `--json`) ·
2 bad input · 130 interrupted (the same command continues) · 70 a defect of qbench.

Results go to standard output, progress and errors to standard error. With `--json` standard
output is one JSON object; an error is `{"error": …, "exit_code": …}`.
"""


def render() -> str:
    """Return the page."""
    settings = {**cli.context_settings, "max_content_width": 88, "terminal_width": 88}
    parent = click.Context(cli, info_name="qbench", **settings)
    parts = [_HEAD, _section("qbench", cli, parent)]
    for name in cli.list_commands(parent):
        command = cli.get_command(parent, name)
        assert command is not None
        context = click.Context(command, parent, info_name=name, **settings)
        parts.append(_section(f"qbench {name}", command, context))
    return "\n".join(parts)


def _section(title: str, command: click.Command, context: click.Context) -> str:
    help_text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    return f"## {title}\n\n```text\n{help_text}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
