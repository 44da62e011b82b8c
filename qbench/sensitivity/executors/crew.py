"""The crew: Ray's actors, from their start to their end, and whether they are still there.

Each is asked for a sign of life every second, also while it measures. One that gives none for a
few seconds is lost, whatever Ray believes: a link that was cut, or a machine that hangs, keeps a
call waiting for minutes. A lost one is ended and another started in its place.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from qbench.errors import InputError, MeasurementError
from qbench.records import SweepRecord
from qbench.sensitivity.executors.base import Assignment
from qbench.sensitivity.executors.cluster import Cluster
from qbench.sensitivity.executors.kit import Opened, WorkerFacts, own_facts, unlike
from qbench.sensitivity.executors.worker import Worker

#: Seconds between two questions for a sign of life, and without one until a worker is lost.
PULSE_S, SILENCE_S = 1.0, 8.0
#: Seconds between two looks at the cluster's head node.
CHECK_S = 5.0
#: Seconds in which the first worker must have started.
START_S = 120.0
#: Seconds that one turn of listening takes at most; what lies beyond is this process's own pause.
_TURN_S = 0.2
#: Workers lost in a row, nothing measured in between, after which no more are started: for each.
_LOSSES = 3


class Stage(StrEnum):
    """How far a worker is."""

    STARTING = "starting"
    OPENING = "opening"
    READY = "ready"
    BUSY = "busy"


@dataclass(slots=True, eq=False)
class Member:
    """A worker as it is seen from here.

    Attributes:
        number: Its number; none is used twice.
        actor: Ray's handle.
        pending: What it was asked last.
        stage: How far it is.
        facts: What it said of itself.
        ping: The question for a sign of life that is open.
        silent_s: Seconds since its last sign of life, this process's own pauses left out.
        rested_s: Seconds since it was asked for one.
        cells: Assignments that it finished.
    """

    number: int
    actor: Any
    pending: Any
    stage: Stage = Stage.STARTING
    facts: WorkerFacts | None = None
    ping: Any = None
    silent_s: float = 0.0
    rested_s: float = 0.0
    cells: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """A worker finished an assignment."""

    worker: int
    record: SweepRecord


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is gone, and why."""

    worker: int
    why: str


Event = Done | Lost


@dataclass(slots=True)
class Cargo:
    """What each worker opens, as references into the object store.

    Attributes:
        kit: The sweep.
        activations: The reference's activations, one reference a batch.
        files: Puts the model's files into the store and returns their references.
    """

    kit: Any
    activations: Sequence[Any]
    files: Any


@dataclass(slots=True)
class Tally:
    """What became of workers.

    Attributes:
        refused: Host and reason of each that may not measure.
        lost: Why each that was lost was lost.
        cells: Assignments finished, by host.
    """

    refused: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    cells: dict[str, int] = field(default_factory=dict)


