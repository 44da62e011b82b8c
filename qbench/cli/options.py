"""Options that commands share, and the configuration that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from qbench.config import Config, load_config, make_config
from qbench.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

#: What takes back a limit or a pin that a run was told before.
NOTHING = "none"
_LIMITS = ("budget", "max_memory", "hardware", "max_latency", "max_bytes", "max_bits")
#: Dotted configuration key of each option.
_KEYS = {
    "tokenizer": "model.tokenizer",
    "pooling": "model.pooling",
    "normalize": "model.normalize",
    "output": "model.output",
    "revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "max_length": "model.max_length",
    "data": "data.source",
    "data_name": "data.name",
    "subset": "data.subset",
    "split": "data.split",
    "limit": "data.limit",
    "task": "task.kind",
    "metric": "task.metric",
    "calibrator": "calibrate.calibrator",
    "percentile": "calibrate.percentile",
    "race": "sweep.race",
    "budget": "sweep.budget",
    "max_memory": "sweep.max_memory",
    "batch": "sweep.batch",
    "remedies": "sweep.remedies",
    "scales": "sweep.scales",
    "executor": "sweep.executor",
    "ray_address": "sweep.ray_address",
    "workers": "sweep.workers",
    "backend": "plan.backend",
    "max_drop": "plan.max_drop",
    "objective": "plan.objective",
    "levels": "plan.levels",
    "rounds": "plan.rounds",
    "hardware": "plan.hardware",
    "max_latency": "plan.max_latency",
    "max_bytes": "plan.max_bytes",
    "max_bits": "plan.max_bits",
    "results": "run.results",
    "run_id": "run.id",
    "seed": "run.seed",
    "threads": "run.threads",
}


def number_or_nothing(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> float | str | None:
    """Return the number that an option says, or the word that takes one back."""
    if value is None or value == NOTHING:
        return value
    try:
        return float(value)
    except ValueError:
        raise click.BadParameter(
            f"got {value!r}; allowed: a number, or none", context, parameter
        ) from None


def _all(options: list[Callable[[F], F]]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def model_options(function: F) -> F:
    """Add what a model source leaves open."""
    return _all(
        [
            click.option(
                "--tokenizer", metavar="SPEC", help="Folder, module:callable or file.py:callable."
            ),
            click.option("--pooling", metavar="NAME", help="mean, cls, max, last or none."),
            click.option(
                "--normalize/--no-normalize", default=None, help="Scale embeddings to length 1."
            ),
            click.option("--output", metavar="NAME", help="Output of an ONNX file that is scored."),
            click.option("--revision", metavar="REV", help="Revision of a hub model."),
            click.option(
                "--trust-remote-code",
                is_flag=True,
                default=None,
                help="Run code that comes with the model.",
            ),
            click.option("--max-length", type=int, metavar="N", help="Longest text in tokens."),
        ]
    )(function)


def data_options(function: F) -> F:
    """Add where the data is and what it is for."""
    return _all(
        [
            click.option(
                "--data",
                metavar="SOURCE",
                help="CSV, TSV, JSON(L) or Parquet file, hub:NAME, or package:NAME.",
            ),
            click.option("--data-name", metavar="NAME", help="Name of the prepared splits."),
            click.option(
                "--column",
                "columns",
                multiple=True,
                metavar="ROLE=COLUMN",
                help="Column that plays a role: query, answer, text, text_pair, label, score.",
            ),
            click.option("--subset", metavar="NAME", help="Subset of a hub data set."),
            click.option("--split", metavar="NAME", help="Split of a hub data set."),
            click.option("--limit", type=int, metavar="N", help="Use at most N samples."),
            click.option(
                "--splits",
                metavar="A,B,C",
                help="Samples for calibration, sweep, verification: 64,230,rest.",
            ),
            click.option(
                "--task",
                metavar="KIND",
                help="embedding, retrieval, similarity, classification, none, or module:callable.",
            ),
            click.option("--metric", metavar="NAME", help="Metric that judges."),
            click.option("--calibrator", metavar="NAME", help="minmax, percentile, entropy, mse."),
            click.option(
                "--percentile", type=float, metavar="P", help="For the percentile calibrator."
            ),
        ]
    )(function)


def sweep_options(function: F) -> F:
    """Add which cells are measured."""
    return _all(
        [
            click.option(
                "--format",
                "formats",
                multiple=True,
                metavar="NAME",
                help="Format to try; repeat it.",
            ),
            *layer_globs(),
            click.option(
                "--race/--no-race",
                default=None,
                help="Stop cells that cannot change the plan any more (on by default).",
            ),
            click.option(
                "--budget", metavar="TIME", help="Time that the cells may take: 90s, 10m, 1h."
            ),
            click.option(
                "--remedies",
                type=int,
                metavar="N",
                help="Try remedies on the N worst layers of a format (3 by default; 0: none).",
            ),
            click.option(
                "--scales",
                metavar="NAME",
                help="Scales of SmoothQuant and AWQ: own, or modelopt (tried beside our own).",
            ),
            click.option(
                "--batch",
                type=int,
                metavar="N",
                help="Texts a batch whose time is measured (that of the sweep's by default).",
            ),
            click.option(
                "--max-memory", metavar="SIZE", help="Refuse a sweep that would take more: 4G."
            ),
            *executor_options(),
        ]
    )(function)


def executor_options() -> list[Callable[[F], F]]:
    """Return the options that say where cells are measured; a run may go on elsewhere."""
    return [
        click.option(
            "--executor",
            metavar="NAME",
            help="local (threads here), or ray (workers of a Ray cluster).",
        ),
        click.option(
            "--ray-address",
            metavar="HOST:PORT",
            help="Cluster for ray, or auto; without one a cluster is started here.",
        ),
        click.option(
            "--workers", type=int, metavar="N", help="Cells side by side (one a core by default)."
        ),
    ]


def resume_options(function: F) -> F:
    """Add what may be different when a run goes on."""
    return _all(executor_options())(function)


def layer_globs() -> list[Callable[[F], F]]:
    """Return the options that choose layers."""
    what = "layers whose name, module or node matches; repeat it."
    return [
        click.option("--include", multiple=True, metavar="GLOB", help=f"Only {what}"),
        click.option("--exclude", multiple=True, metavar="GLOB", help=f"All but {what}"),
    ]


def plan_options(function: F) -> F:
    """Add what a plan may lose and what it minimises."""
    return _all(
        [
            click.option(
                "--backend",
                metavar="NAME",
                help="Where the engine runs: ort-cpu, ort-cuda, tensorrt or tensorrt-rtx.",
            ),
            click.option(
                "--max-drop",
                metavar="DROP",
                help='"5 %" of the reference, or 0.02 in the metric\'s unit.',
            ),
            click.option(
                "--objective", metavar="NAME", help="balanced, latency, bytes or divergence."
            ),
            click.option(
                "--hardware", metavar="NAME", help="Hardware that the engine is for: SM86, or none."
            ),
            click.option(
                "--max-latency",
                metavar="TIME",
                help='"60 %" of the high precision\'s time, "3.5 ms" a batch, or none.',
            ),
            click.option("--max-bytes", metavar="SIZE", help="Largest engine: 30M, or none."),
            click.option(
                "--max-bits",
                callback=number_or_nothing,
                metavar="BITS",
                help="Largest mean bits of a weight, or none.",
            ),
            click.option(
                "--keep",
                multiple=True,
                metavar="GLOB[=FORMAT]",
                help="Layers that keep a format (by default the high one), or none; repeat it.",
            ),
            click.option(
                "--ban",
                multiple=True,
                metavar="GLOB=FORMAT",
                help="Layers that must not take a format, or none; repeat it.",
            ),
            click.option("--levels", type=int, metavar="N", help="Divergence levels to build."),
            click.option(
                "--rounds", type=int, metavar="N", help="Most engines to build for repair."
            ),
        ]
    )(function)


def run_options(function: F) -> F:
    """Add where results go."""
    return _all(
        [
            click.option("--results", metavar="DIR", help="Folder of all runs."),
            click.option("--run-id", metavar="ID", help="Name of this run's folder."),
            click.option("--seed", type=int, metavar="N", help="Seed of everything random."),
            click.option("--threads", type=int, metavar="N", help="Threads of a session."),
        ]
    )(function)


def config_from(model: str, options: Mapping[str, Any]) -> Config:
    """Return the configuration of a MODEL argument and the options given beside it.

    MODEL may be a configuration file; the options then replace its values.

    Raises:
        ConfigError: If a value is wrong, or no data was named.
    """
    overrides = overrides_from(options)
    if Path(model).suffix.lower() in (".yaml", ".yml"):
        return load_config(model, overrides)
    overrides["model.source"] = model
    if "data.source" not in overrides:
        raise ConfigError(
            "no data was named; give --data with a CSV, TSV, JSON(L) or Parquet file, hub:NAME or "
            "package:NAME, or a configuration file in place of the model"
        )
    return make_config({}, overrides, origin="command line")


def overrides_from(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the options say, by dotted configuration key."""
    found = {_KEYS[k]: v for k, v in options.items() if k in _KEYS and v is not None}
    found |= {_KEYS[k]: None for k in _LIMITS if options.get(k) == NOTHING}
    if options.get("columns"):
        found["data.columns"] = dict(_pair(text) for text in options["columns"])
    if options.get("splits"):
        found["data.splits"] = _splits(str(options["splits"]))
    for name in ("formats", "include", "exclude"):
        if options.get(name):
            found[f"sweep.{name}"] = list(options[name])
    for name in ("keep", "ban"):
        if options.get(name):
            given = list(options[name])
            found[f"plan.{name}"] = [] if given == [NOTHING] else given
    return found


def _pair(text: str) -> tuple[str, str]:
    role, equals, column = text.partition("=")
    if not equals or not role or not column:
        raise ConfigError(f"--column: got {text!r}; allowed: ROLE=COLUMN, such as text=sentence")
    return role.strip(), column.strip()


def _splits(text: str) -> dict[str, Any]:
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) if part.isdigit() else part for part in parts]
    if len(parts) != 3 or not all(isinstance(n, int) for n in numbers[:2]):
        raise ConfigError(
            f"--splits: got {text!r}; allowed: three sizes such as 64,230,rest "
            "(calibration, sweep, verification)"
        )
    return dict(zip(("calibration", "sweep", "verification"), numbers, strict=True))
