"""The ``qbench`` command: finds the command, runs it, and turns errors into one clear message.

Exit codes: 0 done; 1 measured, with a verdict that is not good (its name is in ``--json``);
2 bad input; 130 interrupted; 70 a defect of qbench itself.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import click

from qbench import __version__
from qbench.cli.lazy_group import LazyGroup
from qbench.errors import QbenchError, did_you_mean

#: Commands in the order of the path, each with its one line of help.
COMMANDS = {
    "run": "Run the whole path from a configuration file.",
    "layers": "List the layers of a model, and the nodes that are in none.",
    "calibrate": "Find the range of every tensor that a format needs.",
    "sweep": "Measure every layer in every format.",
    "resume": "Continue a run that was stopped.",
    "audit": "Say which cheap proxy orders layers as the measurement does.",
    "plan": "Choose a format for each layer.",
    "build": "Build the engine of a plan.",
    "verify": "Verify an engine on samples that nothing else saw.",
    "bench": "Measure engines under load in the batcher, and say what they carry.",
    "serve": "Serve an engine over HTTP: Open Inference Protocol v2, texts, and metrics.",
    "export-triton": "Write an engine as a model repository for Triton.",
    "report": "Write the report of a run: one self-contained page that needs no network.",
    "doctor": "Say what is installed, what can run here, and what is missing.",
}
EXIT_INTERRUPTED = 130
EXIT_DEFECT = 70
#: Name of a thread that waits for a library to let go.
LEAVING = "qbench-leaving"
_FILE_ERRORS = (
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)
_SYSTEM_WORDS = {
    errno.EEXIST: "this is a file, and a folder is needed",
    errno.EISDIR: "this is a folder, and a file is needed",
    errno.ENOTDIR: "a part of this path is a file, and a folder is needed",
}
_CHATTY = ("datasets", "huggingface_hub", "onnx_ir", "onnxscript", "torch", "transformers")


@click.group(
    cls=LazyGroup,
    commands_by_name=COMMANDS,
    package="qbench.cli",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, "--version", prog_name="qbench")
@click.option("--debug", is_flag=True, help="Show warnings of libraries, and tracebacks.")
def cli(debug: bool) -> None:
    """Find which layers of a transformer may drop in precision, and prove the engine that results.

    Begin with `qbench doctor`, then `qbench run configs/demo.yaml`.
    """
    if not debug:
        _quiet_libraries()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    keep_output_ours()
    leave(run_command_line(list(sys.argv[1:] if arguments is None else arguments)))


def leave(code: int) -> None:
    """End the process; at once where a library hangs for good, as Ray does in a silent cluster."""
    if any(thread.name == LEAVING for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def keep_output_ours() -> None:
    """Send what native libraries print to standard error: standard output is for answers alone.

    A solver's stray ``printf`` in the middle of ``--json`` would make it no JSON at all. What
    Python prints still goes where the caller asked for it.
    """
    try:
        sys.stdout.flush()
        ours = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        return  # one of the two is closed or no file: there is nothing to part
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = open(ours, "w", encoding=encoding, errors=errors, buffering=1)  # noqa: SIM115


def run_command_line(arguments: list[str]) -> int:
    """Run one command line and return its exit code; errors are printed, not raised."""
    as_json, debug = "--json" in arguments, "--debug" in arguments
    try:
        result = cli.main(arguments, prog_name="qbench", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (click.Abort, KeyboardInterrupt):
        told = "interrupted; what was measured is kept: continue with the same command"
        return _fail(told, EXIT_INTERRUPTED, as_json)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone: nothing is left to say
        return EXIT_INTERRUPTED
    except Exception as error:
        if debug:
            raise
        message, code = explain(error)
        return _fail(message, code, as_json, getattr(error, "verdict", "failed"))


def explain(error: Exception) -> tuple[str, int]:
    """Return the message and the exit code for an error."""
    if isinstance(error, click.UsageError):
        return _explain_usage(error), 2
    if isinstance(error, click.ClickException):
        return error.format_message(), 2
    if isinstance(error, QbenchError):
        return str(error), error.exit_code
    if isinstance(error, MemoryError):
        return "not enough memory; a lower sweep.max_tokens or run.threads needs less", 2
    if isinstance(error, OSError) and (told := _explain_system(error)):
        return told, 2
    return (
        f"defect in qbench: {type(error).__name__}: {error}; please report it with what "
        "`qbench --debug …` prints",
        EXIT_DEFECT,
    )


def _explain_system(error: OSError) -> str:
    """Return a message where the file system is the cause, else an empty string."""
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full{where}; make room and run the same command again"
    if error.filename and error.errno in _FILE_ERRORS:
        return f"{_SYSTEM_WORDS.get(error.errno, error.strerror)}: {error.filename}"
    return ""


def _explain_usage(error: click.UsageError) -> str:
    """Return click's message with near misses, and where the help is."""
    message = error.format_message()
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        allowed = [name for p in error.ctx.command.params for name in p.opts]
        near = did_you_mean(error.option_name, allowed)
        message = f"no such option {error.option_name!r}{near}"
    path = error.ctx.command_path if error.ctx else "qbench"
    return f"{message[:1].lower()}{message[1:].rstrip('.')}; see `{path} --help`"


def _fail(message: str, code: int, as_json: bool, verdict: str = "failed") -> int:
    if as_json:
        content: dict[str, Any] = {"error": message, "exit_code": code}
        if code == 1:
            content["verdict"] = verdict
        print(json.dumps(content, ensure_ascii=False))
    print(f"error: {message}", file=sys.stderr)
    return code


def _quiet_libraries() -> None:
    """Keep libraries' warnings and logs off the terminal; ``--debug`` shows them."""
    warnings.simplefilter("ignore")
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
