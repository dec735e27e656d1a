"""Prefaulter: makes the pages of the KV pool resident in the background without changing their contents."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from minivllm.core.attention.kv_pool import KVCachePool, KVCacheSpec
from minivllm.core.native import library
from minivllm.core.native.prefault import Prefaulter
from minivllm.core.native.resources import available_bytes, usable_cores

SPEC = KVCacheSpec(num_layers=4, num_kv_heads=2, head_size=64, block_size=16, dtype=torch.bfloat16)
BLOCK_BYTES = SPEC.block_bytes
CPU = torch.device("cpu")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def has_library() -> None:
    assert library() is not None, "these tests need the C++ library"


def pool_of(mebibytes: int) -> KVCachePool:
    return KVCachePool(SPEC, mebibytes * 2**20 // BLOCK_BYTES, CPU)


def started(pool: KVCachePool) -> Prefaulter:
    prefaulter = Prefaulter.start(pool)
    assert prefaulter is not None
    return prefaulter


def resident_share(tensor: torch.Tensor) -> float:
    """Returns the share of a tensor's pages that are resident, read from the page table."""
    first = tensor.data_ptr() // PAGE_BYTES
    last = -(-(tensor.data_ptr() + tensor.numel() * tensor.element_size()) // PAGE_BYTES)
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(first * 8)
        entries = np.frombuffer(file.read((last - first) * 8), dtype=np.uint64)
    assert len(entries) == last - first
    return float(((entries >> np.uint64(63)) == 1).mean())  # the highest bit: present


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_all_pages_of_the_pool_become_resident() -> None:
    pool = pool_of(64)
    assert resident_share(pool.tensor) < 0.1
    started(pool).wait()
    assert resident_share(pool.tensor) == 1.0


def test_values_written_during_prefaulting_are_kept() -> None:
    pool = pool_of(256)
    prefaulter = started(pool)
    rounds = 0
    while not prefaulter.is_done() or rounds == 0:
        value = float(rounds % 100)
        pool.tensor[:, :, :, 0, 0, :8] = value
        assert bool((pool.tensor[:, :, :, 0, 0, :8] == value).all())
        rounds += 1
    pool.tensor.fill_(3.0)
    started(pool).wait()
    assert bool((pool.tensor == 3.0).all())


def test_deleting_the_pool_stops_the_thread() -> None:
    threads = num_threads()
    pool = pool_of(2048)
    prefaulter = started(pool)
    assert num_threads() == threads + 1
    begun = time.monotonic()
    del pool
    assert time.monotonic() - begun < 5.0
    assert prefaulter.is_done()
    assert num_threads() == threads


def test_missing_library_disables_prefaulting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minivllm.core.native.prefault.library", lambda: None)
    assert Prefaulter.start(pool_of(1)) is None


def test_pool_close_to_the_available_memory_disables_prefaulting(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    pool = pool_of(64)
    monkeypatch.setattr("minivllm.core.native.prefault.available_bytes", lambda: 70 * 2**20)
    assert Prefaulter.start(pool) is None
    assert "is not prefaulted" in caplog.text


@pytest.mark.parametrize(
    ("line", "folder", "names", "unlimited"),
    [
        ("0::/a/b", "/sys/fs/cgroup/a", ("memory.max", "memory.current", "inactive_file"), "max"),
        (
            "4:cpu,memory:/a/b",
            "/sys/fs/cgroup/memory/a",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            str(2**62),
        ),
    ],
    ids=["cgroup v2", "cgroup v1"],
)
def test_available_memory_respects_the_cgroup_limit(line, folder, names, unlimited, monkeypatch) -> None:
    limit, usage, cache = names
    files = {
        "/proc/meminfo": "MemTotal: 4000 kB\nMemAvailable: 3000 kB\n",
        "/proc/self/cgroup": f"1:cpuset:/x\n{line}\n",
        f"{folder}/{limit}": "2000000\n",
        f"{folder}/{usage}": "1500000\n",
        f"{folder}/memory.stat": f"anon 1\n{cache} 300000\n",
    }

    def read(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    assert available_bytes() == 800_000
    files[f"{folder}/{limit}"] = unlimited
    assert available_bytes() == 3_072_000
    del files["/proc/meminfo"]
    assert available_bytes() is None


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        ("0::/a/b", {"/sys/fs/cgroup/a/cpu.max": "150000 100000\n", "/sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 2),
        ("0::/a", {"/sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ("0::/", {}, 8),
        (
            "4:cpuacct,cpu:/a",
            {"/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "300000", "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000"},
            3,
        ),
        (
            "4:cpu:/",
            {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            8,
        ),
    ],
    ids=["quota of a parent", "half a core", "no quota", "cgroup v1", "cgroup v1 without a quota"],
)
def test_usable_cores_respect_the_cpu_quota(line: str, files: dict[str, str], expected: int, monkeypatch) -> None:
    texts = {Path("/proc/self/cgroup"): f"1:cpuset:/x\n{line}\n"} | {Path(path): text for path, text in files.items()}

    def read(path: Path) -> str:
        if path not in texts:
            raise FileNotFoundError(path)
        return texts[path]

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores() == expected
