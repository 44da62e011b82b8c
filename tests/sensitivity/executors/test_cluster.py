"""Addresses at which no cluster answers: one clear error, in seconds."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from qbench import gate
from qbench.cli.main import run_command_line
from qbench.errors import InputError, MissingDependencyError
from qbench.sensitivity.executors.cluster import check_ray, environment

pytest.importorskip("ray")


@pytest.fixture
def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_port_where_nobody_listens(listening: socket.socket) -> None:
    address = address_of(listening)
    listening.close()
    began = time.monotonic()
    with pytest.raises(InputError, match=f"'{address}'.*refused.*ray start.*--executor local"):
        check_ray(address)
    assert time.monotonic() - began < 5


def test_a_port_that_says_nothing(listening: socket.socket) -> None:
    began = time.monotonic()
    with listening, pytest.raises(InputError, match="nothing within 3 s"):
        check_ray(address_of(listening))
    assert time.monotonic() - began < 10


def test_a_port_where_something_else_answers(listening: socket.socket) -> None:
    def answer() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    with listening, pytest.raises(InputError, match="what listens there is not Ray"):
        check_ray(address_of(listening))
    thread.join()


@pytest.mark.parametrize("address", ["nonsense", "host:99999", "ray://host:10001", "host:", ":1"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(InputError, match="allowed: HOST:PORT of the head node"):
        check_ray(address)


def test_the_command_line_says_it_before_anything_else(
    listening: socket.socket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = address_of(listening)
    listening.close()
    given = ["sweep", "no-model", "--data", "no-data.csv", "--results", str(tmp_path)]
    assert run_command_line([*given, "--executor", "ray", "--ray-address", address]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: Ray address '{address}': no Ray cluster answers")
    assert len(told.splitlines()) == 1
    assert run_command_line([*given, "--executor", "rays"]) == 2
    assert "did you mean 'ray'" in capsys.readouterr().err


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(gate.importlib, "import_module", missing)
    with pytest.raises(MissingDependencyError, match=r"qbench\[ray\]"):
        check_ray(None)


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_OURS", "user")
    with environment({"RAY_OURS": "ours", "RAY_NEW": "1"}):
        assert os.environ["RAY_OURS"] == "user" and os.environ["RAY_NEW"] == "1"
        os.environ["RAY_SET_BY_RAY"] = "1"
    assert "RAY_NEW" not in os.environ and "RAY_SET_BY_RAY" not in os.environ
    assert os.environ["RAY_OURS"] == "user"
