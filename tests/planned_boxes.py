"""Plans from a config alone for a machine that is given by its rates, and their predictions. Never: tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from families.hub_texts import CONFIGS
from proa.config.options import EngineOptions, ModelOptions
from proa.machine.machine import Gpu, Machine
from proa.machine.machine_file import Kernels
from proa.machine.rates import GpuRate, Rates
from proa.plan.headers import open_headers
from proa.plan.prepare import Prepared, prepare
from proa.plan.work import Work, planned_work
from quick_plan import ram_of

GB, TB = 1e9, 1e12
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
INT4_EXPERTS = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "config_groups": {
        "experts": {
            "targets": [r"re:.*\.experts\..*"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        },
        "dense": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
    },
}


@dataclass(frozen=True)
class Box:
    """A machine with one GPU, by effective rates."""

    vram: float
    ram: float
    pcie: float = 50 * GB
    cpu_flops: float = 15e12
    gpu_flops: float = 200e12
    vram_gib: int = 140

    @property
    def machine(self) -> Machine:
        card = Gpu(
            index=0, name="Card", total_bytes=self.vram_gib << 30, free_bytes=self.vram_gib << 30, capability=(9, 0),
            memory_bytes_per_s=self.vram, pcie_bytes_per_s=self.pcie,
        )  # fmt: skip
        return msgspec.structs.replace(bare(4 << 40), gpus=(card,), torch_cuda="12.8")

    @property
    def rates(self) -> Rates:
        card = GpuRate(index=0, vram_bytes_per_s=self.vram, pcie_bytes_per_s=self.pcie, flops_per_s=self.gpu_flops)
        return Rates(ram=ram_of(self.ram), cpu_flops_per_s=self.cpu_flops, gpus=(card,))


def bare(ram_bytes: int, cores: int = 16) -> Machine:
    """A machine without a GPU."""
    cpus = tuple(range(cores))
    return Machine(
        cpu="Test", online_cpus=cores, usable_cpus=cpus, physical_cores=cores, total_bytes=ram_bytes,
        available_bytes=ram_bytes,
    )  # fmt: skip


# Bytes per routed weight and per other weight. Int4: groups of 32 with bfloat16 scales.
FORMATS: dict[str, tuple[dict[str, Any] | None, float, float]] = {
    "bf16": (None, 2, 2), "fp8": (FP8, 1, 1), "int4": (INT4_EXPERTS, 0.5625, 1),
}  # fmt: skip


def planned(
    folder: Path, config: dict[str, Any], machine: Machine, asked: EngineOptions, ram: float = 40 * GB,
    isa: str = "avx512",
) -> Prepared:  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    opened = open_headers(str(folder), asked.model)
    return prepare(
        str(folder), asked, measure=lambda *_: ram_of(ram), opened=opened, machine=machine, kernels=Kernels(isa)
    )


def work_for(prepared: Prepared) -> Work:
    return planned_work(prepared.plan, ModelOptions(), prepared.declared, prepared.checkpoint)


def published(name: str, quantised: dict[str, Any] | None) -> dict[str, Any]:
    config = {key: value for key, value in CONFIGS[name].items() if key != "quantization_config"}
    config["torch_dtype"] = "bfloat16"
    return config if quantised is None else config | {"quantization_config": quantised}
