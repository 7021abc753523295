"""Machine: the resources that this process may use, as a frozen struct that converts to and from JSON (msgspec)."""

from __future__ import annotations

import msgspec


class NumaNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A NUMA node: its CPUs and its RAM; None if the kernel does not report a value."""

    id: int
    cpus: tuple[int, ...]  # all online CPUs of the node, including those that this process may not use
    memory_bytes: int | None = None  # 0: the node has only CPUs
    available_bytes: int | None = None  # free now, counting the page cache as free
    distances: tuple[int, ...] = ()  # to each node of Machine.numa, in that order; 10 is local
    memory_allowed: bool = True  # False: a cpuset excludes this node's memory


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU that this process may use; None if the driver does not report a value."""

    index: int | None  # as CUDA numbers it in this process; None: simulated
    name: str
    uuid: str = ""
    bus_id: str = ""  # PCI address
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]  # CUDA's compute capability
    pcie_generation: int | None = None  # the highest that GPU, slot and system support together
    pcie_width: int | None = None  # lanes; the most that GPU, slot and system support together
    pcie_bytes_per_s: float | None = None  # one direction; from generation and width, or as given for a simulated link
    memory_bytes_per_s: float | None = None  # nominal: memory clock x bus width
    numa_node: int | None = None
    driver: str = ""  # version
    simulated: bool = False


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The host as seen by this process; None if the kernel does not report a value; `notes` lists what is missing."""

    cpu: str  # the processor's name
    isa: tuple[str, ...] = ()  # instruction sets used by matrix kernels, as named in /proc/cpuinfo
    online_cpus: int  # number of online logical CPUs of the machine
    usable_cpus: tuple[int, ...]  # ids of the CPUs that affinity and cpuset allow this process
    claimed_cpus: tuple[int, ...] = ()  # usable CPUs to which other engines' workers are bound
    quota_cores: float | None = None  # CPU seconds per second that control groups grant
    physical_cores: int | None = None  # distinct cores among usable_cpus
    packages: int | None = None  # distinct sockets among usable_cpus
    cores: tuple[tuple[int, ...], ...] = ()  # usable_cpus grouped by physical core (SMT siblings); () if unknown
    l3: tuple[tuple[int, ...], ...] = ()  # usable_cpus grouped by the last-level cache they share; () if unknown
    l3_bytes: int | None = None  # total size of the last-level caches of usable_cpus
    numa: tuple[NumaNode, ...] = ()
    total_bytes: int
    available_bytes: int  # RAM that this process can still allocate: the kernel's estimate and control group limits
    memory_bound_by: str = "free memory"  # what limits available_bytes
    gpus: tuple[Gpu, ...] = ()  # in CUDA's order
    gpus_note: str = ""  # why there are none, or fewer than installed
    torch_cuda: str | None = None  # the CUDA version that torch was built with; None: a build without CUDA
    notes: tuple[str, ...] = ()

    @property
    def usable_cores(self) -> int:
        """Number of logical CPUs that can run at the same time, by affinity, cpuset and quota (rounded down); >= 1."""
        usable = len(self.usable_cpus)
        return usable if self.quota_cores is None else max(1, min(usable, int(self.quota_cores)))

    @property
    def memory_limit(self) -> str:
        """The limit that leaves less memory than is free; "" if none does."""
        return "" if self.memory_bound_by == "free memory" else self.memory_bound_by