class Crew:
    """The workers of one sweep.

    Args:
        cluster: Where they run.
        cargo: What they open.
        size: How many there shall be.
        silence_s: Seconds without a sign of life until one is lost.
    """

    def __init__(
        self, cluster: Cluster, cargo: Cargo, size: int, silence_s: float = SILENCE_S
    ) -> None:
        """Start them; nobody waits for them here."""
        self._ray, self._cluster, self._cargo = cluster.ray, cluster, cargo
        self._silence_s, self._driver = silence_s, own_facts()
        self._size, self._in_a_row, self._numbers = size, 0, 0
        self._heard, self._starting_s, self._unchecked_s = time.monotonic(), 0.0, 0.0
        self._members: dict[int, Member] = {}
        self.tally = Tally()
        for _ in range(size):
            self._start()

    @property
    def members(self) -> tuple[Member, ...]:
        """Those that are there."""
        return tuple(self._members.values())

    @property
    def idle(self) -> tuple[Member, ...]:
        """Those that have nothing to do."""
        return tuple(m for m in self._members.values() if m.stage is Stage.READY)

    def give(self, member: Member, assignment: Assignment) -> None:
        """Let a worker that is idle measure."""
        member.pending, member.stage = member.actor.measure.remote(assignment), Stage.BUSY

    def resume(self) -> None:
        """Begin to listen again: time in which nobody listened was nobody's silence."""
        self._heard = time.monotonic()
        for member in self._members.values():
            member.ping, member.silent_s, member.rested_s = None, 0.0, PULSE_S

    def listen(self) -> list[Event]:
        """Wait for at most a moment and return what happened.

        Raises:
            InputError: If every worker was refused; the reasons are told.
            MeasurementError: If none is left, none starts, or the cluster does not answer.
        """
        references = [m.pending for m in self._members.values() if m.pending is not None]
        references += [m.ping for m in self._members.values() if m.ping is not None]
        if references:
            self._ray.wait(references, num_returns=1, timeout=_TURN_S)
            ready = set(self._ray.wait(references, num_returns=len(references), timeout=0)[0])
        else:
            time.sleep(_TURN_S)
            ready = set()
        now = time.monotonic()
        elapsed, self._heard = min(now - self._heard, 2 * _TURN_S), now
        events: list[Event] = []
        for member in self.members:
            events += self._attend(member, ready, elapsed)
        self._check_left(elapsed)
        self._unchecked_s += elapsed
        if self._unchecked_s > CHECK_S:
            self._cluster.check()
            self._unchecked_s = 0.0
        return events

    def _attend(self, member: Member, ready: set[Any], elapsed: float) -> Iterator[Event]:
        try:
            if member.ping is not None and member.ping in ready:
                self._ray.get(member.ping, timeout=0)
                member.ping, member.silent_s = None, 0.0
            if member.pending is not None and member.pending in ready:
                value = self._ray.get(member.pending, timeout=self._silence_s)
                member.pending = None
                yield from self._advance(member, value)
        except self._ray.exceptions.RayError as error:
            yield from self._fell(member, error)
            return
        self._ask(member, elapsed)
        if member.silent_s > self._silence_s:
            yield self.lose(member, f"gave no sign of life for {self._silence_s:g} s")

    def _ask(self, member: Member, elapsed: float) -> None:
        """Count the silence, and ask for a sign of life when it is time."""
        if member.stage is Stage.STARTING or member.number not in self._members:
            return
        member.rested_s += elapsed
        if member.ping is not None:
            member.silent_s += elapsed
        elif member.rested_s >= PULSE_S:
            member.ping, member.rested_s = member.actor.ping.remote(), 0.0

    def _advance(self, member: Member, value: Any) -> Iterator[Event]:
        """Take what a worker answered, and ask it for the next step."""
        if isinstance(value, WorkerFacts):
            member.facts = value
            difference = unlike(value, self._driver)
            if difference:
                self._refuse(member, difference)
                return
            member.stage = Stage.OPENING
            member.pending = member.actor.open.remote(self._cargo.kit, self._cargo.activations)
        elif isinstance(value, Opened) and value.needs_files:
            cargo = self._cargo
            arguments = (cargo.kit, cargo.activations, cargo.files())
            member.pending = member.actor.open.remote(*arguments)
        elif isinstance(value, Opened) and value.refusal:
            self._refuse(member, value.refusal)
        elif isinstance(value, Opened):
            member.stage = Stage.READY
        else:
            member.stage, member.cells, self._in_a_row = Stage.READY, member.cells + 1, 0
            host = member.facts.host if member.facts else ""
            self.tally.cells[host] = self.tally.cells.get(host, 0) + 1
            yield Done(member.number, self._placed(member, value))

    def _fell(self, member: Member, error: Exception) -> Iterator[Event]:
        """Take what ended a worker: before it was ready a refusal, if its code raised."""
        told = _told(error)
        raised = isinstance(error, self._ray.exceptions.RayTaskError)
        if raised and member.stage in (Stage.STARTING, Stage.OPENING):
            self._refuse(member, told)
        else:
            yield self.lose(member, told)

    def lose(self, member: Member, why: str) -> Lost:
        """End a worker that is lost, and start another in its place.

        Raises:
            MeasurementError: If it is the whole cluster that is lost.
        """
        self._cluster.check()
        where = f"worker on {member.facts.host}" if member.facts else "worker that was starting"
        self.tally.lost.append(f"{where}: {why}")
        self._end(member)
        self._in_a_row += 1
        if self._in_a_row <= _LOSSES * self._size:
            self._start()
        return Lost(member.number, f"its worker {why}")

    def _refuse(self, member: Member, why: str) -> None:
        host = member.facts.host if member.facts else "a worker"
        self.tally.refused[host] = why
        self._end(member)

    def _start(self) -> None:
        make = self._ray.remote(Worker).options(
            num_cpus=1, max_concurrency=2, max_restarts=0, scheduling_strategy="SPREAD"
        )
        actor = make.remote()
        self._members[self._numbers] = Member(self._numbers, actor, actor.hello.remote())
        self._numbers += 1

    def _end(self, member: Member) -> None:
        """End a worker for good. One that was stopped does not hear Ray, but hears the system."""
        self._members.pop(member.number, None)
        self._ray.kill(member.actor, no_restart=True)
        if member.facts is not None and self._is_here(member.facts):
            with contextlib.suppress(OSError):
                if b"ray::" in Path(f"/proc/{member.facts.pid}/cmdline").read_bytes():
                    os.kill(member.facts.pid, signal.SIGKILL)

    def _placed(self, member: Member, record: SweepRecord) -> SweepRecord:
        """Return a record with the host where it was measured, if that is not this one."""
        if member.facts is None or member.facts.host == self._driver.host:
            return record
        return replace(record, host=member.facts.host)

    def _is_here(self, facts: WorkerFacts) -> bool:
        return facts.place != "" and facts.place == self._driver.place

    def _check_left(self, elapsed: float) -> None:
        """Raise where nobody is left, or nobody comes."""
        if not self._members:
            refused = "; ".join(f"{host}: {why}" for host, why in self.tally.refused.items())
            if refused and not self.tally.lost:
                raise InputError(
                    f"no worker of {self._cluster.name} can measure for this run: {refused}; "
                    "install the same versions there, or use --executor local"
                )
            last = "; ".join([*self.tally.lost[-2:], *([refused] if refused else [])])
            raise MeasurementError(
                f"no worker of {self._cluster.name} is left ({last}); what was measured is kept: "
                "`qbench resume RUN` goes on, also with --executor local"
            )
        waiting = all(m.stage is Stage.STARTING for m in self._members.values())
        self._starting_s = self._starting_s + elapsed if waiting else 0.0
        if self._starting_s > START_S:
            free = self._ray.available_resources().get("CPU", 0)
            raise MeasurementError(
                f"no worker of {self._cluster.name} started within {START_S:g} s ({free:g} of "
                f"{self._cluster.cpus} cores are free); what was measured is kept: `qbench "
                "resume RUN` goes on, also with --executor local"
            )

    def close(self) -> None:
        """End all workers; those that have nothing to do may clean up first."""
        if self._cluster.gone:
            return
        polite = [m.actor.close.remote() for m in self.idle if m.ping is None]
        with contextlib.suppress(self._ray.exceptions.RayError):
            if polite:
                self._ray.wait(polite, num_returns=len(polite), timeout=2.0)
        for member in self.members:
            self._end(member)


def _told(error: Exception) -> str:
    """Return the telling line of what Ray raised."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return f"raised {type(cause).__name__}: {cause}"[:300]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"died ({lines[0] if lines else type(error).__name__})"[:300]
