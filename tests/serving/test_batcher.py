"""The batcher by simulation: a made-up clock, lanes that take as long as they are told."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from qbench.errors import ConfigError
from qbench.serving.batcher import Accept, Batcher, BatchLimits, Dispatch, Reason, Refuse, Wait


@dataclass
class History:
    """What a simulation saw."""

    accepted: dict[int, tuple[float, int]] = field(default_factory=dict)  # ticket -> time, tokens
    refused: list[tuple[float, Refuse]] = field(default_factory=list)
    dispatched: list[tuple[float, Dispatch]] = field(default_factory=list)
    withdrawn: set[int] = field(default_factory=set)
    most_queued: int = 0
    most_running: int = 0


def simulate(
    batcher: Batcher, arrivals: list[tuple[float, int]], cost_s=lambda padded: 0.001 + 1e-5 * padded
) -> History:
    """Play arrivals (time, tokens) against the batcher until all is served."""
    history = History()
    events = [(time_s, 0, index, tokens) for index, (time_s, tokens) in enumerate(arrivals)]
    heapq.heapify(events)
    serial = len(events)
    now_s = 0.0
    while events or batcher.queued:
        decision = batcher.decide(now_s)
        if isinstance(decision, Dispatch):
            check_decision(batcher, history, decision)
            history.dispatched.append((now_s, decision))
            history.most_running = max(
                history.most_running, batcher.limits.lanes - batcher.free_lanes
            )
            serial += 1
            end_s = now_s + cost_s(decision.padded_tokens)
            heapq.heappush(events, (end_s, 1, serial, decision.batch))
            continue
        wake_s = decision.until_s
        if wake_s is not None and (not events or wake_s <= events[0][0]):
            assert wake_s > now_s, "a wait must end in the future"
            now_s = wake_s
            continue
        assert events, "requests are queued, nothing runs, and the batcher waits for an event"
        now_s, kind, _, value = heapq.heappop(events)
        if kind == 1:
            batcher.complete(value, now_s)
            continue
        answer = batcher.admit(now_s)
        if isinstance(answer, Accept):
            history.accepted[answer.ticket] = (now_s, value)
            batcher.ready(answer.ticket, value, now_s)
        else:
            history.refused.append((now_s, answer))
        history.most_queued = max(history.most_queued, batcher.queued)
    return history


def check_decision(batcher: Batcher, history: History, decision: Dispatch) -> None:
    """A batch keeps the budget and the padding, and holds the oldest waiting request."""
    limits = batcher.limits
    tokens = [history.accepted[ticket][1] for ticket in decision.tickets]
    assert decision.longest == max(tokens)
    assert decision.tokens == sum(tokens)
    assert decision.padded_tokens == max(tokens) * len(tokens)
    assert list(decision.tickets) == sorted(set(decision.tickets))
    if len(tokens) > 1:
        assert decision.padded_tokens <= limits.token_budget
        assert 1 - decision.tokens / decision.padded_tokens <= limits.max_padding + 1e-9
    if limits.max_batch is not None:
        assert len(tokens) <= limits.max_batch
    gone = {ticket for _, one in history.dispatched for ticket in one.tickets}
    waiting = set(history.accepted) - gone - history.withdrawn
    assert decision.tickets[0] == min(waiting), "the oldest request must be in the batch"


LIMITS = st.builds(
    BatchLimits,
    token_budget=st.integers(1, 512),
    max_wait_s=st.sampled_from([0.0, 0.001, 0.005, 0.05]),
    queue=st.integers(1, 40),
    max_padding=st.sampled_from([0.0, 0.2, 0.5, 0.9]),
    max_batch=st.none() | st.integers(1, 8),
    lanes=st.integers(1, 4),
)
ARRIVALS = st.lists(
    st.tuples(
        st.floats(0, 0.05, allow_nan=False) | st.just(0.01), st.integers(1, 64) | st.just(300)
    ),
    max_size=80,
)


@given(LIMITS, ARRIVALS, st.sampled_from([0.0, 1e-6, 1e-3]))
@hypothesis_settings(max_examples=200, deadline=None)
def test_each_accepted_request_is_dispatched_exactly_once_within_all_bounds(
    limits, arrivals, overhead_s
):
    batcher = Batcher(limits)
    history = simulate(batcher, arrivals, lambda padded: overhead_s + 2e-5 * padded)

    served = [ticket for _, decision in history.dispatched for ticket in decision.tickets]
    assert sorted(served) == sorted(history.accepted)
    assert len(history.accepted) + len(history.refused) == len(arrivals)
    assert history.most_queued <= limits.queue
    assert history.most_running <= limits.lanes
    assert batcher.queued == batcher.ready_count == 0
    assert all(refusal.retry_after_s > 0 for _, refusal in history.refused)


@given(LIMITS, ARRIVALS)
@hypothesis_settings(max_examples=100, deadline=None)
def test_an_overdue_request_waits_only_for_a_lane(limits, arrivals):
    """Whenever a request has waited max_wait, either it goes or no lane is free."""
    batcher = Batcher(limits)
    history = simulate(batcher, arrivals)
    starts = {
        ticket: now_s for now_s, decision in history.dispatched for ticket in decision.tickets
    }
    ends = sorted(now_s + 0.001 + 1e-5 * d.padded_tokens for now_s, d in history.dispatched)
    began = sorted(now_s for now_s, _ in history.dispatched)
    for ticket, (arrived_s, _) in history.accepted.items():
        due_s = arrived_s + limits.max_wait_s
        if starts[ticket] <= due_s + 1e-9:
            continue
        # Between due time and dispatch every lane was busy, but for the instant of a hand-over.
        marks = sorted({due_s, *(t for t in began + ends if due_s < t < starts[ticket])})
        for left, right in zip(marks, [*marks[1:], starts[ticket]], strict=True):
            if right - left < 1e-9:
                continue
            middle = (left + right) / 2
            busy = sum(t <= middle for t in began) - sum(t <= middle for t in ends)
            assert busy == limits.lanes


@given(LIMITS, ARRIVALS, st.data())
@hypothesis_settings(max_examples=60, deadline=None)
def test_withdrawn_requests_never_run_and_close_drains_the_rest(limits, arrivals, data):
    batcher = Batcher(limits)
    tickets = []
    for _, tokens in arrivals:
        answer = batcher.admit(0.0)
        if isinstance(answer, Accept):
            tickets.append(answer.ticket)
            batcher.ready(answer.ticket, tokens, 0.0)
    gone = set(data.draw(st.lists(st.sampled_from(tickets), unique=True))) if tickets else set()
    assert all(batcher.withdraw(ticket) for ticket in gone)
    assert not any(batcher.withdraw(ticket) for ticket in gone)
    batcher.close()
    assert batcher.admit(0.0) == Refuse("the server is closing", None)
    served = []
    while isinstance(decision := batcher.decide(1.0), Dispatch):
        served += decision.tickets
        batcher.complete(decision.batch, 1.0)
    assert sorted(served) == sorted(set(tickets) - gone)


def offer(batcher: Batcher, tokens: list[int], now_s: float = 0.0) -> list[int]:
    tickets = []
    for count in tokens:
        answer = batcher.admit(now_s)
        assert isinstance(answer, Accept)
        batcher.ready(answer.ticket, count, now_s)
        tickets.append(answer.ticket)
    return tickets


def teach(batcher: Batcher, overhead_s: float, token_s: float, start_s: float = 0.0) -> float:
    """Let the batcher see batches of known cost, far apart; return the time after them."""
    now_s = start_s
    for round_index in range(16):
        offer(batcher, [4 + 8 * (round_index % 4)], now_s)
        decision = batcher.decide(now_s)
        assert isinstance(decision, Dispatch)
        batcher.complete(decision.batch, now_s + overhead_s + token_s * decision.padded_tokens)
        now_s += 10.0
    return now_s


def test_requests_of_like_length_share_a_batch_and_an_odd_one_waits_its_turn():
    batcher = Batcher(BatchLimits(token_budget=64, lanes=2))
    offer(batcher, [10, 60, 12, 11, 58, 10])
    first, second = batcher.decide(0.0), batcher.decide(0.0)
    assert first.tickets == (0, 2, 3, 5)
    assert (first.longest, first.tokens, first.padded_tokens) == (12, 43, 48)
    assert second.tickets == (1,)
    assert batcher.decide(0.0) == Wait(None)


def test_a_request_longer_than_the_budget_goes_alone():
    batcher = Batcher(BatchLimits(token_budget=64, lanes=3))
    offer(batcher, [500, 500, 10])
    assert [batcher.decide(0.0).tickets for _ in range(3)] == [(0,), (1,), (2,)]


def test_the_padding_threshold_splits_a_batch():
    tokens = [20, 30, 30, 30]
    wide = Batcher(BatchLimits(token_budget=256, max_padding=0.2))
    offer(wide, tokens)
    assert wide.decide(0.0).tickets == (0, 1, 2, 3)
    narrow = Batcher(BatchLimits(token_budget=256, max_padding=0.05))
    offer(narrow, tokens)
    assert narrow.decide(0.0).tickets == (0,)


def test_padding_that_costs_more_than_a_batch_of_its_own_is_refused():
    batcher = Batcher(BatchLimits(token_budget=256, max_padding=0.9))
    now_s = teach(batcher, overhead_s=0.001, token_s=0.001)  # a batch costs one token's time
    offer(batcher, [20, 24, 20, 24, 24], now_s)
    assert batcher.decide(now_s).tickets == (16, 18)
    cheap = Batcher(BatchLimits(token_budget=256, max_padding=0.9))
    now_s = teach(cheap, overhead_s=0.01, token_s=0.0001)  # a batch costs a hundred tokens
    offer(cheap, [20, 24, 20], now_s)
    assert cheap.decide(now_s).tickets == (16, 17, 18)


def test_the_batch_limit_holds_where_the_budget_would_allow_more():
    batcher = Batcher(BatchLimits(token_budget=256, max_batch=3))
    offer(batcher, [5] * 7)
    sizes = []
    while isinstance(decision := batcher.decide(0.0), Dispatch):
        sizes.append((len(decision.tickets), decision.reason))
        batcher.complete(decision.batch, 0.0)
    assert sizes == [(3, Reason.FULL), (3, Reason.FULL), (1, Reason.NO_GAIN)]


def test_a_full_queue_refuses_at_once_with_a_hint_and_takes_again_after_a_dispatch():
    batcher = Batcher(BatchLimits(queue=2, max_wait_s=0.004))
    offer(batcher, [8, 8])
    refusal = batcher.admit(0.0)
    assert isinstance(refusal, Refuse)
    assert "full (2 requests)" in refusal.reason
    assert refusal.retry_after_s == pytest.approx(0.004)
    decision = batcher.decide(0.0)
    assert isinstance(batcher.admit(0.0), Accept)
    batcher.complete(decision.batch, 0.030)
    batcher.admit(0.03)
    refusal = batcher.admit(0.03)
    assert isinstance(refusal, Refuse)
    assert refusal.retry_after_s == pytest.approx(0.030)  # as long as a batch takes


def test_requests_that_are_not_ready_count_against_the_queue_and_not_against_a_batch():
    batcher = Batcher(BatchLimits(queue=2))
    slow, quick = batcher.admit(0.0), batcher.admit(0.0)
    assert isinstance(batcher.admit(0.0), Refuse)
    assert batcher.decide(0.0) == Wait(None)
    batcher.ready(quick.ticket, 5, 0.1)
    assert batcher.decide(0.1).tickets == (quick.ticket,)
    with pytest.raises(KeyError):
        batcher.ready(quick.ticket, 5, 0.1)
    assert batcher.withdraw(slow.ticket)
    assert batcher.queued == 0


def test_at_low_load_a_long_max_wait_costs_nothing():
    batcher = Batcher(BatchLimits(max_wait_s=0.050))
    now_s = teach(batcher, overhead_s=0.002, token_s=0.0001)
    offer(batcher, [10], now_s)
    assert batcher.decide(now_s).reason is Reason.NO_GAIN


def dense(max_wait_s: float) -> tuple[Batcher, float]:
    """Return a batcher that knows its costs and has just seen arrivals every 0.1 ms."""
    batcher = Batcher(BatchLimits(max_wait_s=max_wait_s))
    now_s = teach(batcher, overhead_s=0.002, token_s=0.0001)
    for _ in range(60):
        batcher.withdraw(offer(batcher, [10], now_s)[0])
        now_s += 1e-4
    return batcher, now_s


def test_in_a_burst_it_waits_for_the_next_arrival_and_goes_when_the_burst_is_over():
    batcher, now_s = dense(max_wait_s=0.050)
    offer(batcher, [10], now_s)
    decision = batcher.decide(now_s)
    assert isinstance(decision, Wait)
    assert now_s < decision.until_s <= now_s + 2.1e-4
    offer(batcher, [10], now_s + 1e-4)
    assert isinstance(batcher.decide(now_s + 1e-4), Wait)
    silent_s = now_s + 5e-4
    assert batcher.decide(silent_s).reason is Reason.NO_GAIN


def test_waiting_ends_at_max_wait_though_arrivals_go_on():
    batcher, start_s = dense(max_wait_s=0.001)
    for step in range(30):
        now_s = start_s + step * 1e-4
        offer(batcher, [10], now_s)
        decision = batcher.decide(now_s)
        if isinstance(decision, Dispatch):
            break
        assert decision.until_s <= start_s + 0.001 + 1e-9
    assert decision.reason is Reason.OVERDUE
    assert now_s == pytest.approx(start_s + 0.001)


def test_a_clock_that_steps_back_does_no_harm():
    batcher = Batcher(BatchLimits())
    offer(batcher, [10], 100.0)
    decision = batcher.decide(5.0)
    assert isinstance(decision, Dispatch)
    batcher.complete(decision.batch, 1.0)
    assert batcher.cost.batch_s == 0.0


def test_the_same_events_give_the_same_decisions():
    arrivals = [(0.001 * (i % 7), 1 + i * 37 % 90) for i in range(200)]
    runs = [simulate(Batcher(BatchLimits(lanes=2)), arrivals).dispatched for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "bad",
    [
        {"token_budget": 0},
        {"queue": 0},
        {"lanes": 0},
        {"max_batch": 0},
        {"max_batch": -1},
        {"max_wait_s": -1.0},
        {"max_wait_s": float("nan")},
        {"max_padding": 1.0},
        {"max_padding": -0.1},
    ],
)
def test_impossible_limits_are_refused_by_name(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        BatchLimits(**bad)


def test_who_comes_much_later_overtakes_nobody_for_its_length():
    """A batch of two is drawn from the first four in line, however well others would fit."""
    batcher = Batcher(BatchLimits(token_budget=64, max_padding=0.9))
    offer(batcher, [30] + [10] * 3 + [30])
    assert batcher.decide(0.0).tickets == (0,)
    near = Batcher(BatchLimits(token_budget=64, max_padding=0.9))
    offer(near, [30] + [10] * 2 + [30] + [10] * 4)
    assert near.decide(0.0).tickets == (0, 3)
