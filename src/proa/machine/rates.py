"""The results of measuring a machine: RAM bandwidth (native/ram.py measures), products of the CPU, rates of GPUs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from proa.machine.load import Load

Rate = Annotated[float, msgspec.Meta(gt=0)]

HIGH_CLOCKS_S = 0.1  # of large products from idle; an H100 then goes from 1980 to 1720-1820 MHz at its 700 W


class RamRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """RAM read bandwidth: the maximum of several short measurements, because other programs can only lower it."""

    bytes_per_s: Rate
    threads: int  # the fastest of the thread counts tried
    pages: tuple[str, ...]  # page types of the memory: see ArenaInfo
    load: Load  # of other programs during the measurement

    @property
    def source(self) -> str:
        """Describe how it was measured, and if other programs disturbed the measurement."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        pages = "small pages (huge pages were not available)" if "small" in self.pages else "huge pages"
        if self.load.busy:
            disturbed = f"the machine is busy: {self.load}, so RAM may be faster than measured"
            return f"{disturbed}; read by {threads} from {pages}"
        return f"read by {threads} from {pages}" + ("" if self.load.others is not None else f"; {self.load}")


class GpuRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measured rates of one GPU."""

    index: int  # of the GPU in Machine.gpus
    vram_bytes_per_s: Rate
    pcie_bytes_per_s: Rate  # from pinned RAM to VRAM
    flops_per_s: Rate  # of a large matrix product in bfloat16
    sustained_flops_per_s: Rate | None = None  # of such products for a second: its power limit lowers a GPU's clocks

    def flops_per_s_for(self, flops: float) -> float:
        """The rate of so many operations in one go: the sustained one, if they take longer than clocks stay high."""
        if self.sustained_flops_per_s is None or flops <= HIGH_CLOCKS_S * self.flops_per_s:
            return self.flops_per_s
        return self.sustained_flops_per_s


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measured rates of a machine; a GPU without an entry was not measured."""

    ram: RamRate
    cpu_flops_per_s: Rate  # peak of the unit that the native kernels multiply with, on all workers
    gpus: tuple[GpuRate, ...] = ()

    def of_gpu(self, index: int | None) -> GpuRate | None:
        return next((rate for rate in self.gpus if rate.index == index), None)
