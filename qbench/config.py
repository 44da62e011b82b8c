"""Configuration: one YAML file (or the same keys from the command line), validated once, frozen.

Every error names the key, what it got, what is allowed, and near misses of a misspelt name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from qbench.backends import backend_named
from qbench.errors import ConfigError, unknown_name
from qbench.formats import format_named
from qbench.limits import MaxDrop, parse_max_drop, parse_max_latency
from qbench.provenance import usable_cores
from qbench.validation import explain
from qbench.yamlfile import read_yaml

#: Roles that a column of the data can play.
Role = Literal["query", "answer", "text", "text_pair", "label", "score"]
#: Task kinds that come with qbench; ``module:callable`` and ``file.py:callable`` name others.
TASK_KINDS = ("embedding", "retrieval", "similarity", "classification", "none")

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Names = Annotated[tuple[str, ...], Field(strict=False)]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )


class ModelConfig(_Section):
    """Where the model is, and how an embedder's output is pooled."""

    source: str = Field(min_length=1)
    revision: str | None = None
    tokenizer: str | None = None
    pooling: Literal["mean", "cls", "max", "last", "none"] | None = None
    normalize: bool | None = None
    output: str | None = None
    trust_remote_code: bool = False
    max_length: Count | None = None


class SplitsConfig(_Section):
    """Rows of each split; ``rest`` takes every row that the others leave."""

    calibration: Count = 64
    sweep: Count = 230
    verification: Count | Literal["rest"] = "rest"


class DataConfig(_Section):
    """Where the rows are, which column plays which role, and how they are split."""

    source: str = Field(min_length=1)
    name: str | None = None
    subset: str | None = None
    split: str | None = None
    columns: dict[Role, str] = Field(default_factory=dict)
    licence: str | None = None
    splits: SplitsConfig = SplitsConfig()
    limit: Count | None = None
    prepared: str = "calib_data"


class ExpectConfig(_Section):
    """A reference value that the unchanged model must reach before anything else is measured."""

    metric: str
    value: float
    tolerance: Annotated[float, Field(ge=0)]


class TaskConfig(_Section):
    """What the model is for, and the metric that judges it."""

    kind: str = "embedding"
    metric: str | None = None
    expect: ExpectConfig | None = None

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        if kind not in TASK_KINDS and ":" not in kind:
            choices = (*TASK_KINDS, "module:callable", "file.py:callable")
            raise ValueError(unknown_name("task", kind, choices))
        return kind


class CalibrateConfig(_Section):
    """How an activation's range becomes a clipping magnitude."""

    calibrator: Literal["minmax", "percentile", "entropy", "mse"] = "minmax"
    percentile: Annotated[float, Field(gt=50, le=100)] = 99.99
    batch_size: Count = 16


def parse_bytes(text: str) -> int:
    """Return a size such as ``"4G"``, ``"512 MB"`` or ``"2e9"`` in bytes (1 K = 1000).

    Raises:
        ConfigError: If it is no size, or not above zero.
    """
    said = text.strip().upper().removesuffix("B").strip()
    factor = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}.get(said[-1:], 1)
    try:
        size = float(said[:-1] if factor > 1 else said) * factor
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise ConfigError(f"got {text!r}; allowed: a size above zero such as 4G or 512M")
    return int(size)


def parse_seconds(text: str) -> float:
    """Return a time such as ``"10m"``, ``"90s"``, ``"1.5 h"`` in seconds.

    Raises:
        ConfigError: If it has no unit, is no time, or is not above zero.
    """
    said = text.strip().lower()
    factor = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(said[-1:], 0.0)
    try:
        seconds = float(said[:-1]) * factor
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(
            f"budget: got {text!r}; allowed: a time above zero with its unit, such as 90s, 10m or "
            "1.5h; leave it out for no limit"
        )
    return seconds


