from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import click
import pytest

from qbench.cli import main as main_module
from qbench.cli.answers import Answer, answering
from qbench.cli.main import COMMANDS, cli, explain, run_command_line
from qbench.errors import MeasurementError, ModelError, RunDirError
from qbench.records import Verdict


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Let ``qbench doctor`` end as the test says: return an answer, or raise."""
    ends: list[Any] = []

    @click.command("doctor")
    @click.option("--depth", type=int, default=1)
    @answering(needs_runtime=False)
    def command(depth: int) -> Answer:
        end = ends[0]
        if isinstance(end, BaseException):
            raise end
        assert isinstance(end, Answer)
        return end

    monkeypatch.setattr(cli, "get_command", lambda ctx, name: command)
    yield ends


def test_every_command_exists_and_says_its_one_line_of_help_itself() -> None:
    context = click.Context(cli)
    assert cli.list_commands(context) == list(COMMANDS)
    for name, line in COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None and command.help is not None
        assert command.help.split("\n")[0] == line
        assert "Example" in (command.epilog or command.help), f"{name} shows no example"
        assert any("--json" in p.opts for p in command.params), f"{name} has no --json"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["swep"], ["no such command 'swep' (did you mean 'sweep'?)", "commands: run, layers"]),
        (["doctor", "--jsn"], ["no such option '--jsn' (did you mean '--json'?)", "doctor --help"]),
        (["doctor", "--depth", "x"], ["'x' is not a valid integer"]),
        (["doctor", "surplus"], ["unexpected extra argument"]),
    ],
)
def test_a_wrong_command_line_is_one_clear_error(
    outcome: list[Any], capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    assert run_command_line(arguments) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("error: ") and "Traceback" not in told.err
    for part in parts:
        assert part in told.err


def test_no_command_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line([]) == 2
    assert "Commands:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (ModelError("no such model: x.onnx"), 2, "error: no such model: x.onnx"),
        (RunDirError("made for another model"), 2, "made for another model"),
        (MeasurementError("the runtime refused"), 1, "the runtime refused"),
        (OSError(errno.ENOSPC, "No space", "results/x"), 2, "the disk is full (results/x)"),
        (PermissionError(errno.EACCES, "Permission denied", "r/x"), 2, "Permission denied: r/x"),
        (MemoryError(), 2, "not enough memory"),
        (KeyboardInterrupt(), 130, "continue with the same command"),
        (ZeroDivisionError("division"), 70, "defect in qbench: ZeroDivisionError: division"),
    ],
)
def test_every_error_is_one_message_and_its_exit_code(
    outcome: list[Any],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    part: str,
) -> None:
    outcome.append(error)
    assert run_command_line(["doctor"]) == code
    told = capsys.readouterr()
    assert part in told.err and told.out == "" and "Traceback" not in told.err
    assert run_command_line(["doctor", "--json"]) == code
    content = json.loads(capsys.readouterr().out)
    assert content["exit_code"] == code and content["error"] in f"error: {content['error']}"


def test_debug_lets_an_error_through_with_its_traceback(outcome: list[Any]) -> None:
    outcome.append(ZeroDivisionError("division"))
    with pytest.raises(ZeroDivisionError):
        run_command_line(["--debug", "doctor"])


@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_verdict_that_is_not_good_is_exit_code_1_and_named(
    outcome: list[Any], capsys: pytest.CaptureFixture[str], verdict: Verdict
) -> None:
    outcome.append(Answer({"drop": float("inf")}, verdict=verdict))
    code = 0 if verdict is Verdict.VERIFIED else 1
    assert run_command_line(["doctor", "--json"]) == code
    content = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert content == {"drop": None, "verdict": str(verdict), "exit_code": code}


def test_an_answer_is_drawn_for_people(
    outcome: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome.append(Answer({"a": 1}, show=lambda console: console.print("drawn")))
    assert run_command_line(["doctor"]) == 0
    assert capsys.readouterr().out == "drawn\n"


def test_explain_knows_click_errors_without_a_context() -> None:
    assert explain(click.UsageError("Wrong."))[0] == "wrong; see `qbench --help`"
    assert explain(click.FileError("f", "unreadable"))[1] == 2


def test_version_and_help_are_quick_and_load_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from qbench.cli.main import run_command_line\n"
        "code = run_command_line(['--help']) or run_command_line(['--version'])\n"
        "heavy = {'torch', 'pandas', 'onnx', 'rich', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "calibrate" in done.stdout and "version 0." in done.stdout


def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    command = f"{sys.executable} -m qbench.cli.main --help | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("Usage:") and "Traceback" not in done.stderr


def test_libraries_are_quiet_unless_debugging(outcome: list[Any]) -> None:
    import logging

    outcome.append(Answer())
    logging.getLogger("torch").setLevel(logging.NOTSET)
    assert run_command_line(["--debug", "doctor"]) == 0
    assert logging.getLogger("torch").level == logging.NOTSET
    run_command_line(["doctor"])
    assert logging.getLogger("torch").level == logging.ERROR
    assert main_module.EXIT_DEFECT not in (0, 1, 2)


def test_what_native_libraries_print_stays_out_of_the_answer() -> None:
    code = (
        "import os; from qbench.cli.main import keep_output_ours; keep_output_ours();"
        "os.write(1, b'a stray printf\\n'); print('{}')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "{}\n" and "a stray printf" in done.stderr
