"""A Ray cluster: one that exists, found by its address, or one started here and shut down again.

NOTE: an address is first tried in a process of its own. Ray goes on trying for a minute and more,
in native code that nothing here could stop; a process can be ended.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbench.errors import InputError, MeasurementError
from qbench.gate import require

#: The word for a cluster of which this machine is a node already.
AUTO = "auto"
#: Seconds in which an address must take a connection, and how often a cluster in use is tried.
CONNECT_S, _TRIES = 3.0, 2
#: Name of the thread that waits for Ray to let go; the command line does not wait for it.
LEAVING = "qbench-leaving"
#: Seconds in which a cluster must let this process go.
LEAVE_S = 15.0
#: Seconds for each step of a trial, by the step before.
_STEPS_S = {"": 60.0, "imported": 4.0, "answered": 20.0}
#: What an address looks like, and the largest port.
_ADDRESS = re.compile(r"(?P<host>[^\s:/\[\]]+|\[[0-9A-Fa-f:.%]+\]):(?P<port>[0-9]{1,5})")
_MOST_PORT = 65535
#: An HTTP/2 client's first words with empty settings, the size of a frame's head, a frame's type.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_FRAME, _SETTINGS_FRAME = 9, b"\x04"
#: Bytes that Ray's object store has at least, and its share over what is put into it.
_LEAST_STORE, _STORE_SHARE = 80 << 20, 1.3
#: Longest temporary folder: Ray puts sockets below it, whose paths end at 107 characters.
_LONGEST_FOLDER = 24

#: How a cluster that is started here is set up. Links are asked for a sign of life each second; a
#: machine that gives none for three is dead. Nothing is told to anybody outside.
SETTINGS = {
    "RAY_grpc_client_keepalive_time_ms": "1000",
    "RAY_grpc_client_keepalive_timeout_ms": "3000",
    "RAY_grpc_keepalive_time_ms": "1000",
    "RAY_grpc_keepalive_timeout_ms": "3000",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",
    "RAY_DEDUP_LOGS": "0",
}
#: What the process does that tries an address; it says how far it is.
_TRIAL = """
import sys
import ray
from ray._raylet import GcsClient

def say(words):
    print(words, flush=True)

say("imported")
try:
    if sys.argv[1] != "auto":
        GcsClient(address=sys.argv[1])
    say("answered")
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    ray.shutdown()
    say("joined")
except Exception as error:
    say(f"{type(error).__name__}: {error}".strip().splitlines()[0])
