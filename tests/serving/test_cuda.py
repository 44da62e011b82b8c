"""Lanes on CUDA: a stream of their own, page-locked buffers, memory that is kept.

Where there is no device a stand-in of the CUDA runtime is compiled here. It copies only when a
stream is waited for, as late as a device may, so that what forgets to wait gets stale numbers.
"""

from __future__ import annotations

import ctypes
import gc
import shutil
import subprocess

import numpy as np
import onnx
import pytest
from test_pool import MODEL, SPECS, encoded, plain

from qbench.errors import MeasurementError
from qbench.runtime import ort as runtime
from qbench.runtime.ort import CUDA_PROVIDER, Session, SessionSettings, open_session
from qbench.serving.bench import Engine, Workload
from qbench.serving.cuda import Cuda, find_cuda
from qbench.serving.opening import ServeSettings, open_service
from qbench.serving.pool import PooledPad, StreamedRun
from qbench.serving.request import named_rows
from qbench.serving.service import Request

STAND_IN = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#define SLOTS 256
int live = 0, fail_next = 0;
static struct { char *to; const char *from; size_t count; intptr_t stream; } waiting[SLOTS];
static int queued = 0;
static intptr_t streams = 0x7f0000000000; /* handles are as long as pointers */
static int make(void **into, size_t count) {
    if (fail_next) { fail_next = 0; return 2; }
    *into = malloc(count); live++; return 0;
}
static int drop(void *what) { free(what); live--; return 0; }
int cudaMemGetInfo(size_t *free, size_t *total) { *free = 3L << 33; *total = 8L << 33; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaMallocHost(void **into, size_t count) { return make(into, count); }
int cudaFreeHost(void *what) { return drop(what); }
int cudaMalloc(void **into, size_t count) { return make(into, count); }
int cudaFree(void *what) { return drop(what); }
int cudaStreamCreateWithFlags(void **into, unsigned flags) {
    if (flags != 1) return 1;
    *into = (void *)(++streams); return 0;
}
int cudaMemcpyAsync(void *to, const void *from, size_t count, int kind, void *stream) {
    if (kind < 1 || kind > 2 || queued == SLOTS) return 1;
    waiting[queued].to = to; waiting[queued].from = from; waiting[queued].count = count;
    waiting[queued++].stream = (intptr_t)stream; return 0;
}
int cudaStreamSynchronize(void *stream) {
    int kept = 0;
    for (int i = 0; i < queued; i++)
        if (waiting[i].stream == (intptr_t)stream)
            memcpy(waiting[i].to, waiting[i].from, waiting[i].count);
        else waiting[kept++] = waiting[i];
    queued = kept; return 0;
}
"""


class StandIn(Cuda):
    """A runtime whose device is the host."""

    device = "cpu"


class OnStream(Session):
    """A session that runs on a stream: after what was begun there before."""

    stream = None

    def run_bound(self, binding):
        self.stream.wait()
        super().run_bound(binding)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "cuda.c").write_text(STAND_IN)
    built = folder / "libcuda_stand_in.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, folder / "cuda.c"], check=True)
    return ctypes.CDLL(str(built))


@pytest.fixture
def cuda(library):
    return StandIn(library)


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(MODEL), path)
    return path


def session_on(model, stream) -> OnStream:
    opened = open_session(model, SessionSettings(threads=1))
    session = OnStream(opened.raw, opened.provider)
    session.stream = stream
    return session


def sums(feeds) -> list[float]:
    return (feeds["input_ids"] * feeds["attention_mask"]).sum(axis=1).tolist()


def live(library) -> int:
    gc.collect()
    return ctypes.c_int.in_dll(library, "live").value


def test_a_lane_on_a_stream_answers_as_a_plain_session_and_allocates_once(cuda, model):
    stream = cuda.stream()
    plain_session = open_session(model, SessionSettings(threads=1))
    run, pooled = (
        StreamedRun(session_on(model, stream), stream),
        PooledPad(SPECS, 512, host=cuda.page_locked),
    )
    requests = encoded()
    for round_index in range(2):
        for start in range(0, 160, 8):
            feeds = pooled(requests[start : start + 8])
            wanted, got = plain_session.run(feeds), run(feeds)
            for name, array in wanted.items():
                np.testing.assert_array_equal(got[name], array)
                assert got[name].dtype == array.dtype
        counts = pooled.buffers.allocations, run.buffers.allocations, run.device_allocations
        if round_index == 0:
            before = counts
    assert counts == before, "none in steady state"
    assert pooled.buffers.allocations == len(SPECS)


def test_two_lanes_do_not_wait_for_each_other_s_stream(cuda, model):
    streams = cuda.stream(), cuda.stream()
    assert streams[0].handle != streams[1].handle > 1 << 40
    runs = [StreamedRun(session_on(model, stream), stream) for stream in streams]
    first, second = plain(encoded(4)), plain(encoded(4, seed=1))
    other = cuda.memory(8)
    source = cuda.page_locked(1, np.dtype(np.int64))
    streams[1].copy_in(other, source)  # begun on the second stream, and not waited for
    source[0] = 77
    assert runs[0](first)["total"].tolist() == sums(first)
    back = cuda.page_locked(1, np.dtype(np.int64))
    streams[1].copy_out(back, other)
    streams[1].wait()
    assert back[0] == 77, "the first lane's wait was not for the second's copies"
    assert runs[1](second)["total"].tolist() == sums(second)


def test_page_locked_arrays_and_memory_are_freed_with_what_holds_them(library, cuda):
    before = live(library)
    array = cuda.page_locked(100, np.dtype(np.float32))
    part, memory = array[:10].reshape(2, 5), cuda.memory(64)
    assert (array.dtype, array.shape, live(library)) == (np.float32, (100,), before + 2)
    del array
    assert live(library) == before + 1 + 1, "a view holds it"
    part[:] = 1.0
    del part, memory
    assert live(library) == before


def test_memory_of_the_device_is_told_in_full(cuda):
    assert cuda.free_and_total() == (3 << 33, 8 << 33)


def test_what_the_runtime_refuses_is_an_error_that_names_the_call(library, cuda):
    ctypes.c_int.in_dll(library, "fail_next").value = 1
    with pytest.raises(MeasurementError, match="cudaMalloc failed with CUDA error 2"):
        cuda.memory(64)
    with pytest.raises(MeasurementError, match="has no cudaGetDeviceCount"):
        Cuda(ctypes.CDLL(None))


def test_a_bad_batch_leaves_nothing_behind_on_the_stream(cuda, model):
    stream = cuda.stream()
    run = StreamedRun(session_on(model, stream), stream)
    ones = np.ones((2, 3), np.int64)
    with pytest.raises(MeasurementError):
        run({"input_ids": ones, "attention_mask": np.ones((2, 4), np.int64)})
    got = run({"input_ids": ones * 5, "attention_mask": ones})
    assert got["total"].tolist() == [15.0, 15.0]


def test_a_session_on_a_stream_is_asked_for_with_it(monkeypatch, model):
    import onnxruntime

    asked = []
    real = onnxruntime.InferenceSession

    def note(payload, options, providers):
        asked.append(providers)
        return real(payload, options, providers=["CPUExecutionProvider"])

    opened = open_session(model, SessionSettings(threads=1))
    assert opened.on_stream(7) is None, "not on CUDA"
    monkeypatch.setattr(onnxruntime, "InferenceSession", note)
    monkeypatch.setattr(real, "get_providers", lambda self: [CUDA_PROVIDER])
    on_cuda = open_session(model, SessionSettings("ort-cuda", 1))
    own = on_cuda.on_stream(0x7F0000000007)
    assert own is not None and own is not on_cuda
    ((name, plain_options),), ((_, options),) = asked
    assert name == CUDA_PROVIDER and "user_compute_stream" not in plain_options
    assert options == {**plain_options, "user_compute_stream": str(0x7F0000000007)}


def test_a_service_on_cuda_gives_each_lane_its_stream_and_page_locked_buffers(
    cuda, model, monkeypatch
):
    monkeypatch.setattr("qbench.serving.opening.find_cuda", lambda: cuda)
    opened_on: list[int] = []

    class OnCuda(OnStream):
        def on_stream(self, stream):
            opened_on.append(stream)
            own = session_on(model, Handle(stream))
            own.provider = CUDA_PROVIDER
            return own

    class Handle:
        def __init__(self, handle):
            self.handle = handle

        def wait(self):
            cuda.call("cudaStreamSynchronize", self.handle)

    def open_one(threads):
        session = OnCuda(runtime.open_session(model, SessionSettings(threads=1)).raw, CUDA_PROVIDER)
        session.stream = cuda.stream()
        return session

    specs = open_one(1).inputs
    asked = encoded(120)
    made = []
    locked = cuda.page_locked
    monkeypatch.setattr(cuda, "page_locked", lambda *given: made.append(given) or locked(*given))

    def pad(group):
        from qbench.tasks.padding import pad_batch

        return pad_batch(group, specs)

    engine = Engine("e", lambda threads: open_one(threads).run, open_one, specs)
    settings = ServeSettings(lanes=2, token_budget=128, queue=300)
    workload = Workload(asked[:40], pad, decode=named_rows)
    with open_service(engine, workload, settings).service as service:
        answers = [f.result(20) for f in [service.submit(Request(one)) for one in asked]]
        service.look()
        memory = service.stats().memory
    assert (memory.source, memory.limit) == ("device", 8 << 33)
    assert len(set(opened_on)) == len(opened_on) == 2
    kinds = [str(dtype) for _, dtype in made]
    assert kinds.count("int64") == 2 * len(specs), "inputs of both lanes, and no growth"
    assert kinds.count("float32") >= 2 * 2, "outputs of both"
    wanted = [float(sum(one["input_ids"])) for one in asked]
    assert [float(answer.value["total"]) for answer in answers] == wanted


def test_on_a_device_a_lane_on_its_stream_answers_as_the_cpu(model):
    """Runs where there is a device, and ONNX Runtime for it."""
    import onnxruntime

    cuda = find_cuda()
    if cuda is None or CUDA_PROVIDER not in onnxruntime.get_available_providers():
        pytest.skip("no CUDA device, or no onnxruntime-gpu")
    stream = cuda.stream()
    own = open_session(model, SessionSettings("ort-cuda", 1)).on_stream(stream.handle)
    run, pooled = StreamedRun(own, stream), PooledPad(SPECS, 512, host=cuda.page_locked)
    plain_session = open_session(model, SessionSettings(threads=1))
    requests = encoded()
    for start in range(0, 160, 8):
        feeds = pooled(requests[start : start + 8])
        got = run(feeds)
        for name, array in plain_session.run(feeds).items():
            np.testing.assert_allclose(got[name], array, rtol=1e-5)
