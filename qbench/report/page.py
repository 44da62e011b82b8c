"""One page that tells a run: self-contained, readable offline and on paper."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from qbench.errors import InputError
from qbench.report import markup
from qbench.report.built_tables import shown_built
from qbench.report.comparison import compare_engines, dominance_words, front_table
from qbench.report.figures import figures_of, spec_of, vegalite_version
from qbench.report.load_tables import (
    load_badge,
    load_words,
    shown_rates,
    shown_trials,
    verdict_under_load,
)
from qbench.report.multiplicity import multiplicity_words
from qbench.report.plan_tables import shown_front, shown_prices, shown_rounds
from qbench.report.presentation import (
    agreement_words,
    shown_bench,
    shown_engines,
    shown_plan,
    shown_plan_counts,
    shown_ranges,
    shown_sensitive,
    shown_statuses,
    shown_sweep,
)
from qbench.report.ranks import half_agreement
from qbench.report.remedy_tables import (
    cause_words,
    remedy_words,
    shown_causes,
    shown_remedies,
)
from qbench.report.run_records import RunRecords
from qbench.report.run_view import Run
from qbench.report.tables import primary_metric, ranges_table
from qbench.report.trust_tables import (
    audit_words,
    call_words,
    floor_words,
    restored_words,
    shown_audit,
    shown_calls,
    shown_noise,
    shown_restored,
    shown_spread,
)
from qbench.report.uncovered import shown_unlayered, uncovered_words
from qbench.report.verdicts import VERDICT_TONE, key_figures, verdict_of, verdict_words
from qbench.storage import atomic_write

#: Nothing is loaded from anywhere; Vega compiles its expressions, hence ``unsafe-eval``.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)

_EXPORTS = "window.vegaEmbed = vegaEmbed;"


def write_report(run: RunRecords | Run, path: str | Path | None = None) -> Path:
    """Write the page of a run, by default into its folder, and return its path.

    Args:
        run: An opened run, or its records (``path`` is then needed).
        path: The file to write.

    Raises:
        InputError: If the disk is full, or records came without a path.
    """
    if isinstance(run, Run):
        return write_report(run.records, path or run.report_path)
    if path is None:
        raise InputError("records know no folder; give write_report a path")
    path = Path(path)
    content = render_page(run).encode("utf-8")
    with atomic_write(path) as file:
        file.write(content)
    return path


def render_page(run: RunRecords) -> str:
    """Return the whole page, with its script, styles, figures and data inside."""
    figures = {name: spec_of(figure.chart) for name, figure in figures_of(run).items()}
    sections = [part for part in _sections(run, figures) if part]
    specs = "\n".join(markup.json_script(f"spec-{name}", spec) for name, spec in figures.items())
    title = f"qbench: {run.name}"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{_asset("page.css")}
</style>
</head>
<body>
<header>
<h1>{escape(str(_model_source(run)))}</h1>
{markup.paragraph(_subtitle(run), "soft")}
{_navigation(sections)}
</header>
<main>
{chr(10).join(sections)}
</main>
<footer>Written by qbench. This page holds all of its data and loads nothing.</footer>
{specs}
<script>{_bundle() if figures else ""}</script>
<script>
{_asset("page.js")}
</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return resources.files("qbench.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _bundle() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script."""
    import vl_convert

    code: str = vl_convert.javascript_bundle(_EXPORTS, vl_version=vegalite_version())
    return code.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _model_source(run: RunRecords) -> str:
    model = run.facts.get("model")
    if isinstance(model, Mapping) and model.get("source"):
        return str(model["source"])
    return run.plan.model_source if run.plan is not None else run.name


def _subtitle(run: RunRecords) -> str:
    words = [f"run {run.name}"]
    if (data := run.facts.get("data")) and isinstance(data, Mapping) and data.get("source"):
        words.append(f"data {data['source']}")
    if run.plan is not None:
        words.append(f"backend {run.plan.backend}")
    if made := run.facts.get("created_at"):
        words.append(str(made)[:16].replace("T", " "))
    return " · ".join(words)


def _navigation(sections: list[str]) -> str:
    links = []
    for part in sections:
        anchor = part.partition('id="')[2].partition('"')[0]
        heading = part.partition("<h2>")[2].partition("</h2>")[0]
        links.append(f'<a href="#{anchor}">{heading}</a>')
    return f"<nav>{''.join(links)}</nav>"


def _sections(run: RunRecords, figures: Mapping[str, Any]) -> list[str]:
    """Return the sections in the order in which a reader asks; absent ones are empty."""
    drawn = {name: markup.figure(name) for name in figures}
    return [
        _verdict_section(run),
        _engines_section(run),
        _plan_section(run, drawn),
        _sensitive_section(run, drawn),
        _trust_section(run, drawn),
        _ranges_section(run, drawn),
        _front_section(run, drawn),
        _latency_section(run, drawn),
        _load_section(run),
        _uncovered_section(run),
        _provenance_section(run),
    ]


def _verdict_section(run: RunRecords) -> str:
    verdict = verdict_of(run)
    badge = ""
    if verdict is not None:
        name = escape(verdict.replace("_", " "))
        badge = (
            f'<div class="verdict"><span class="badge {VERDICT_TONE[verdict]}">{name}</span></div>'
        )
    rows = compare_engines(run.judgements, run.engines, run.bench)
    words = "\n".join(markup.paragraph(text) for text in verdict_words(run))
    return markup.section("verdict", "Verdict", badge, words, markup.cards(key_figures(rows)))


