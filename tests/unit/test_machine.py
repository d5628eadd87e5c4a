"""What is read of a machine, from recorded trees and from this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engram_server.machine import HugePool, Machine, MemoryLimit, NumaNode, available_host_bytes
from tests.support.machines import MEMINFO, machine, record

KIB = 1024


def test_an_empty_root_is_a_machine_with_nothing(tmp_path: Path) -> None:
    found = Machine.read(tmp_path)
    assert (found.mem_available, found.limits, found.huge_pool, found.nodes, found.shm) == (0, (), None, (), None)
    assert found.thp_enabled is None
    assert found.thp_shmem is None
    assert found.kernel == (0, 0)


def test_memory_pages_and_kernel_are_read_from_a_recorded_machine(tmp_path: Path) -> None:
    pool = "sys/kernel/mm/hugepages/hugepages-2048kB"
    root = record(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/sys/kernel/osrelease": "5.14.0-427.el9.x86_64\n",
            "proc/self/status": "Name:\tx\nCpus_allowed_list:\t0-3,8,10-11\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force\n",
            f"{pool}/nr_hugepages": "100\n",
            f"{pool}/free_hugepages": "60\n",
            f"{pool}/resv_hugepages": "10\n",
            "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:  500 kB\nNode 0 MemFree:  100 kB\n"
            "Node 0 Active(file):  20 kB\nNode 0 Inactive(file):  30 kB\n",
            "sys/devices/system/node/node10/meminfo": "Node 10 MemTotal:  700 kB\nNode 10 MemFree:  7 kB\n",
            "sys/devices/system/node/node2/meminfo": "Node 2 MemTotal:  0 kB\n",
        },
    )
    found = Machine.read(root)
    assert (found.mem_total, found.mem_available) == (100000 * KIB, 80000 * KIB)
    assert found.kernel == (5, 14)
    assert found.cpus == 7
    assert (found.thp_enabled, found.thp_shmem) == ("madvise", "never")
    assert found.huge_pool == HugePool(total=100, free=60, reserved=10)
    assert found.huge_pool is not None
    assert found.huge_pool.available == 50 * 2048 * KIB
    assert found.nodes == (
        NumaNode(id=0, total=500 * KIB, available=150 * KIB),
        NumaNode(id=10, total=700 * KIB, available=7 * KIB),
    ), "a node without memory is none for a table"


def test_every_cgroup_above_the_process_limits_it(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    root = record(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/kube/pod/engram\n",
            f"{base}/cgroup.procs": "",
            f"{base}/kube/memory.max": "max\n",
            f"{base}/kube/memory.high": "max\n",
            f"{base}/kube/memory.current": "999\n",
            f"{base}/kube/pod/memory.max": "70000\n",
            f"{base}/kube/pod/memory.high": "60000\n",
            f"{base}/kube/pod/memory.current": "50000\n",
            f"{base}/kube/pod/memory.stat": "anon 1\ninactive_file 3000\nactive_file 400\nshmem 77\n",
            f"{base}/kube/pod/engram/memory.max": "max\n",
            f"{base}/kube/pod/engram/memory.current": "0\n",
            f"{base}/kube/pod/engram/cpu.max": "250000 100000\n",
            "proc/self/status": "Cpus_allowed_list:\t0-63\n",
        },
    )
    found = Machine.read(root)
    assert found.limits == (
        MemoryLimit(path=f"/{base}/kube/pod/memory.max", limit=70000, used=50000, reclaimable=3400),
        MemoryLimit(path=f"/{base}/kube/pod/memory.high", limit=60000, used=50000, reclaimable=3400),
    )
    assert available_host_bytes(found) == (13400, f"cgroup limit /{base}/kube/pod/memory.high")
    assert found.cpus == 3, "two and a half CPUs of quota feed three threads"


def test_a_container_without_a_cgroup_namespace_finds_its_limit_at_the_mount(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    root = record(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n0::/\n",
            f"{base}/memory.limit_in_bytes": "30000\n",
            f"{base}/memory.usage_in_bytes": "20000\n",
            f"{base}/memory.stat": "inactive_file 5\ntotal_inactive_file 1000\ntotal_active_file 200\n",
        },
    )
    assert available_host_bytes(Machine.read(root)) == (11200, f"cgroup limit /{base}/memory.limit_in_bytes")


def test_the_largest_number_of_cgroup_v1_is_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "3:memory:/a\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "20000\n",
    }
    assert Machine.read(record(tmp_path, files)).limits == ()


def test_a_group_above_its_limit_has_nothing_left_rather_than_less_than_nothing() -> None:
    limit = MemoryLimit(path="/x", limit=10, used=50, reclaimable=1)
    assert available_host_bytes(machine(limits=(limit,))) == (0, "cgroup limit /x")


def test_this_machine_agrees_with_psutil_and_changes_nothing() -> None:
    import psutil

    found = Machine.read(folder="/proc")
    assert found.mem_total == psutil.virtual_memory().total
    assert 0 < found.mem_available <= found.mem_total
    assert found.cpus <= len(os.sched_getaffinity(0))
    assert found.kernel >= (4, 0)
    assert found.folder is not None
    assert found.folder.kind == "0x9fa0", "proc's magic number: no place for tables"


def test_a_folder_that_is_not_there_is_no_folder(tmp_path: Path) -> None:
    assert Machine.read(folder=str(tmp_path / "no")).folder is None


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_dev_shm_is_known_as_a_tmpfs_with_its_free_bytes() -> None:
    shm = Machine.read().shm
    assert shm is not None
    assert shm.kind == "tmpfs"
    stat = os.statvfs("/dev/shm")
    assert shm.total == stat.f_blocks * stat.f_frsize
    assert 0 <= shm.available <= shm.total
