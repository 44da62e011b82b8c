"""The process that makes a serialized engine: ``python -m qbench.runtime.tensorrt_child``.

It reads a request as JSON from its standard input and writes its answer as JSON to the file that
the request names. It is a process of its own because the builder may end it, and because the
builder's choices follow addresses in memory: with those at fixed places, file names that do not
depend on the folder, and a thread that allocates from a heap of its own, the same ONNX file gives
the same bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

_ADDR_NO_RANDOMIZE = 0x0040000
_FIXED, _RANDOM = "fixed", "random"


def main() -> None:
    """Start anew with addresses at fixed places, then build what is asked for."""
    if len(sys.argv) < 2:
        where = _FIXED if _fix_addresses() else _RANDOM
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-m", "qbench.runtime.tensorrt_child", where]
        os.execve(sys.executable, command, environment)
    request = json.loads(sys.stdin.read())
    answer: dict[str, Any] = {"repeatable": sys.argv[1] == _FIXED}
    try:
        trt = importlib.import_module(request["module"])
    except ImportError as error:
        answer["missing"] = f"{type(error).__name__}: {error}"
    else:
        answer["version"] = str(getattr(trt, "__version__", ""))
        work = threading.Thread(target=lambda: answer.update(_build(trt, request)))
        work.start()
        work.join()
    Path(request["answer"]).write_text(json.dumps(answer), encoding="utf-8")


def _fix_addresses() -> bool:
    """Ask the system for fixed addresses in what this process starts; not all allow it."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        now = libc.personality(0xFFFFFFFF)
        return bool(now >= 0 and libc.personality(now | _ADDR_NO_RANDOMIZE) >= 0)
    return False


def _build(trt: Any, request: dict[str, Any]) -> dict[str, Any]:
    if not hasattr(trt, "Builder"):
        return {"missing": f"the module {request['module']} holds no builder"}
    log = _logger(trt)
    builder = trt.Builder(log)
    # NOTE: log, builder and network must outlive the parser, which keeps no reference to them.
    network = builder.create_network(_flags(trt))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(request["onnx"]):
        return {"problems": _parser_problems(parser), "said": log.said}
    network.name = "qbench"
    config = builder.create_builder_config()
    refusal = _set_targets(trt, config, request["targets"])
    if refusal:
        return {"problems": [refusal], "said": log.said}
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        name = network.get_input(index).name
        if name in request["profile"]:
            profile.set_shape(name, *(tuple(shape) for shape in request["profile"][name]))
    config.add_optimization_profile(profile)
    made = builder.build_serialized_network(network, config)
    counted = Counter(_kind(network.get_layer(i)) for i in range(network.num_layers))
    answer = {"network": dict(sorted(counted.items())), "said": log.said}
    if made is None:
        return {**answer, "problems": [{"text": text} for text in log.errors] or [{"text": ""}]}
    Path(request["engine"]).write_bytes(bytes(made))
    return answer


def _flags(trt: Any) -> int:
    """Return the flags of a strongly typed network; newer versions know no other."""
    strong = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if strong is None else 1 << int(strong)


def _parser_problems(parser: Any) -> list[dict[str, str]]:
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    return [
        {"node": str(e.node_name()), "operator": str(e.node_operator()), "text": str(e.desc())}
        for e in errors
    ] or [{"text": "the parser refuses the file without a word"}]


def _set_targets(trt: Any, config: Any, targets: list[str]) -> dict[str, str] | None:
    """Tell the builder what hardware to build for; return why it cannot be."""
    known = getattr(trt, "ComputeCapability", None)
    if not targets or known is None:
        return None
    wrong = [name for name in targets if not hasattr(known, name)]
    if wrong:
        return {"text": f"{trt.__name__} {trt.__version__} builds nothing for {', '.join(wrong)}"}
    config.num_compute_capabilities = len(targets)
    for index, name in enumerate(targets):
        config.set_compute_capability(getattr(known, name), index)
    return None


def _kind(layer: Any) -> str:
    return str(layer.type).rsplit(".", 1)[-1].lower()


def _logger(trt: Any) -> Any:
    """Return a logger that keeps errors and warnings."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []
            self.said: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(text)
            elif severity == trt.ILogger.WARNING and text not in self.said:
                self.said.append(text)

    return Log()


if __name__ == "__main__":
    main()