"""


@dataclass(slots=True)
class Cluster:
    """A cluster that this process is connected to.

    Attributes:
        ray: Ray's module.
        address: What the user called it; "" for one that was started here.
        cpus: Cores that it offers.
        head: Where its head node listens.
        gone: Whether the head node was found not to answer any more: a call to Ray would then not
            come back, and a minute later Ray ends the process.
    """

    ray: Any
    address: str
    cpus: int
    head: str
    gone: bool = False

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"the Ray cluster at {self.address}" if self.address else "the local Ray cluster"

    def check(self) -> None:
        """Check that the head node still answers.

        Raises:
            MeasurementError: If it does not.
        """
        for _ in range(_TRIES):
            with contextlib.suppress(InputError):
                _check_port(self.head)
                return
        self.gone = True
        raise MeasurementError(
            f"{self.name} does not answer any more; what was measured is kept: `qbench "
            "resume RUN` goes on, also with --executor local"
        )


def check_ray(address: str | None) -> None:
    """Check that Ray is installed, and that a cluster answers where one is named.

    Raises:
        MissingDependencyError: If Ray is not installed.
        InputError: If nothing answers; what to do is named.
    """
    require("ray")
    if not address:
        return
    if address != AUTO:
        _check_port(address)
    told = _try(address)
    if told:
        raise InputError(_no_answer(address, told))


def _try(address: str) -> str:
    """Join a cluster from another process, and return why that cannot be done; "" if it can."""
    child = subprocess.Popen(
        [sys.executable, "-c", _TRIAL, address],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    with child:
        assert child.stdout is not None
        step, told = "", "Ray ended without a word"
        while select.select([child.stdout], [], [], _STEPS_S[step])[0]:
            line = child.stdout.readline().decode(errors="replace").strip()
            if line == "joined":
                return ""
            if not line:
                return told
            step, told = (line, told) if line in _STEPS_S else (step, line)
        child.kill()
        return f"no answer within {_STEPS_S[step]:g} s"


def _check_port(address: str) -> None:
    """Check that something that speaks Ray's protocol listens there, in a few seconds.

    A gRPC server greets with its settings as soon as it has the client's (RFC 9113, 3.4).
    """
    form = _ADDRESS.fullmatch(address)
    if form is None or int(form["port"]) > _MOST_PORT:
        raise InputError(
            f"Ray address {address!r}; allowed: HOST:PORT of the head node, such as 10.0.0.5:6379, "
            f"or {AUTO} where this machine is a node of a cluster"
        )
    try:
        with socket.create_connection(
            (form["host"].strip("[]"), int(form["port"])), CONNECT_S
        ) as s:
            if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
                s.settimeout(CONNECT_S)
                s.sendall(_GREETING)
                if s.recv(_FRAME)[3:4] != _SETTINGS_FRAME:
                    raise InputError(_no_answer(address, "what listens there is not Ray"))
    except TimeoutError:
        raise InputError(_no_answer(address, f"nothing within {CONNECT_S:g} s")) from None
    except OSError as error:
        raise InputError(_no_answer(address, str(error))) from None


def _no_answer(address: str, told: str) -> str:
    where = "no Ray cluster runs on this machine" if address == AUTO else "no Ray cluster answers"
    return (
        f"Ray address {address!r}: {where} ({told}); `ray status --address HOST:PORT` shows a "
        "cluster, `ray start --address HOST:PORT` makes this machine a node of it; leave the "
        "address out to start one here, or use --executor local"
    )


@contextlib.contextmanager
def connected(address: str | None, cpus: int, store_bytes: int) -> Iterator[Cluster]:
    """Connect to a cluster, or start one, for as long as the context lasts.

    A cluster that this process is connected to already is used, and left connected.

    Args:
        address: Its address; ``None`` starts one here.
        cpus: Cores of one that is started here.
        store_bytes: Bytes that will be put into its object store.

    Raises:
        MissingDependencyError: If Ray is not installed.
        InputError: If the cluster does not take the connection.
        MeasurementError: If none can be started here.
    """
    ray: Any = require("ray")
    if ray.is_initialized():
        yield _cluster(ray, address or AUTO)
        return
    opened = _joined(ray, address) if address else _started(ray, cpus, store_bytes)
    with opened:
        cluster = _cluster(ray, address or "")
        try:
            yield cluster
        finally:
            _leave(cluster)


@contextlib.contextmanager
def _joined(ray: Any, address: str) -> Iterator[None]:
    check_ray(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="qbench")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(_no_answer(address, str(error).splitlines()[0])) from None
    yield


@contextlib.contextmanager
def _started(ray: Any, cpus: int, store_bytes: int) -> Iterator[None]:
    folder = _short_folder()
    with environment({**SETTINGS, **_own_token()}):
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=max(_LEAST_STORE, int(store_bytes * _STORE_SHARE)),
                log_to_driver=False,
                logging_level="ERROR",
                namespace="qbench",
                _node_ip_address="127.0.0.1",
                _temp_dir=str(folder),
            )
        except Exception as error:  # whatever Ray runs into: there is no cluster
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
            told = f"{type(error).__name__}: {error}"[:400]
            raise MeasurementError(
                f"Ray could not be started here ({told}); use --executor local"
            ) from error
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _short_folder() -> Path:
    base = Path(tempfile.gettempdir())
    if len(str(base)) > _LONGEST_FOLDER and Path("/tmp").is_dir():
        base = Path("/tmp")
    return Path(tempfile.mkdtemp(prefix="qbench-ray-", dir=base))


@functools.cache
def _own_token() -> Mapping[str, str]:
    """Return a secret for clusters of this process; Ray would write one into the home folder.

    It is made once, as Ray reads it once; that there is one makes Ray ask for it.
    """
    if any(os.environ.get(f"RAY_AUTH_{name}") for name in ("MODE", "TOKEN", "TOKEN_PATH")):
        return {}
    return {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set what Ray and its processes read; what the user set stays, and all is put back after."""
    before = {name for name in os.environ if name.startswith("RAY_")}
    os.environ.update({name: value for name, value in values.items() if name not in before})
    try:
        yield
    finally:
        for name in [x for x in os.environ if x.startswith("RAY_") and x not in before]:
            del os.environ[name]


def _leave(cluster: Cluster) -> None:
    """Leave a cluster; one whose head node is silent would keep this process for ever.

    Ray would then try again when the process ends: it is told not to.
    """
    shutdown = cluster.ray.shutdown
    leaving = threading.Thread(target=shutdown, name=LEAVING, daemon=True)
    leaving.start()
    leaving.join(CONNECT_S if cluster.gone else LEAVE_S)
    if leaving.is_alive():
        for function in (shutdown, getattr(shutdown, "__wrapped__", shutdown)):
            atexit.unregister(function)


def _cluster(ray: Any, address: str) -> Cluster:
    head = str(ray.get_runtime_context().gcs_address)
    return Cluster(ray, address, int(ray.cluster_resources().get("CPU", 1)), head)
