"""Joining a run's sweep with what measures its cells: threads here, or workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Collection

from qbench.raced import feeding_of
from qbench.sensitivity.cells import Bench
from qbench.sensitivity.executors import Executor, LocalExecutor
from qbench.sensitivity.looking import Pools
from qbench.sensitivity.preflight import Forecast
from qbench.workbench import Workbench

#: A worker may take so many times what a cell is forecast to take at most.
_PATIENCE = 20.0


def check_executor(work: Workbench) -> None:
    """Check that what shall measure cells is there, before anything else takes time.

    Raises:
        MissingDependencyError: If Ray is asked for and not installed.
        InputError: If no cluster answers at its address.
    """
    sweep = work.config.sweep
    if sweep.uses_ray:
        from qbench.sensitivity.executors.cluster import check_ray

        check_ray(sweep.ray_address)


def executor_for(
    work: Workbench,
    bench: Bench,
    pools: Pools | None,
    expected: Forecast,
    left: Collection[tuple[str, str]],
) -> Executor:
    """Return what measures the cells of a run's sweep.

    Args:
        work: The workbench of the run.
        bench: The sweep's bench, whose reference has run.
        pools: The looks of its race; ``None`` where there is none.
        expected: What the cells are forecast to take.
        left: Cells that are still to be measured; for none of them no cluster is started.
    """
    sweep, threads = work.config.sweep, work.settings.threads
    if not sweep.uses_ray or not left:
        return LocalExecutor(bench, work.layers.by_name(), pools, sweep.workers or threads)
    from qbench.sensitivity.executors.remote import LEAST_TIMEOUT_S, RayExecutor, Terms

    longest = expected.wall_s.high / max(1, expected.cells)
    terms = Terms(
        address=sweep.ray_address,
        cores=sweep.workers or threads,
        workers=min(sweep.workers or len(left), len(left)),
        timeout_s=max(LEAST_TIMEOUT_S, _PATIENCE * longest),
    )
    feeding, looks = (feeding_of(work), pools.sizes) if pools else (None, ())
    return RayExecutor(bench, work.model, work.layers, terms, feeding, looks)
