"""What a command gives back: content for machines, a drawing for people, and an exit code."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from qbench.gate import check_runtime
from qbench.records import Verdict, to_dict

if TYPE_CHECKING:
    from rich.console import Console

#: Columns of what is written to a file or a pipe.
PIPED_WIDTH = 120
#: Verdicts that end a command with exit code 0.
GOOD = (None, Verdict.VERIFIED)


@dataclass(frozen=True)
class Answer:
    """The outcome of a command.

    Attributes:
        content: What ``--json`` prints: records and plain values.
        show: Draws the outcome for a person; ``None`` prints nothing.
        verdict: The verdict, where the command gives one. All but ``verified`` are exit code 1.
        failed: Whether the exit code is 2 although there is an answer (``qbench doctor``).
    """

    content: Mapping[str, Any] = field(default_factory=dict)
    show: Callable[[Console], None] | None = None
    verdict: Verdict | None = None
    failed: bool = False

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self.failed:
            return 2
        return 0 if self.verdict in GOOD else 1


def answering(
    *, needs_runtime: bool = True
) -> Callable[[Callable[..., Answer]], Callable[..., int]]:
    """Give a command ``--json``, and print the answer that its function returns.

    With ``--json`` standard output holds one JSON object and nothing else; progress and remarks
    belong on standard error. A number that is not finite is ``null`` there.

    Args:
        needs_runtime: Whether exactly one ONNX Runtime must be installed; checked first.
    """

    def decorate(function: Callable[..., Answer]) -> Callable[..., int]:
        @click.option(
            "--json", "as_json", is_flag=True, help="Print one JSON object, for machines."
        )
        @functools.wraps(function)
        def command(*args: Any, as_json: bool, **options: Any) -> int:
            if needs_runtime:
                check_runtime()
            return give(function(*args, **options), as_json)

        return command

    return decorate


def give(answer: Answer, as_json: bool) -> int:
    """Print an answer to standard output and return its exit code."""
    if as_json:
        click.echo(json.dumps(as_strict_json(answer), ensure_ascii=False))
    elif answer.show is not None:
        answer.show(console())
    return answer.exit_code


def as_strict_json(answer: Answer) -> dict[str, Any]:
    """Return what ``--json`` prints: the content, the verdict and the exit code."""
    content: dict[str, Any] = _finite(to_dict(answer.content))
    if answer.verdict is not None:
        content["verdict"] = str(answer.verdict)
    return {**content, "exit_code": answer.exit_code}


def console(stderr: bool = False) -> Console:
    """Return a console for results (standard output), or for progress and remarks."""
    from rich.console import Console

    found = Console(stderr=stderr, soft_wrap=False, highlight=False)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = PIPED_WIDTH
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
