"""Servers that qbench's batcher is compared with, each a process of its own.

    python benchmarks/serving_apps.py fastapi-ort --port 8001 --model model.onnx --threads 2

Each answers ``POST /`` with ``{"ids": [...]}`` by the bytes of the vector. Where several instances
run, each has a thread or process of its own and takes the next request as soon as it is free.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Vectors = np.ndarray


def load_ort(path: str, threads: int) -> Callable[[Sequence[Sequence[int]]], Vectors]:
    """Return what runs a batch of token ids on ONNX Runtime, padded to its longest."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(batch: Sequence[Sequence[int]]) -> Vectors:
        ids, mask = pad(batch)
        feeds = {name: mask if "mask" in name else np.zeros_like(ids) for name in names}
        feeds["input_ids"] = ids
        return np.asarray(session.run(None, feeds)[0])

    return run


def load_torch(folder: str, threads: int) -> Callable[[Sequence[Sequence[int]]], Vectors]:
    """Return what runs a batch on eager PyTorch: mean over the tokens, of length one."""
    import torch
    from transformers import AutoModel

    torch.set_num_threads(threads)
    model = AutoModel.from_pretrained(folder).eval()

    def run(batch: Sequence[Sequence[int]]) -> Vectors:
        ids, mask = (torch.from_numpy(array) for array in pad(batch))
        with torch.inference_mode():
            states = model(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask[..., None].to(states.dtype)
            pooled = (states * weights).sum(1) / weights.sum(1)
            return np.asarray(torch.nn.functional.normalize(pooled, dim=1).numpy())

    return run


def pad(batch: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask [batch, longest] of a batch."""
    longest = max(len(one) for one in batch)
    ids = np.zeros((len(batch), longest), np.int64)
    mask = np.zeros_like(ids)
    for row, one in enumerate(batch):
        ids[row, : len(one)] = one
        mask[row, : len(one)] = 1
    return ids, mask


def serve_fastapi(chosen: argparse.Namespace) -> None:
    """Serve with FastAPI, one request at a time on each instance."""
    import asyncio

    import uvicorn
    from fastapi import FastAPI, Request, Response

    load = load_torch if chosen.app == "fastapi-torch" else load_ort
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work(run: Callable[[Sequence[Sequence[int]]], Vectors]) -> None:
        while True:
            ids, loop, answered = jobs.get()
            try:
                loop.call_soon_threadsafe(answered.set_result, run([ids])[0].tobytes())
            except Exception as error:  # handed to the handler of that request
                loop.call_soon_threadsafe(answered.set_exception, error)

    for _ in range(chosen.instances):
        run = load(chosen.model, chosen.threads)
        run([[1, 2]])
        threading.Thread(target=work, args=(run,), daemon=True).start()
    app = FastAPI()

    async def embed(request: Request) -> Response:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[bytes] = loop.create_future()
        jobs.put(((await request.json())["ids"], loop, answered))
        return Response(await answered)

    # NOTE: FastAPI would look for types that are named in strings in the module alone.
    embed.__annotations__.update({"request": Request, "return": Response})
    app.post("/")(embed)
    uvicorn.run(app, port=chosen.port, log_level="error", access_log=False)


def serve_litserve(chosen: argparse.Namespace) -> None:
    """Serve with LitServe: a worker process for each instance."""
    import litserve
    from serving_litserve import Embed

    wait_s = chosen.wait_ms / 1e3 if chosen.batch > 1 else 0.0
    api = Embed(chosen.model, chosen.threads, chosen.batch, wait_s)
    server = litserve.LitServer(
        api, accelerator="cpu", workers_per_device=chosen.instances, timeout=120
    )
    server.run(port=chosen.port, host="127.0.0.1", log_level="error", generate_client_file=False)


def serve_ray(chosen: argparse.Namespace) -> None:
    """Serve with Ray Serve: a replica for each instance."""
    import ray
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import Response

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

    class Embed:
        def __init__(self) -> None:
            from serving_apps import load_ort

            self.run = load_ort(chosen.model, chosen.threads)

        @serve.batch(max_batch_size=chosen.batch, batch_wait_timeout_s=chosen.wait_ms / 1e3)
        async def embed(self, batch: list[list[int]]) -> list[np.ndarray]:
            return list(self.run(batch))

        async def __call__(self, request: Request) -> Response:
            return Response((await self.embed((await request.json())["ids"])).tobytes())

    folder = os.path.dirname(os.path.abspath(__file__))
    env = {"env_vars": {"PYTHONPATH": folder}}
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env=env)
    serve.start(http_options={"host": "127.0.0.1", "port": chosen.port})
    options = {"num_replicas": chosen.instances, "max_ongoing_requests": 100}
    serve.run(serve.deployment(Embed).options(**options).bind())
    signal.signal(signal.SIGTERM, lambda *_: (serve.shutdown(), ray.shutdown(), os._exit(0)))
    while True:
        time.sleep(1)


APPS = {
    "fastapi-torch": serve_fastapi,
    "fastapi-ort": serve_fastapi,
    "litserve": serve_litserve,
    "ray": serve_ray,
}


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("app", choices=sorted(APPS))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True, help="ONNX file; a folder for PyTorch")
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--wait-ms", type=float, default=5.0)
    chosen = parser.parse_args()
    APPS[chosen.app](chosen)


if __name__ == "__main__":
    main()