class SweepConfig(_Section):
    """Which cells are measured. ``max_tokens`` bounds the tokens of one batch.

    Times are those of the same batches, or of batches of ``batch`` texts where that is given.

    ``workers`` cells are measured side by side by an ``executor``: threads here, or Ray's workers.

    The ``remedies`` most divergent cells of each format are tried with every remedy of it;
    ``scales: modelopt`` tries the scales of nvidia-modelopt beside our own.

    With ``race``, cells are measured on growing parts of the samples, and on all of them where
    they may change the plan; ``budget`` bounds the time that this takes. ``activation_budget``
    bounds the reference activations that stay in memory, ``max_memory`` the whole process: what is
    beyond goes to the disk, and only what does not fit even so is refused.
    """

    formats: Names = ("fp16", "int8", "int8_dynamic", "w8a16", "w4a16")
    include: Names = ()
    exclude: Names = ()
    max_tokens: Count = 512
    batch: Count | None = None
    max_memory: str | None = None
    activation_budget: str | None = None
    race: bool = True
    budget: str | None = None
    remedies: Annotated[int, Field(ge=0)] = 3
    scales: Literal["own", "modelopt"] = "own"
    executor: Literal["local", "ray"] | None = None
    ray_address: str | None = None
    workers: Count | None = None

    @property
    def uses_ray(self) -> bool:
        """Whether Ray measures: it was asked for, or an address was named and not ``local``."""
        return self.executor == "ray" or (self.executor is None and self.ray_address is not None)

    @field_validator("budget")
    @classmethod
    def _readable_time(cls, given: str | None) -> str | None:
        if given is not None:
            parse_seconds(given)
        return given

    @property
    def budget_s(self) -> float | None:
        """``budget`` in seconds."""
        return None if self.budget is None else parse_seconds(self.budget)

    @field_validator("max_memory", "activation_budget")
    @classmethod
    def _readable_size(cls, given: str | None) -> str | None:
        if given is not None:
            parse_bytes(given)
        return given

    @property
    def memory_limit(self) -> int | None:
        """``max_memory`` in bytes."""
        return None if self.max_memory is None else parse_bytes(self.max_memory)

    @property
    def activation_bytes(self) -> int | None:
        """``activation_budget`` in bytes."""
        return None if self.activation_budget is None else parse_bytes(self.activation_budget)

    @field_validator("formats")
    @classmethod
    def _known_formats(cls, formats: tuple[str, ...]) -> tuple[str, ...]:
        if not formats:
            raise ValueError("got an empty list; name at least one format")
        return tuple(dict.fromkeys(format_named(name).name for name in formats))


class PlanConfig(_Section):
    """What the plan is for, what it may lose, what it minimises and what it may not exceed.

    ``max_latency`` is of a batch, ``max_bytes`` of the engine, ``max_bits`` the mean of a weight
    without scales. ``keep`` and ``ban`` hold ``GLOB[=FORMAT]`` and ``GLOB=FORMAT``. ``rounds``
    bounds the engines that are built to repair a plan. ``hardware`` is what the engine is for
    (``SM86``), where the backend's formats depend on it.
    """

    backend: str = "ort-cpu"
    max_drop: str | float = "5 %"
    objective: Literal["balanced", "latency", "bytes", "divergence"] = "balanced"
    levels: Annotated[int, Field(ge=1, le=64)] = 8
    rounds: Annotated[int, Field(ge=0, le=64)] = 2
    hardware: str | None = None
    keep: Names = ()
    ban: Names = ()
    max_latency: str | None = None
    max_bytes: str | None = None
    max_bits: Positive | None = None

    @field_validator("max_latency")
    @classmethod
    def _readable_latency(cls, given: str | None) -> str | None:
        if given is not None:
            parse_max_latency(given)
        return given

    @field_validator("max_bytes")
    @classmethod
    def _readable_bytes(cls, given: str | None) -> str | None:
        if given is not None:
            parse_bytes(given)
        return given

    @model_validator(mode="after")
    def _bounded(self) -> PlanConfig:
        if self.objective == "divergence" and not self.limited:
            raise ValueError(
                "objective divergence needs a limit, or nothing would be lowered: give "
                "max_latency, max_bytes or max_bits"
            )
        return self

    @property
    def limited(self) -> bool:
        """Whether anything but the drop is limited."""
        return any(v is not None for v in (self.max_latency, self.max_bytes, self.max_bits))

    @field_validator("backend")
    @classmethod
    def _known_backend(cls, name: str) -> str:
        return backend_named(name).name

    @field_validator("max_drop")
    @classmethod
    def _readable_drop(cls, given: str | float) -> str | float:
        parse_max_drop(given)
        return given

    @property
    def allowed_drop(self) -> MaxDrop:
        """``max_drop``, parsed."""
        return parse_max_drop(self.max_drop)


