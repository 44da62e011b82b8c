from __future__ import annotations

import psutil
import pytest

from qbench.serving.cuda import find_cuda
from qbench.serving.memory import MemoryUse, cgroup_limit, device_memory, process_memory


def test_the_process_has_memory_and_a_limit():
    use = process_memory()
    assert 0 < use.used < use.limit <= psutil.virtual_memory().total
    assert use.source in ("machine", "cgroup")
    assert use.free == use.limit - use.used


def test_the_tightest_limit_counts():
    use = process_memory(limit=1 << 20)
    assert (use.limit, use.source) == (1 << 20, "given")
    assert use.free == 0


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "1073741824\n", 1 << 30),
        ("memory.max", "max\n", None),
        ("memory.limit_in_bytes", "2147483648", 1 << 31),
        ("memory.limit_in_bytes", "9223372036854771712", None),
    ],
)
def test_limits_of_control_groups(tmp_path, name, text, limit):
    (tmp_path / name).write_text(text)
    assert cgroup_limit(tmp_path, tmp_path) == limit


def test_a_device_s_memory_is_that_of_the_device_that_computes():
    class Cuda:
        def free_and_total(self):
            return 3 << 30, 8 << 30

    assert device_memory(Cuda()) == MemoryUse(5 << 30, 8 << 30, "device")


def test_where_there_is_a_device_its_memory_can_be_told():
    cuda = find_cuda()
    if cuda is None:
        pytest.skip("no CUDA device")
    use = device_memory(cuda)
    assert use.source == "device" and 0 < use.used <= use.limit
