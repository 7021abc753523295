"""probe() on machines recorded as trees of /proc and /sys files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fake_nvml import Card, FakeNvml
from proa.errors import ResourceError
from proa.machine.files import parse_cache_size, parse_cpu_list
from proa.machine.machine import Machine
from proa.machine.probe import probe
from topologies import HostFiles, NodeFiles

GIB = 1 << 30
UNLIMITED_V1 = "9223372036854771712"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def host(cpus: int, total_gib: int, free_gib: int, flags: str = "avx2 fma f16c") -> dict[str, str]:
    """Write the files of a machine without topology, NUMA or control groups."""
    return {
        "proc/cpuinfo": "\n\n".join(
            f"processor\t: {i}\nmodel name\t: Test CPU\nflags\t\t: fpu {flags}" for i in range(cpus)
        ),
        "proc/meminfo": f"MemTotal: {total_gib << 20} kB\nMemFree: 1024 kB\nMemAvailable: {free_gib << 20} kB",
        "proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t0-{cpus - 1}",
        "sys/devices/system/cpu/online": f"0-{cpus - 1}",
    }


def topology(cores: int, threads_per_core: int, packages: int = 1, l3: str = "16384K") -> dict[str, str]:
    """Write the topology of a machine with Linux's usual numbering: first threads of all cores, then second threads;
    one L3 per package."""
    files = {}
    for cpu in range(cores * threads_per_core):
        core = cpu % cores
        package = core * packages // cores
        base = f"sys/devices/system/cpu/cpu{cpu}"
        files[f"{base}/topology/core_id"] = str(core)
        files[f"{base}/topology/physical_package_id"] = str(package)
        files[f"{base}/cache/index3/size"] = l3
        files[f"{base}/cache/index3/shared_cpu_list"] = f"package {package}"
    return files


def cgroup2(path: str, groups: dict[str, dict[str, str]]) -> dict[str, str]:
    """Write cgroup v2 at /sys/fs/cgroup; `groups`: folders below it ("" is the root)."""
    files = {
        "proc/self/cgroup": f"0::{path}",
        "proc/self/mountinfo": "24 1 0:22 / /proc rw - proc proc rw\n"
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate",
    }
    for group, settings in groups.items():
        files |= {f"sys/fs/cgroup/{group}/{name}": text for name, text in settings.items()}
    return files


def cgroup1(path: str, shown: str, groups: dict[str, dict[str, str]]) -> dict[str, str]:
    """Write cgroup v1; the mounts show the hierarchy from `shown` on, as in a container."""
    files = {
        "proc/self/cgroup": f"9:cpu,cpuacct:{path}\n4:memory:{path}\n3:cpuset:{path}\n0::/",
        "proc/self/mountinfo": "\n".join(
            f"3{i} 1 0:3{i} {shown} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}"
            for i, name in enumerate(("cpu,cpuacct", "memory", "cpuset"))
        ),
    }
    for group, settings in groups.items():
        for name, text in settings.items():
            controller = {"cpu": "cpu,cpuacct"}.get(name.split(".")[0], name.split(".")[0])
            files[f"sys/fs/cgroup/{controller}/{group}/{name}"] = text
    return files


def test_a_laptop_with_eight_cores(tmp_path: Path) -> None:
    nvml = FakeNvml(broken="Library Not Found")
    machine = probe(tree(tmp_path, host(16, 32, 24, "avx2 fma avx512f sse2") | topology(8, 2)), nvml)
    assert machine.cpu == "Test CPU"
    assert machine.isa == ("avx2", "fma", "avx512f")
    assert (machine.online_cpus, machine.usable_cores, machine.physical_cores, machine.packages) == (16, 16, 8, 1)
    assert machine.l3_bytes == 16 << 20
    assert (machine.total_bytes, machine.available_bytes) == (32 * GIB, 24 * GIB)
    assert machine.memory_bound_by == "free memory"
    assert machine.gpus == ()
    assert machine.gpus_note == "none found: no NVIDIA driver is loaded (Library Not Found)"
    assert machine.quota_cores is None
    assert machine.numa == ()
    assert any("NUMA" in note for note in machine.notes)


def test_gpus_are_a_part_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    nvml = FakeNvml((Card(uuid="GPU-a"), Card(uuid="GPU-b")))
    machine = probe(tree(tmp_path, host(4, 8, 7, "avx2")), nvml)
    assert [(gpu.index, gpu.uuid) for gpu in machine.gpus] == [(0, "GPU-b")]
    assert machine.gpus_note == "CUDA_VISIBLE_DEVICES=1 leaves 1 of 2 GPUs"


def test_a_server_with_two_nodes(tmp_path: Path) -> None:
    nodes = {
        "sys/devices/system/node/online": "0-1",
        "sys/devices/system/node/node0/cpulist": "0-31,64-95",
        "sys/devices/system/node/node0/meminfo": f"Node 0 MemTotal:       {256 << 20} kB\nNode 0 MemFree: 1 kB",
        "sys/devices/system/node/node1/cpulist": "32-63,96-127",
    }
    flags = "avx2 avx512_bf16 amx_tile amx_bf16 amx_int8"
    machine = probe(tree(tmp_path, host(128, 512, 500, flags) | topology(64, 2, 2, "256M") | nodes))
    assert [node.id for node in machine.numa] == [0, 1]
    assert machine.numa[0].cpus == (*range(32), *range(64, 96))
    assert machine.numa[0].memory_bytes == 256 * GIB
    assert machine.numa[1].memory_bytes is None  # its meminfo is missing: unknown, not guessed
    assert (machine.physical_cores, machine.packages, machine.l3_bytes) == (64, 2, 512 << 20)
    assert machine.isa == ("avx2", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
    assert machine.notes == ()


@pytest.mark.parametrize(("homes", "total_gib", "free_gib"), [("0", 128, 120), ("0-1", 4, 3)])
def test_ram_that_a_virtual_machine_gets_when_it_is_needed(
    tmp_path: Path, homes: str, total_gib: int, free_gib: int
) -> None:
    """The only node with memory has all of /proc/meminfo, though less is reported for it."""
    meminfo = "\n".join(f"Node 0 {key}: {gib << 20} kB" for key, gib in (("MemTotal", 4), ("MemFree", 3)))
    nodes = {
        "sys/devices/system/node/online": "0-1",
        "sys/devices/system/node/has_memory": homes,
        "sys/devices/system/node/node0/cpulist": "0-7",
        "sys/devices/system/node/node0/meminfo": meminfo,
        "sys/devices/system/node/node1/cpulist": "8-15",
    }
    node, other = probe(tree(tmp_path, host(16, 128, 120) | nodes)).numa
    assert (node.memory_bytes, node.available_bytes) == (total_gib * GIB, free_gib * GIB)
    assert (other.memory_bytes, other.available_bytes) == (None, None)


def test_a_quota_of_three_cores(tmp_path: Path) -> None:
    groups = {"": {}, "box": {"cpu.max": "max 100000"}, "box/app": {"cpu.max": "300000 100000"}}
    machine = probe(tree(tmp_path, host(64, 64, 60) | cgroup2("/box/app", groups)))
    assert machine.quota_cores == 3.0
    assert (machine.online_cpus, machine.usable_cores) == (64, 3)


def test_a_mount_without_a_source_does_not_matter(tmp_path: Path) -> None:
    """The kernel shows nothing, between two spaces, for `mount -t tmpfs "" /mnt`."""
    files = host(4, 64, 60) | cgroup2("/box", {"box": {"cpu.max": "300000 100000"}})
    files["proc/self/mountinfo"] = "35 1 0:30 / /mnt rw - tmpfs  rw\n" + files["proc/self/mountinfo"]
    assert probe(tree(tmp_path, files)).quota_cores == 3.0


def test_the_tightest_quota_of_all_levels_counts(tmp_path: Path) -> None:
    groups = {"box": {"cpu.max": "150000 100000"}, "box/app": {"cpu.max": "800000 100000"}}
    machine = probe(tree(tmp_path, host(64, 64, 60) | cgroup2("/box/app", groups)))
    assert (machine.quota_cores, machine.usable_cores) == (1.5, 1)


@pytest.mark.parametrize(
    ("settings", "left_gib"),
    [
        ({"memory.max": str(8 * GIB), "memory.current": str(3 * GIB)}, 5),
        ({"memory.max": "max", "memory.high": str(6 * GIB), "memory.current": str(3 * GIB)}, 3),
        ({"memory.max": str(2 * GIB), "memory.current": str(3 * GIB)}, 0),
        # the page cache is reclaimable
        (
            {
                "memory.max": str(8 * GIB),
                "memory.current": str(7 * GIB),
                "memory.stat": f"anon {2 * GIB}\ninactive_file {3 * GIB}\nactive_file {GIB}",
            },
            5,
        ),
    ],
)
def test_memory_limit_v2(tmp_path: Path, settings: dict[str, str], left_gib: int) -> None:
    machine = probe(tree(tmp_path, host(4, 64, 60) | cgroup2("/box/app", {"box": settings, "box/app": {}})))
    assert machine.available_bytes == left_gib * GIB
    assert machine.memory_bound_by == "the memory limit of control group /box"
    assert machine.total_bytes == 64 * GIB


def test_a_limit_above_free_memory_does_not_bind(tmp_path: Path) -> None:
    settings = {"memory.max": str(100 * GIB), "memory.current": "0"}
    machine = probe(tree(tmp_path, host(4, 64, 20) | cgroup2("/box", {"box": settings})))
    assert (machine.available_bytes, machine.memory_bound_by) == (20 * GIB, "free memory")


@pytest.mark.parametrize(
    ("allowed", "available_gib", "bound_by"),
    [
        ((0, 1, 2), 64, "free memory"),
        (None, 64, "free memory"),
        ((0, 1), 64, "free memory"),  # node 2 has no memory
        ((1,), 8, "the memory nodes of the cpuset, 1"),
        ((1, 2), 8, "the memory nodes of the cpuset, 1-2"),
    ],
)
def test_memory_of_other_nodes_is_not_available(
    allowed: tuple[int, ...] | None, available_gib: int, bound_by: str, tmp_path: Path
) -> None:
    nodes = {0: NodeFiles((0, 1), 64, 56), 1: NodeFiles((2, 3), 64, 8), 2: NodeFiles((4,), 0)}
    host_files = HostFiles(nodes=nodes, cores={core: (core,) for core in range(5)}, memory_nodes=allowed)
    machine = probe(host_files.write(tmp_path))
    assert (machine.available_bytes, machine.memory_bound_by) == (available_gib * GIB, bound_by)
    assert machine.total_bytes == 128 * GIB


def test_version_1_inside_a_container(tmp_path: Path) -> None:
    """The mount's top level is /docker/abc, while /proc/self/cgroup has the whole path."""
    groups = {
        "": {
            "memory.limit_in_bytes": str(4 * GIB),
            "memory.usage_in_bytes": str(3 * GIB),
            "memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}",
            "cpu.cfs_quota_us": "250000",
            "cpu.cfs_period_us": "100000",
            "cpuset.effective_cpus": "2-5",
        }
    }
    machine = probe(tree(tmp_path, host(8, 64, 60) | cgroup1("/docker/abc", "/docker/abc", groups)))
    assert machine.available_bytes == 3 * GIB
    assert machine.quota_cores == 2.5
    assert machine.usable_cpus == (2, 3, 4, 5)
    assert machine.usable_cores == 2


