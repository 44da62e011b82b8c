"""The state machine that hands out work: order, losses, time, and what is left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qbench.records import Kind, Status, SweepRecord
from qbench.sensitivity.executors.base import Assignment
from qbench.sensitivity.executors.dispatch import Abandoned, Dispatch, Result


def work(count: int) -> list[Assignment]:
    return [Assignment((f"layer{i}", "int8")) for i in range(count)]


def record_of(assignment: Assignment) -> SweepRecord:
    return SweepRecord(assignment.cell[0], Kind.LINEAR, assignment.cell[1], Status.OK)


def names(results: list[Result]) -> list[str | None]:
    return [r.layer if isinstance(r, SweepRecord) else None for r in results]


def test_results_come_in_order_whoever_is_faster() -> None:
    dispatch = Dispatch(work(3), ahead=3, timeout_s=10)
    first, second = dispatch.next_for(1, 0.0), dispatch.next_for(2, 0.0)
    assert first is not None and second is not None
    dispatch.done(2, record_of(second))
    assert list(dispatch.take()) == []
    dispatch.done(1, record_of(first))
    assert names(list(dispatch.take())) == ["layer0", "layer1"]
    assert not dispatch.finished and dispatch.wanted == 1


def test_work_does_not_run_far_ahead_of_the_first_unfinished() -> None:
    dispatch = Dispatch(work(9), ahead=2, timeout_s=10)
    seated = [dispatch.next_for(worker, 0.0) for worker in range(9)]
    assert sum(a is not None for a in seated) == 3


def test_a_lost_workers_work_is_begun_again_first_and_at_last_abandoned() -> None:
    dispatch = Dispatch(work(2), ahead=5, timeout_s=10, attempts=3)
    for attempt in range(3):
        assignment = dispatch.next_for(attempt, 0.0)
        assert assignment is not None and assignment.cell[0] == "layer0"
        dispatch.lost(attempt, f"reason {attempt}")
    other = dispatch.next_for(9, 0.0)
    assert other is not None and other.cell[0] == "layer1"
    dispatch.done(9, record_of(other))
    abandoned, fine = dispatch.take()
    assert isinstance(abandoned, Abandoned)
    assert abandoned.reasons == ("reason 0", "reason 1", "reason 2")
    assert isinstance(fine, SweepRecord) and dispatch.finished


def test_each_new_attempt_has_twice_the_time() -> None:
    dispatch = Dispatch(work(1), ahead=1, timeout_s=10)
    dispatch.next_for(1, 100.0)
    assert dispatch.overdue(110.0) == () and dispatch.overdue(110.1) == (1,)
    dispatch.lost(1, "late")
    dispatch.next_for(2, 200.0)
    assert dispatch.overdue(219.0) == () and dispatch.overdue(220.1) == (2,)


def test_a_worker_gets_cells_that_it_looked_at_before() -> None:
    looks = [Assignment((f"layer{i % 3}", "int8"), look=i // 3) for i in range(6)]
    dispatch = Dispatch(looks, ahead=6, timeout_s=10)
    for worker in (1, 2, 3):
        assignment = dispatch.next_for(worker, 0.0)
        assert assignment is not None
        dispatch.done(worker, record_of(assignment))
    again = dispatch.next_for(2, 0.0)
    assert again == Assignment(("layer1", "int8"), look=1)


def test_what_the_budget_leaves_out_has_no_result_and_what_was_begun_has() -> None:
    dispatch = Dispatch(work(3), ahead=3, timeout_s=10)
    begun = dispatch.next_for(1, 0.0)
    assert begun is not None
    dispatch.stop()
    assert dispatch.next_for(2, 0.0) is None and not dispatch.finished
    dispatch.done(1, record_of(begun))
    assert names(list(dispatch.take())) == ["layer0", None, None] and dispatch.finished


def test_the_result_of_an_earlier_run_is_passed_over() -> None:
    dispatch = Dispatch(work(1), ahead=1, timeout_s=10)
    dispatch.done(7, record_of(Assignment(("elsewhere", "int8"))))
    dispatch.lost(7, "gone")
    assert list(dispatch.take()) == [] and dispatch.wanted == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=200), st.integers(1, 12))
def test_whatever_happens_each_assignment_has_one_result_in_order(
    moves: list[tuple[int, bool]], count: int
) -> None:
    dispatch = Dispatch(work(count), ahead=4, timeout_s=10)
    busy: dict[int, Assignment] = {}
    got: list[Result] = []
    for worker, dies in [*moves, *[(w, False) for w in range(4)] * 20]:
        if worker in busy:
            assignment = busy.pop(worker)
            if dies:
                dispatch.lost(worker, "died")
            else:
                dispatch.done(worker, record_of(assignment))
        elif (given := dispatch.next_for(worker, 0.0)) is not None:
            busy[worker] = given
        got += dispatch.take()
    assert dispatch.finished and len(got) == count
    for place, result in enumerate(got):
        name = result.layer if isinstance(result, SweepRecord) else None
        if isinstance(result, Abandoned):
            name = result.assignment.cell[0]
            assert len(result.reasons) == 3
        assert name == f"layer{place}"
