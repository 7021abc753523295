"""The shares of a machine's rates that kernels attain, as measured: they separate predictions from limits. Pure.
Never: rates, fixed costs of decode.

Most shares were measured for kernels alone. Those that come from whole times, or from no measurement, say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from proa.plan.plan import Plan
from proa.plan.speeds import Speed, Speeds

# Reading by decode kernels: bf16 86 to 97 % on three machines (docs/missed.md, decision 012).
RAM_SHARE = 0.9
# Formats of 8 bits and fewer reach less of that, since their codes are converted: of the whole rate fp8 65 to 79, 79 to
# 89 and 91 % (Emerald Rapids, Zen 5, Granite Rapids), int8 77 to 97, int4 63 to 94. By most bytes of a weight.
RAM_PACKED = ((0.75, 0.9), (1.5, 0.87))
# From a whole time: decode of one request, all experts in VRAM, 0.93 of the limit with fixed costs.
VRAM_SHARE = 0.9
# Copies of a prompt's experts alone: 95 to 97 % of PCIe's rate, up to 8192 tokens (docs/lab/prefill-h200.md).
PCIE_SHARE = 0.95
# While the CPU reads RAM too: 81 to 93 % (docs/lab/prefill-h200.md, 2026-11-28).
PCIE_BESIDE_SHARE = 0.88
# Prompts' products, by instruction set: bf16 84, others 78 to 84; AVX2 63 to 71 (docs/lab/cpu-zen5.md); AMX 20 to 36
# with reading (cpu-amx.md). Assumed: AVX-512 without BF16 as with it, scalar code as AVX2.
CPU_SHARES = MappingProxyType({"amx": 0.4, "avx512-bf16": 0.8, "avx512": 0.8, "avx2": 0.7, "scalar": 0.7})
# With AMX, formats of 8 bits and fewer reach less of that: each further token of an expert takes 0.79 us in bf16, 1.3
# in fp8, 1.6 in int4 (cpu-amx.md, 128 to 1024 tokens). By most bytes of a weight.
AMX_PACKED = ((0.75, 0.5), (1.5, 0.6))
# With AMX, experts take the sum of reading and multiplying (docs/lab/cpu-amx.md: 128 to 4096 tokens in bf16).
ADDS = frozenset({"amx"})
# A GPU's products: linear layers, assumed; attention, from whole times (58 and 60 % of the dense rate at 65536 tokens);
# latent attention by expanded keys, from the GPU's own time (32, 47, 52 % at 8192, 16384, 32768 tokens of DeepSeek-V3);
# the gated delta rule, which memory limits: 146 ns a row of Qwen3-Next (3.7 MFLOP), 3 % of the dense rate;
# experts by panels, 4096 tokens, bf16 354 of 761 TFLOP/s, int4 297, others 205 to 262 (docs/lab/prefill-h200.md).
GPU_SHARE, ATTENTION_SHARE, LATENTS_SHARE, RULES_SHARE, EXPERTS_SHARE = 0.7, 0.6, 0.45, 0.033, 0.4
# The host's launches of a layer op by op: 26 ms for 24 layers, of a prompt of 512 tokens (docs/lab/prefill-h200.md).
LAUNCH_S = 1.1e-3
# A pass of streamed prefill before its first copy and after its last layer: dividing, the head, sampling (4 to 6 ms on
# an H100's host, docs/lab/prefill-h200.md, 2026-11-28).
PASS_S = 4e-3


@dataclass(frozen=True)
class Reached:
    """Rates per second; None: unknown, and not counted (vram: no GPU is used). pcie_beside: while the CPU reads RAM.
    overlaps, gpu_overlaps: experts on the CPU and on the GPU take the longer of reading and multiplying, else the sum.
    launch_s: of a layer of a prompt on a GPU, by the host; pass_s: of a streamed pass, beside its layers. packed: see
    `cpu_of`; packed_reads: the same for reading RAM. reads_ahead: with read-ahead, or deferred experts, the CPU reads
    during a whole decode step; else only behind the dense part of each layer."""

    ram: float | None
    cpu: float | None
    vram: float | None
    pcie: float | None
    gpu: float | None
    gpu_attention: float | None
    gpu_latents: float | None
    gpu_rules: float | None
    gpu_experts: float | None
    pcie_beside: float | None
    overlaps: bool = True
    gpu_overlaps: bool = True
    launch_s: float = 0.0
    pass_s: float = 0.0
    packed: tuple[tuple[float, float], ...] = ()
    packed_reads: tuple[tuple[float, float], ...] = ()
    reads_ahead: bool = True

    def cpu_of(self, weight_bytes: float) -> float | None:
        """The CPU's rate with weights of so many bytes each. packed: pairs of most bytes, rising, and a share."""
        return None if self.cpu is None else packed_share(self.packed, weight_bytes) * self.cpu

    def read_share(self, weight_bytes: float) -> float:
        """The part of `ram` that experts with weights of so many bytes each are read with."""
        return packed_share(self.packed_reads, weight_bytes)


def packed_share(shares: tuple[tuple[float, float], ...], weight_bytes: float) -> float:
    """shares: pairs of most bytes of a weight, rising, and a share; above all of them it is 1."""
    return next((share for most, share in shares if weight_bytes <= most), 1.0)


def limits(speeds: Speeds) -> Reached:
    """The full rates, without losses: predictions count their limits with these."""
    gpu, pcie = _part(speeds.gpu, 1), _part(speeds.pcie, 1)
    ram, cpu, vram = _part(speeds.ram, 1), _part(speeds.cpu, 1), _part(speeds.vram, 1)
    return Reached(ram, cpu, vram, pcie, gpu, gpu, gpu, gpu, gpu, pcie_beside=pcie)


def attained(speeds: Speeds, plan: Plan) -> Reached:
    """The shares that this plan's kernels reach. Plain torch, on a CPU or as a simulated GPU, has no measured
    shares: it counts with the full rates (a note says so)."""
    if not plan.isa or (plan.gpu is not None and plan.gpu.simulated):
        return limits(speeds)
    gpu = speeds.gpu
    return Reached(
        ram=_part(speeds.ram, RAM_SHARE),
        cpu=_part(speeds.cpu, CPU_SHARES[plan.isa]),
        vram=_part(speeds.vram, VRAM_SHARE),
        pcie=_part(speeds.pcie, PCIE_SHARE),
        pcie_beside=_part(speeds.pcie, PCIE_BESIDE_SHARE),
        gpu=_part(gpu, GPU_SHARE),
        gpu_attention=_part(gpu, ATTENTION_SHARE),
        gpu_latents=_part(gpu, LATENTS_SHARE),
        gpu_rules=_part(gpu, RULES_SHARE),
        gpu_experts=_part(gpu, EXPERTS_SHARE),
        overlaps=plan.isa not in ADDS,
        gpu_overlaps=False,  # 512 tokens of Qwen3-30B-A3B: 0.41 ms a layer, of which reading is 0.31, products 0.13
        launch_s=0.0 if plan.gpu is None else LAUNCH_S,
        pass_s=PASS_S,
        packed=AMX_PACKED if plan.isa == "amx" else (),
        packed_reads=RAM_PACKED,
        reads_ahead=False,  # 14 rates of decode: what it hides is as long as what handing over costs (docs/planning.md)
    )


def _part(speed: Speed | None, share: float) -> float | None:
    return None if speed is None or speed.per_s is None else share * speed.per_s
