"""A fake NVML with scripted GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from proa.machine.gpus import Nvml

GIB = 1 << 30


class FakeError(Exception):
    pass


@dataclass(frozen=True)
class Card:
    """A GPU as the driver describes it; `refused`: queries that raise "Not Supported"."""

    name: str = "NVIDIA H200"
    uuid: str = "GPU-aaaa"
    total_gib: int = 140
    free_gib: int = 139
    capability: tuple[int, int] = (9, 0)
    link: tuple[int, int] = (5, 16)
    memory: tuple[int, int] = (3201, 6144)  # MHz, bits
    bus: tuple[int, int, int] = (0, 0x17, 0)
    mig: bool = False
    refused: tuple[str, ...] = ()


@dataclass
class FakeNvml(Nvml):
    cards: tuple[Card, ...] = ()
    broken: str = ""
    calls: list[str] = field(default_factory=list)
    NVMLError = FakeError
    NVML_CLOCK_MEM = 2

    def _ask(self, question: str, card: Card | None = None) -> None:
        self.calls.append(question)
        if card is not None and question in card.refused:
            raise FakeError("Not Supported")

    def nvmlInit(self) -> None:  # noqa: N802
        self._ask("init")
        if self.broken:
            raise FakeError(self.broken)

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._ask("shutdown")

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "570.1"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> Card:  # noqa: N802
        return self.cards[index]

    def nvmlDeviceGetName(self, handle: Card, /) -> str:  # noqa: N802
        return handle.name

    def nvmlDeviceGetUUID(self, handle: Card, /) -> str:  # noqa: N802
        return handle.uuid

    def nvmlDeviceGetMemoryInfo(self, handle: Card, /) -> Any:  # noqa: N802
        self._ask("memory", handle)
        return SimpleNamespace(total=handle.total_gib * GIB, free=handle.free_gib * GIB)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Card, /) -> tuple[int, int]:  # noqa: N802
        return handle.capability

    def nvmlDeviceGetMigMode(self, handle: Card, /) -> list[int]:  # noqa: N802
        self._ask("mig", handle)
        return [int(handle.mig)] * 2

    def nvmlDeviceGetPciInfo(self, handle: Card, /) -> Any:  # noqa: N802
        domain, bus, device = handle.bus
        return SimpleNamespace(domain=domain, bus=bus, device=device)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Card, /) -> int:  # noqa: N802
        self._ask("link", handle)
        return handle.link[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Card, /) -> int:  # noqa: N802
        self._ask("link", handle)
        return handle.link[1]

    def nvmlDeviceGetMaxClockInfo(self, handle: Card, kind: int, /) -> int:  # noqa: N802
        assert kind == self.NVML_CLOCK_MEM
        self._ask("clock", handle)
        return handle.memory[0]

    def nvmlDeviceGetMemoryBusWidth(self, handle: Card, /) -> int:  # noqa: N802
        self._ask("clock", handle)
        return handle.memory[1]