def test_version_1_without_limits(tmp_path: Path) -> None:
    free = {
        "memory.limit_in_bytes": UNLIMITED_V1,
        "memory.usage_in_bytes": str(GIB),
        "cpu.cfs_quota_us": "-1",
        "cpu.cfs_period_us": "100000",
        "cpuset.cpus": "0-7",
    }
    machine = probe(tree(tmp_path, host(8, 64, 60) | cgroup1("/user", "/", {"": free, "user": free})))
    assert (machine.available_bytes, machine.usable_cores, machine.quota_cores) == (60 * GIB, 8, None)


def test_a_group_outside_the_mount_uses_what_is_visible(tmp_path: Path) -> None:
    settings = {"memory.max": str(8 * GIB), "memory.current": str(GIB)}
    machine = probe(tree(tmp_path, host(4, 64, 60) | cgroup2("/../../elsewhere", {"": settings})))
    assert machine.available_bytes == 7 * GIB


def test_affinity_and_cpuset_both_cut(tmp_path: Path) -> None:
    files = host(16, 32, 24) | cgroup2("/box", {"box": {"cpuset.cpus.effective": "0-3,8"}})
    files["proc/self/status"] = "Cpus_allowed_list:\t2-11"
    assert probe(tree(tmp_path, files)).usable_cpus == (2, 3, 8)