class BenchConfig(_Section):
    """The load: clients in a closed loop, interleaved slices, and the batcher's limits.

    With ``sla_ms`` an open loop searches the highest rate that keeps it: ``sla_share`` of all
    requests within it, in trials of ``trial_s``. ``price_per_hour`` is the machine's.
    ``fixed_size`` forms batches of that many requests instead of by tokens, to compare. From three
    rounds on no further one begins once every ratio is known to ``enough`` (0.05 is ± 5 %).
    """

    clients: Count = 16
    rounds: Annotated[int, Field(ge=2)] = 6  # an interval over slices needs two
    enough: Annotated[float, Field(ge=0, le=1)] = 0.05
    seconds: Positive = 2.0
    max_wait_ms: Annotated[float, Field(ge=0)] = 5.0
    token_budget: Count = 256
    queue: Count = 256
    fixed_size: Count | None = None
    sla_ms: Positive | None = None
    sla_share: Annotated[float, Field(gt=0, le=1)] = 0.99
    arrivals: Literal["poisson", "constant", "bursts", "trace"] = "poisson"
    trace: str | None = None
    trial_s: Positive = 4.0
    rate_tolerance: Annotated[float, Field(gt=0, le=1)] = 0.05
    price_per_hour: Positive | None = None


class RunConfig(_Section):
    """Where results go, and what every stage shares."""

    results: str = "results"
    id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: Annotated[int, Field(ge=0)] = 0
    threads: Count | None = None

    @property
    def thread_count(self) -> int:
        """Threads of a session: ``threads``, or the cores that this process may use."""
        return self.threads or usable_cores()


class Config(_Section):
    """Everything that ``qbench run`` needs."""

    model: ModelConfig
    data: DataConfig
    task: TaskConfig = TaskConfig()
    calibrate: CalibrateConfig = CalibrateConfig()
    sweep: SweepConfig = SweepConfig()
    plan: PlanConfig = PlanConfig()
    bench: BenchConfig = BenchConfig()
    run: RunConfig = RunConfig()

    def to_dict(self) -> dict[str, Any]:
        """Return the complete configuration, defaults too, as plain values."""
        return self.model_dump(mode="json")


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read and validate a YAML file.

    Args:
        path: The file.
        overrides: Values that replace the file's, by dotted key (``"run.threads": 2``).

    Raises:
        ConfigError: If the file is missing, is not YAML, or holds a wrong key or value.
    """
    return make_config(
        read_yaml(Path(path), "configuration file", ConfigError), overrides, origin=str(path)
    )


def make_config(
    values: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    origin: str = "configuration",
) -> Config:
    """Validate a nested mapping, with ``overrides`` by dotted key.

    Raises:
        ConfigError: If a key is unknown, missing, or has a wrong value; all are listed at once.
    """
    merged = dict(values)
    for dotted, value in (overrides or {}).items():
        merged = _with_key(merged, dotted.split("."), value)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explain(error, Config, origin)) from None


def _with_key(values: Mapping[str, Any], keys: list[str], value: Any) -> dict[str, Any]:
    head, *rest = keys
    if rest:
        inner = values.get(head)
        value = _with_key(inner if isinstance(inner, Mapping) else {}, rest, value)
    return {**values, head: value}
