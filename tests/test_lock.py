"""One process writes to a folder: real processes that meet at it, and what they leave behind."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from qbench import lock
from qbench.errors import RunDirError
from qbench.lock import give_lock, take_lock

#: Takes the lock of argv[1], says so, and holds it until its input ends.
HOLDER = """
import sys
from pathlib import Path
from qbench.errors import RunDirError
from qbench.lock import take_lock
try:
    take_lock(Path(sys.argv[1]))
except RunDirError as error:
    print("refused", error, flush=True)
else:
    print("held", flush=True)
    sys.stdin.read()
"""


class Holder:
    """A process that holds, or was refused, the lock of a folder."""

    def __init__(self, folder: Path, code: str = HOLDER) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    give_lock(tmp_path)


def written(folder: Path, **other: Any) -> dict[str, Any]:
    """Write a lock's owner, this process with some fields changed."""
    me = lock._me()
    said = {"pid": me.pid, "host": me.host, "boot": me.boot, "began_s": me.began_s, **other}
    (folder / ".lock").write_text(json.dumps(said))
    return said


def test_the_second_is_told_pid_and_host(folder: Path) -> None:
    first = Holder(folder)
    assert first.says == "held"
    with pytest.raises(RunDirError) as caught:
        take_lock(folder)
    told = str(caught.value)
    assert "another process is writing" in told
    assert f"pid {first.process.pid} on {platform.node()}" in told
    assert "another run id" in told
    first.end()
    take_lock(folder)  # what was killed leaves no lock


def test_a_process_shares_its_lock_and_gives_it_back(folder: Path) -> None:
    take_lock(folder)
    take_lock(folder / ".")
    second = Holder(folder)
    assert f"pid {os.getpid()} on" in second.says
    second.end()
    give_lock(folder)
    third = Holder(folder)
    assert third.says == "held"
    third.end()


def test_of_processes_that_start_at_one_moment_one_wins(folder: Path) -> None:
    for _ in range(3):
        holders = [Holder(folder) for _ in range(4)]
        said = [holder.says for holder in holders]
        winner = said.index("held")
        pid = holders[winner].process.pid
        refused = [words for at, words in enumerate(said) if at != winner]
        assert all(f"pid {pid} on {platform.node()}" in words for words in refused), said
        for holder in holders:
            holder.end()


@pytest.mark.parametrize(
    "other",
    [
        {"pid": 2**22 - 3},  # no such process
        {"began_s": 1e9},  # the number was given to another process since
        {"boot": "the one before"},
        {"host": "elsewhere"},  # the system has its lock on record, and there is none
    ],
    ids=["dead", "reused", "rebooted", "elsewhere"],
)
def test_what_an_ended_process_left_is_no_lock(folder: Path, other: dict[str, Any]) -> None:
    written(folder, **other)
    take_lock(folder)
    assert json.loads((folder / ".lock").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}', "\0\0\0"])
def test_a_lock_file_that_says_nothing_is_taken(folder: Path, content: str) -> None:
    (folder / ".lock").write_text(content)
    take_lock(folder)


def test_a_holder_that_says_nothing_is_told_of_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.1)
    first = Holder(folder)
    assert first.says == "held"
    (folder / ".lock").write_text("")
    with pytest.raises(RunDirError, match="another process is writing to"):
        take_lock(folder)
    first.end()


def test_a_forked_child_does_not_keep_the_lock_of_its_parent(folder: Path) -> None:
    code = HOLDER.replace(
        'print("held", flush=True)',
        "import os, time\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(60)\n"
        '    print("held", flush=True)',
    )
    first = Holder(folder, code)
    assert first.says == "held"
    children = psutil.Process(first.process.pid).children()
    assert len(children) == 1
    first.process.kill()
    first.process.wait()
    try:
        take_lock(folder)
    finally:
        children[0].send_signal(signal.SIGKILL)
        first.end()


def test_a_folder_that_cannot_be_written_is_said(folder: Path) -> None:
    (folder / ".lock").mkdir()
    with pytest.raises(RunDirError, match=r"cannot be written.*--results"):
        take_lock(folder)
    (folder / ".lock").rmdir()


# --- systems without locks on files -------------------------------------------------------------


@pytest.fixture
def bare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lock, "_HAS_LOCKS", False)
    return folder


def test_without_locks_the_name_of_a_living_process_counts(bare: Path) -> None:
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = psutil.Process(living.pid).create_time()
    written(bare, pid=living.pid, began_s=began)
    with pytest.raises(RunDirError, match=rf"pid {living.pid} on .*delete .*\.lock"):
        take_lock(bare)
    living.kill()
    until = time.monotonic() + 10
    while psutil.Process(living.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
    take_lock(bare)  # dead, though nobody has asked after it yet
    living.communicate()


@pytest.mark.parametrize("other", [{"pid": 2**22 - 3}, {"began_s": 1e9}, {"boot": "before"}])
def test_without_locks_a_dead_owner_is_taken_over(bare: Path, other: dict[str, Any]) -> None:
    written(bare, **other)
    take_lock(bare)


def test_without_locks_another_host_may_live(bare: Path) -> None:
    written(bare, host="elsewhere", boot="b")
    with pytest.raises(RunDirError, match=r"on elsewhere\).*delete"):
        take_lock(bare)
