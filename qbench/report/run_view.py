"""A run as a person at a notebook wants it: tables and figures from one folder."""

from __future__ import annotations

from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.records import EngineReport, Plan
from qbench.rundir import RunDir

if TYPE_CHECKING:
    import pandas as pd

    from qbench.records import BenchRun
    from qbench.report.run_records import RunRecords


def open_run(path: str | Path) -> Run:
    """Open a run folder for reading.

    Raises:
        RunDirError: If there is no run at ``path``; near misses are named.
    """
    return Run(RunDir.open(path))


class Run:
    """One run. Each part is read when it is first asked for, and is a table or a rich object.

    A part that the run does not have yet is a ``RunDirError`` that names the command which
    makes it.
    """

    def __init__(self, rundir: RunDir) -> None:
        self._rundir = rundir

    def __repr__(self) -> str:
        return f"open_run({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """The folder."""
        return self._rundir.path

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Model, data, machine, versions and seeds, as ``run.json`` has them."""
        return self._rundir.read_run()

    @cached_property
    def records(self) -> RunRecords:
        """Every record of the run; absent parts are empty and named in ``records.missing``."""
        from qbench.report.run_records import load_records

        return load_records(self._rundir)

    @cached_property
    def layers(self) -> pd.DataFrame:
        """One row a layer, in topological order."""
        from qbench.report.tables import layers_table

        return layers_table(self._rundir.read_layers())

    @cached_property
    def unlayered(self) -> pd.DataFrame:
        """Why nodes are in no layer, with counts and operators."""
        from qbench.report.tables import unlayered_table

        return unlayered_table(self._rundir.read_layers())

    @cached_property
    def ranges(self) -> pd.DataFrame:
        """One row a tensor that calibration saw."""
        from qbench.report.tables import ranges_table

        ranges = self._rundir.read_ranges()
        return ranges_table(ranges, self.records.kinds)

    @cached_property
    def sweep(self) -> pd.DataFrame:
        """One row a cell of the sweep, with intervals, ranks within each format, and causes."""
        from qbench.report.remedy_tables import strongest_causes
        from qbench.report.run_records import in_layer_order
        from qbench.report.tables import sweep_table

        cells = in_layer_order(self._rundir.read_sweep(), self.records.layers)
        frame = sweep_table(cells, restored=self.records.restored)
        causes = strongest_causes(self.records.causes)
        found = zip(frame["layer"], frame["format"], strict=True)
        frame.insert(len(frame.columns) - 3, "cause", [causes.get(cell, "") for cell in found])
        return frame

    @cached_property
    def causes(self) -> pd.DataFrame:
        """One row a cause: why a cell is in trouble, with the evidence."""
        from qbench.report.remedy_tables import causes_table

        return causes_table(self._rundir.read_causes())

    @cached_property
    def remedies(self) -> pd.DataFrame:
        """One row a cell that was lowered in another way, beside what it gave without."""
        from qbench.report.remedy_tables import remedies_table

        return remedies_table(self.records.sweep, self.records.remedies, self.records.plan)

    @cached_property
    def noise(self) -> pd.DataFrame:
        """One row a graph and batch composition: what changes where nothing was changed."""
        from qbench.report.trust_tables import noise_table

        return noise_table(self._rundir.read_noise())

    @cached_property
    def restored(self) -> pd.DataFrame:
        """One row a layer: alone low, restored while all others are low, and the interaction."""
        from qbench.report.trust_tables import restored_table

        return restored_table(self._rundir.read_restored())

    @cached_property
    def audit(self) -> pd.DataFrame:
        """One row a proxy and format: how well it orders the cells of the sweep."""
        from qbench.report.trust_tables import audit_table

        return audit_table(self._rundir.read_audit())

    @cached_property
    def plan(self) -> PlanView:
        """The plan: ``plan.table`` has a row a layer, ``plan.record`` is the record itself."""
        from qbench.report.run_records import plan_of

        return PlanView(plan_of(self._rundir, self._rundir.read_layers()))

    @cached_property
    def engines(self) -> pd.DataFrame:
        """One row an engine: accuracy on held-out samples, size, latency and throughput."""
        from qbench.report.comparison import compare_engines, engines_table

        reports: tuple[EngineReport, ...] = self._rundir.read_engines()
        return engines_table(
            compare_engines(self.records.judgements, reports, self.records.bench, built=True)
        )

    @cached_property
    def verification(self) -> pd.DataFrame:
        """One row an engine and metric: the paired drop on the verification split."""
        from qbench.report.comparison import judgements_table

        return judgements_table(self._rundir.read_judgements("verification"))

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row a round of the plan's repair: what was measured, built, expected and seen."""
        from qbench.report.plan_tables import rounds_table

        return rounds_table(self.plan.record)

    @cached_property
    def prices(self) -> pd.DataFrame:
        """One row a kind, weight shape and format: its price from segments and from engines."""
        from qbench.report.plan_tables import prices_table

        return prices_table(self._rundir.known_prices())

    @cached_property
    def front(self) -> pd.DataFrame:
        """One row a proposal of the planner, with what its engine gave on the sweep split."""
        from qbench.report.comparison import front_table

        proposals = self._rundir.read_front()
        records = self.records
        return front_table(proposals, records.deciding, records.engines, records.plan)

    @cached_property
    def bench(self) -> BenchView:
        """The benchmark: ``bench.table`` has a row an engine, ``bench.latencies`` every request."""
        return BenchView(self._rundir.read_bench())

    @property
    def report_path(self) -> Path:
        """Where the page that tells the run lies, once it is written."""
        return self._rundir.report_path

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Every figure that the run has data for, as Altair charts by name."""
        from qbench.report.figures import figures_of

        return {name: figure.chart for name, figure in figures_of(self.records).items()}

    def write_report(self, path: str | Path | None = None) -> Path:
        """Write the page that tells the run, by default into its folder; return its path."""
        from qbench.report.page import write_report

        return write_report(self, path)

    def save_figures(self, folder: str | Path | None = None) -> tuple[Path, ...]:
        """Write every figure as PNG and SVG, by default into the run's folder."""
        from qbench.report.figures import save_figures

        return save_figures(self.records, Path(folder) if folder else self._rundir.figures_dir)

    def _repr_html_(self) -> str:
        from qbench.report import markup
        from qbench.report.comparison import compare_engines
        from qbench.report.presentation import shown_engines
        from qbench.report.verdicts import verdict_of, verdict_words

        records = self.records
        verdict = verdict_of(records)
        head = f"<strong>{escape(str(self.path))}</strong>"
        if verdict is not None:
            head += f": {escape(verdict.replace('_', ' '))}"
        rows = compare_engines(records.judgements, records.engines, records.bench)
        words = " ".join(verdict_words(records))
        table = markup.table(shown_engines(rows)) if rows else ""
        absent = markup.bullets(records.missing.values())
        return f"<div><p>{head}</p>{markup.paragraph(words)}{table}{absent}</div>"