def test_an_old_kernel_without_memavailable(tmp_path: Path) -> None:
    files = host(2, 4, 3) | {"proc/meminfo": f"MemTotal: {4 << 20} kB\nMemFree: {2 << 20} kB"}
    machine = probe(tree(tmp_path, files))
    assert machine.available_bytes == 2 * GIB
    assert any("MemAvailable" in note for note in machine.notes)


def test_an_arm_machine(tmp_path: Path) -> None:
    files = host(4, 8, 6)
    files["proc/cpuinfo"] = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm bf16\nCPU part\t: 0xd4f"
    machine = probe(tree(tmp_path, files))
    assert (machine.cpu, machine.isa) == ("0xd4f", ("asimd", "asimddp", "i8mm", "bf16"))


def test_no_proc_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="Linux"):
        probe(tmp_path)


def test_json_and_back(tmp_path: Path) -> None:
    machine = probe(tree(tmp_path, host(16, 32, 24) | topology(8, 2)))
    assert msgspec.json.decode(msgspec.json.encode(machine), type=Machine) == machine


def test_this_machine() -> None:
    machine = probe()
    assert 1 <= machine.usable_cores <= machine.online_cpus
    assert 0 < machine.available_bytes <= machine.total_bytes


@pytest.mark.parametrize(
    ("text", "cpus"), [("", ()), ("5", (5,)), ("0-2,7", (0, 1, 2, 7)), ("1,0\n", (0, 1)), ("3-3", (3,))]
)
def test_cpu_list(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize(("text", "expected"), [("512K", 512 << 10), ("32M", 32 << 20), ("1G", GIB), ("77", 77)])
def test_size(text: str, expected: int) -> None:
    assert parse_cache_size(text) == expected
