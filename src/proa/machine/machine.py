"""The frozen Machine: what a process may use here. JSON in and out (msgspec). Never: probing, decisions."""

from __future__ import annotations

import msgspec


class NumaNode(msgspec.Struct, frozen=True):
    """One memory node: its CPUs and its RAM; None where the kernel does not say."""

    id: int
    cpus: tuple[int, ...]  # every online CPU of the node, also those that this process may not use
    memory_bytes: int | None = None  # 0: CPUs only
    available_bytes: int | None = None  # free now, file pages counted as free
    distances: tuple[int, ...] = ()  # to each node of Machine.numa in that order; 10 is local
    memory_allowed: bool = True  # False: a cpuset keeps this process off the node's memory


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU that this process may use. None means: the driver does not say."""

    index: int | None  # as CUDA numbers it in this process; None: simulated
    name: str
    uuid: str = ""
    bus_id: str = ""  # PCI address
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]  # CUDA's compute capability
    pcie_generation: int | None = None  # the best that GPU, slot and system do together
    pcie_width: int | None = None  # lanes, likewise
    pcie_bytes_per_s: float | None = None  # one way: by generation and width, or the rate asked of a simulated link
    memory_bytes_per_s: float | None = None  # by its data sheet: memory clock x bus width
    numa_node: int | None = None
    driver: str = ""  # version
    simulated: bool = False


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One host as this process sees it. None means: the kernel does not say; `notes` tell what is missing."""

    cpu: str  # the processor's name
    isa: tuple[str, ...] = ()  # the instruction sets that matter to matrix kernels, as /proc/cpuinfo names them
    online_cpus: int  # logical CPUs switched on in the machine
    usable_cpus: tuple[int, ...]  # ids of those that affinity and cpuset leave to this process
    claimed_cpus: tuple[int, ...] = ()  # those of usable_cpus that workers of other engines are bound to
    quota_cores: float | None = None  # CPU time per second granted by control groups
    physical_cores: int | None = None  # distinct cores among usable_cpus
    packages: int | None = None  # distinct sockets among usable_cpus
    cores: tuple[tuple[int, ...], ...] = ()  # usable_cpus grouped by physical core (SMT siblings); () if unknown
    l3: tuple[tuple[int, ...], ...] = ()  # usable_cpus grouped by the last-level cache they share; () if unknown
    l3_bytes: int | None = None  # last-level cache reachable from usable_cpus, all slices
    numa: tuple[NumaNode, ...] = ()
    total_bytes: int
    available_bytes: int  # RAM this process may still take: the kernel's estimate, cut by every control group
    memory_bound_by: str = "free memory"  # what decided available_bytes
    gpus: tuple[Gpu, ...] = ()  # in CUDA's order
    gpus_note: str = ""  # why there are none, or fewer than the machine has
    torch_cuda: str | None = None  # the CUDA version that torch was built with; None: built without
    notes: tuple[str, ...] = ()

    @property
    def usable_cores(self) -> int:
        """Logical CPUs that can really run at once: affinity, cpuset and whole cores of the quota; at least 1."""
        usable = len(self.usable_cpus)
        return usable if self.quota_cores is None else max(1, min(usable, int(self.quota_cores)))
