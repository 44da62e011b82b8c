"""How numbers, names and verdicts are written in tables, figures and pages."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from qbench.formats import FORMATS
from qbench.records import Estimate, Rewritten, Serialized, Status, Verdict

#: Names that the plan's engine, the reference and the random plan have in every record.
PLAN, REFERENCE, RANDOM = "plan", "reference", "random"

#: What each verdict means for the person who reads the report.
VERDICT_MEANING = {
    Verdict.VERIFIED: "On samples that nothing else saw, the whole interval of the drop stays "
    "within the limit that was asked for.",
    Verdict.FAILED: "On samples that nothing else saw, the whole interval of the drop lies beyond "
    "the limit that was asked for. Do not ship this engine.",
    Verdict.NOT_RESOLVABLE: "The interval of the drop holds the limit: this number of samples can "
    "say neither that the engine keeps the limit nor that it breaks it.",
    Verdict.NO_GAIN: "Nothing is won here: within the limit that was asked for, no engine was "
    "measured to be faster or smaller than the reference.",
    Verdict.BUDGET_UNREACHABLE: "No measured engine keeps the limit that was asked for; the plan "
    "stays at high precision.",
}

#: The same of a plan whose engine was measured on the samples that chose it, and on no others yet.
PLANNED_MEANING = {
    Verdict.VERIFIED: "On the sweep samples, which chose this plan, the whole interval of the drop "
    "stays within the limit that was asked for. Samples that nothing else saw come next: verify.",
    Verdict.FAILED: "On the sweep samples the whole interval of the drop lies beyond the limit "
    "that was asked for.",
}

#: The sign that a heat map writes into a cell which has no number.
STATUS_SIGN = {
    Status.OK: "",
    Status.INVALID: "×",
    Status.FAILED: "!",
    Status.NOT_APPLICABLE: "",
    Status.NOT_YET: "·",
}


def number(value: float | None, digits: int = 3) -> str:
    """Return ``value`` with ``digits`` significant digits, or a dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    if value == 0:
        return "0"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if size < 1e-3 or size >= 1e6:
        text = f"{value:.{digits - 1}e}".replace("e-0", "e-").replace("e+0", "e+")
    else:
        places = max(0, digits - 1 - math.floor(math.log10(size)))
        text = f"{value:,.{places}f}"
    return text.replace("-", "−")


def estimate(value: Estimate | None, digits: int = 2) -> str:
    """Return ``value [low, high]``, or a dash where there is none."""
    if value is None:
        return "–"
    return f"{number(value.value, digits)} {interval(value.low, value.high)}"


def interval(low: float, high: float, digits: int = 2) -> str:
    """Return ``[low, high]``; an end that cannot be written is a dash."""
    return f"[{number(low, digits)}, {number(high, digits)}]"


def megabytes(size: float | None) -> str:
    """Return bytes as megabytes (10⁶ bytes), without the unit."""
    return "–" if size is None or math.isnan(size) else number(size / 1e6)


def share(value: float | None) -> str:
    """Return a share as per cent."""
    return "–" if value is None or math.isnan(value) else f"{number(100 * value)} %"


def not_resolvable(n: int, n_needed: int | None) -> str:
    """Say that ``n`` samples do not tell the drop from its limit, and how many would."""
    if n_needed is None:
        return f"not resolvable at n = {n:,}"
    return f"not resolvable at n = {n:,}; about {n_needed:,} would do"


def counted(formats: Iterable[str]) -> str:
    """Return names with their counts, ordered as ``FORMATS`` lists them: ``33 int8, 5 fp32``."""
    names = list(formats)
    order = list(FORMATS)
    known = sorted(set(names), key=lambda f: (order.index(f) if f in order else len(order), f))
    return ", ".join(f"{names.count(name)} {name}" for name in known)


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return ``a, b and c``; names after the first ``most`` are counted only."""
    shown = list(names[:most])
    if len(names) > most:
        return ", ".join(shown) + f" and {len(names) - most} more"
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1]


def split_block(name: str) -> tuple[str, str]:
    """Split a layer name after its first number: ``encoder.layer.3`` and ``output.dense``.

    A name without a number that stands alone between dots or slashes has the block ``""``.
    """
    parts = re.split(r"[./]", name.strip("/"))
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1]), ".".join(parts[index + 1 :]) or part
    return "", name


def role_of(engine: str) -> str:
    """Return what an engine is in a comparison, from its name.

    One of ``plan``, ``reference``, ``random``, ``uniform`` (one format wherever it applies) and
    ``front`` (a proposal of the planner).
    """
    if engine in (PLAN, REFERENCE, RANDOM):
        return engine
    return "uniform" if engine in FORMATS else "front"


def rewritten_words(items: Iterable[Rewritten]) -> str:
    """Return the constants of masks with what they become, and in how many layers; "" for none."""
    counts = Counter((item.constant, item.value, item.becomes) for item in items)
    return "; ".join(
        f"{constant} ({value:.4g}) {'stays' if value == becomes else f'→ {becomes:.6g}'}, "
        f"{count} layers"
        for (constant, value, becomes), count in counts.items()
    )


def serialized_words(made: Serialized | None) -> str:
    """Return what became of a serialized engine, in words; "" where the backend has none."""
    if made is None:
        return ""
    if not made.path:
        return f"not built here; {made.remark}"
    layers = ", ".join(f"{count} {kind}" for kind, count in made.network.items())
    targets = f" for {', '.join(made.targets)}" if made.targets else ""
    return (
        f"{made.path}, {made.bytes / 1e6:.1f} MB by {made.builder}{targets}; network as parsed: "
        f"{layers}; {made.remark}"
    )