def _engines_section(run: RunRecords) -> str:
    rows = compare_engines(run.judgements, run.engines, run.bench)
    if not rows:
        return ""
    return markup.section(
        "engines",
        "The plan beside other engines",
        markup.table(shown_engines(rows)),
        markup.bullets(dominance_words(rows)),
        markup.folded("What was built", markup.table(shown_built(run.engines))),
    )


def _plan_section(run: RunRecords, drawn: Mapping[str, str]) -> str:
    if run.plan is None:
        return ""
    asked = ", ".join(f"{key}: {value}" for key, value in run.plan.constraints.items())
    return markup.section(
        "plan",
        "The plan",
        markup.paragraph(f"Asked for: {asked}." if asked else ""),
        markup.side_by_side(
            markup.table(shown_plan_counts(run.plan)), drawn.get("plan_formats", "")
        ),
        markup.folded("Every layer with its reason", markup.table(shown_plan(run.plan))),
    )


def _sensitive_section(run: RunRecords, drawn: Mapping[str, str]) -> str:
    if not run.sweep:
        return ""
    note = (
        "Layers are ordered by divergence, which is smooth and resolved at this number of "
        "samples. The drop of the metric judges and does not order: most single layers move it "
        "by less than its noise."
    )
    return markup.section(
        "sensitivity",
        "Sensitive layers",
        markup.paragraph(note),
        markup.table(shown_sensitive(run.sweep)),
        markup.paragraph(multiplicity_words(run.sweep, primary_metric(run.sweep))),
        markup.paragraph(agreement_words(half_agreement(run.sweep))),
        markup.bullets(call_words(run.noise)),
        markup.paragraph(cause_words(run.causes)),
        markup.paragraph(remedy_words(run.sweep, run.remedies, run.plan)),
        drawn.get("heat_map", ""),
        drawn.get("ranking", ""),
        _remedies_part(run),
        markup.folded("Every cell of the sweep", markup.table(shown_sweep(run.sweep))),
    )


def _remedies_part(run: RunRecords) -> str:
    """Return the tables of causes and remedies; "" where there is none."""
    parts = []
    if run.causes:
        parts.append(markup.table(shown_causes(run.causes)))
    if run.remedies:
        table = markup.table(shown_remedies(run.sweep, run.remedies, run.plan))
        parts.append(markup.folded("Every remedy that was tried", table))
    return "\n".join(parts)


def _trust_section(run: RunRecords, drawn: Mapping[str, str]) -> str:
    noise, view, audit = run.noise, run.restored, run.audit
    parts: list[str] = []
    if noise is not None:
        parts += [
            markup.paragraph(floor_words(noise)),
            markup.table(shown_noise(noise)),
            markup.table(shown_spread(noise)),
            markup.folded("What each half of the samples calls", markup.table(shown_calls(noise))),
        ]
    if view is not None:
        parts += [
            markup.paragraph(restored_words(view)),
            drawn.get("views", ""),
            markup.folded("Every layer in both views", markup.table(shown_restored(view))),
        ]
    if audit is not None:
        parts += [markup.table(shown_audit(audit)), markup.bullets(audit_words(audit))]
    return markup.section("trust", "How far to trust this", *parts)


def _ranges_section(run: RunRecords, drawn: Mapping[str, str]) -> str:
    table = markup.table(shown_ranges(ranges_table(run.ranges, run.kinds))) if run.ranges else ""
    return markup.section(
        "ranges",
        "Ranges",
        drawn.get("ranges", ""),
        drawn.get("outliers", ""),
        drawn.get("headroom", ""),
        markup.folded("Every tensor", table),
    )


def _front_section(run: RunRecords, drawn: Mapping[str, str]) -> str:
    front = front_table(run.front, run.deciding, run.engines, run.plan)
    return markup.section(
        "front",
        "Predicted and measured",
        drawn.get("front", ""),
        drawn.get("predicted", ""),
        markup.table(shown_front(front)) if len(front) else "",
        markup.table(rounds) if (rounds := shown_rounds(run.plan)).rows else "",
        markup.folded("What formats cost", markup.table(shown_prices(run.prices)))
        if run.prices
        else "",
    )


def _latency_section(run: RunRecords, drawn: Mapping[str, str]) -> str:
    if run.bench is None:
        return ""
    return markup.section(
        "latency",
        "Latency",
        drawn.get("stages", ""),
        drawn.get("distribution", ""),
        markup.table(shown_bench(run.bench)),
        markup.folded("Conditions", markup.definitions(run.bench.conditions)),
    )


def _load_section(run: RunRecords) -> str:
    verdict = verdict_under_load(run.facts)
    if verdict is None:
        return ""
    name, tone = load_badge(verdict)
    return markup.section(
        "load",
        "Under load, within the SLA",
        f'<div class="verdict"><span class="badge {tone}">{escape(name)}</span></div>',
        "\n".join(markup.paragraph(text) for text in load_words(verdict)),
        markup.table(shown_rates(verdict)),
        markup.folded("Every rate that was tried", markup.table(shown_trials(verdict))),
    )


def _uncovered_section(run: RunRecords) -> str:
    cells = markup.table(shown_statuses(run.sweep)) if run.sweep else ""
    nodes = markup.table(shown_unlayered(run.layers)) if run.layers.unlayered else ""
    return markup.section(
        "uncovered",
        "What this run does not say",
        markup.bullets(uncovered_words(run)),
        markup.folded("Cells without a number", cells),
        markup.folded("Nodes in no layer", nodes),
    )


def _provenance_section(run: RunRecords) -> str:
    facts = {key: value for key, value in run.facts.items() if key != "serving"}  # told above
    return markup.section("provenance", "Provenance", markup.definitions(facts))