class PlanView:
    """A plan with its table; in a notebook it shows formats by kind and every layer's reason."""

    def __init__(self, record: Plan) -> None:
        self.record = record

    def __repr__(self) -> str:
        from qbench.report.wording import counted

        formats = counted(self.record.formats().values())
        return f"<plan for {self.record.backend}: {formats}>"

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row a layer with its format, evidence and reason."""
        from qbench.report.tables import plan_table

        return plan_table(self.record)

    @cached_property
    def counts(self) -> pd.DataFrame:
        """Number of layers by kind and format."""
        from qbench.report.tables import plan_counts

        return plan_counts(self.record)

    def _repr_html_(self) -> str:
        from qbench.report import markup
        from qbench.report.presentation import shown_plan, shown_plan_counts

        counts = markup.table(shown_plan_counts(self.record))
        rows = markup.folded("Every layer with its reason", markup.table(shown_plan(self.record)))
        return f"<div>{counts}{rows}</div>"


class BenchView:
    """A benchmark with its tables; in a notebook it shows the statistics of each engine."""

    def __init__(self, record: BenchRun) -> None:
        self.record = record

    def __repr__(self) -> str:
        engines = ", ".join(summary.engine for summary in self.record.summaries)
        return f"<benchmark of {engines}: {len(self.record.latencies):,} requests>"

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row an engine with its statistics under load."""
        from qbench.report.comparison import bench_table

        return bench_table(self.record)

    @cached_property
    def latencies(self) -> pd.DataFrame:
        """One row a request, raw, warm-up included and marked."""
        import pandas as pd

        from qbench.records import to_dict

        return pd.DataFrame([to_dict(item) for item in self.record.latencies])

    def _repr_html_(self) -> str:
        from qbench.report import markup
        from qbench.report.figures_latency import conditions_words
        from qbench.report.presentation import shown_bench

        note = markup.paragraph(conditions_words(self.record))
        return f"<div>{markup.table(shown_bench(self.record))}{note}</div>"
