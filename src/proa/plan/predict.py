"""Predicts how fast a plan decodes and computes prompts: bytes and operations over the machine's rates, plus measured
fixed costs. Pure. Never: measuring, decisions.

Each figure has a limit, which memory and arithmetic units set if nothing else costs time, and a prediction, which adds
the fixed costs below. docs/planning.md has the formulas and compares them with measurements.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping

import msgspec

from proa.machine.cost.prefill import CpuExpertCost, Division, GpuCost, PrefillRates, divide
from proa.machine.rates import Rates
from proa.models.spec import Model
from proa.native.doorbell import FORESEEN_ROWS
from proa.plan.budget import ELEM_BYTES, KV_ELEM_BYTES
from proa.plan.placement import BF16_BYTES
from proa.plan.plan import Plan, step_seconds
from proa.plan.work import MoeWork, Work

LENGTHS = (512, 8192, 32768)  # contexts of decode, and lengths of prompts

# The host's part of a decode step on the CPU: 168 to 209 us on three machines (docs/lab/decode-step.md, cpu-amx.md).
# With a GPU it overlaps with the step before.
HOST_S = 180e-6
# What a layer on a GPU takes beside reading its bytes: a step of 48 layers took 2.8 ms, its bytes 1.5 ms
# (docs/lab/gpu-kernels-h200.md).
GPU_LAYER_S = 27e-6
# Push and pull of an empty job between GPU and CPU (docs/lab/hybrid-h200.md).
CROSSING_S = 6e-6

RAM, VRAM, PCIE = "RAM bandwidth", "VRAM bandwidth", "PCIe"
CPU, GPU, FIXED = "CPU FLOPs", "GPU FLOPs", "fixed costs"
# Bytes per row and value that cross PCIe: down in bfloat16, the CPU's sums up in float32.
_CROSSING_BYTES = 2 + 4


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """One predicted rate. tokens: context of decode, or length of the prompt. seconds: per decode step, or of the
    prompt. bound_by: what takes most of the time; terms: seconds by what takes them, adding up to `seconds`."""

    tokens: int
    requests: int
    tokens_per_s: float
    limit_tokens_per_s: float
    seconds: float
    bound_by: str
    terms: dict[str, float]


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """A rate of the machine, per second, and where it is from; None: unknown, and not counted."""

    per_s: float | None
    source: str


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """The rates that predictions use: bytes/s, and floating-point operations/s."""

    ram: Speed
    cpu: Speed
    vram: Speed | None = None  # None: no GPU is used
    pcie: Speed | None = None
    gpu: Speed | None = None


class Predictions(msgspec.Struct, frozen=True, kw_only=True):
    """All predictions of a plan. notes: what they do not count, and lengths that the plan does not allow."""

    decode: tuple[Prediction, ...]
    prefill: tuple[Prediction, ...]
    speeds: Speeds
    notes: tuple[str, ...] = ()


def predict(plan: Plan, work: Work, rates: Rates) -> Predictions:
    """Predict decode of one and of --max-running requests, and prompts, for each of LENGTHS that fits."""
    speeds = speeds_of(plan, rates)
    fitting = [length for length in LENGTHS if length <= plan.context_tokens]
    together = [
        length
        for length in fitting
        if plan.max_running > 1 and plan.max_running * length <= plan.num_pages * plan.page_tokens
    ]
    one = [decode(plan, work, speeds, length) for length in fitting]
    many = [decode(plan, work, speeds, length, plan.max_running) for length in together]
    return Predictions(
        decode=(*one, *many),
        prefill=tuple(prefill(plan, work, speeds, length) for length in _prompts(plan, speeds, fitting)),
        speeds=speeds,
        notes=tuple(_notes(plan, speeds)),
    )


def speeds_of(plan: Plan, rates: Rates) -> Speeds:
    """The rates of the plan's devices: measured ones, else those of the data sheet."""
    ram = Speed(per_s=rates.ram.bytes_per_s, source="measured: " + rates.ram.source)
    cpu = Speed(per_s=rates.cpu_flops_per_s, source="measured on registers, all workers")
    gpu = plan.gpu
    if gpu is None:
        return Speeds(ram=ram, cpu=cpu)
    sheet = plan.roof.vram[0][0]
    found = rates.of_gpu(gpu.index)
    if found is not None:
        return Speeds(
            ram=ram,
            cpu=cpu,
            vram=Speed(per_s=found.vram_bytes_per_s, source="measured"),
            pcie=Speed(per_s=found.pcie_bytes_per_s, source="measured"),
            gpu=Speed(per_s=found.flops_per_s, source="measured, a bfloat16 product"),
        )
    link = "as asked" if gpu.simulated else "by its data sheet"
    return Speeds(
        ram=ram,
        cpu=cpu,
        vram=Speed(per_s=sheet.bandwidth_bytes_per_s, source=sheet.source),
        pcie=Speed(per_s=gpu.pcie_bytes_per_s, source=link if gpu.pcie_bytes_per_s else "unknown"),
        gpu=cpu if gpu.simulated else Speed(per_s=None, source="not measured"),
    )


def decode(plan: Plan, work: Work, speeds: Speeds, context_tokens: int, requests: int = 1) -> Prediction:
    """Predict a decode step of `requests` at a context of `context_tokens` each. Its limit for one request at 256
    tokens is the roof of the start-up report, with these rates and sliding windows counted."""
    past_bytes = requests * _past_bytes(plan, work.spec, context_tokens)
    ram_s = sum(n * layer.ram_bytes(requests) for layer, n in work.moe.items()) / _per_s(speeds.ram)
    dense_bytes = work.dense_bytes + work.head_bytes + past_bytes
    if plan.gpu is None or speeds.vram is None:
        terms = {RAM: ram_s + dense_bytes / _per_s(speeds.ram)}
    else:
        vram = _per_s(speeds.vram)
        resident_s = sum(n * layer.vram_bytes(requests) for layer, n in work.moe.items()) / vram
        ahead = plan.gpu.read_ahead and requests <= FORESEEN_ROWS
        terms = _overlapped(dense_bytes / vram, resident_s, ram_s, read_ahead=ahead)
    return _prediction(terms, {FIXED: _fixed_s(plan, work)}, context_tokens, requests, requests)


def _overlapped(dense_s: float, resident_s: float, ram_s: float, *, read_ahead: bool) -> dict[str, float]:
    """step_seconds by what takes them: only the longer of two that overlap counts."""
    total_s = step_seconds(dense_s, resident_s, ram_s, read_ahead=read_ahead)
    if ram_s <= (dense_s if read_ahead else 0) + resident_s:
        return {VRAM: total_s}
    return {VRAM: 0.0 if read_ahead else dense_s, RAM: ram_s}


def prefill(plan: Plan, work: Work, speeds: Speeds, prompt_tokens: int) -> Prediction:
    """Predict the steps of one prompt, alone on the machine and without a cached prefix. Each step reads its weights
    once; experts in VRAM run beside those of the CPU. Where prompts are streamed, each pass copies its experts once."""
    terms: defaultdict[str, float] = defaultdict(float)
    steps = list(_steps(prompt_tokens, plan.max_batch_tokens))
    if plan.pass_tokens and speeds.pcie is not None and speeds.pcie.per_s:
        passes = _steps(prompt_tokens, plan.pass_tokens)
        found = itertools.chain(*(_pass_terms(plan, work, speeds, first, rows) for first, rows in passes))
    else:
        found = itertools.chain(*(_step_terms(plan, work, speeds, first, rows) for first, rows in steps))
    for name, seconds in found:
        terms[name] += seconds
    on = speeds.ram if speeds.vram is None else speeds.vram
    terms[RAM if speeds.vram is None else VRAM] += work.head_bytes / _per_s(on)  # logits of the last token only
    fixed = {FIXED: len(steps) * _fixed_s(plan, work)}
    return _prediction(terms, fixed, prompt_tokens, 1, prompt_tokens)


def _steps(tokens: int, most: int) -> Iterator[tuple[int, int]]:
    """(first token, rows) of each step of a prompt."""
    return ((first, min(most, tokens - first)) for first in range(0, tokens, most))


def _pass_terms(plan: Plan, work: Work, speeds: Speeds, first: int, rows: int) -> Iterator[tuple[str, float]]:
    """Seconds of one pass of streamed prefill: of its copies, or of what is computed meanwhile, if that is longer."""
    chunks = list(_steps(rows, plan.max_batch_tokens))
    computed = [_dense_term(plan, work, speeds, first + at, count) for at, count in chunks]
    copies_s = 0.0
    for layer, count in work.moe.items():
        if layer.in_ram:
            division = _division(plan, layer, speeds, rows, len(chunks))
            copies_s += count * division.copies_s
            name, _ = _longer((RAM, _seconds(layer.ram_bytes(rows), speeds.ram)),
                              (CPU, _seconds(layer.ram_flops(rows), speeds.cpu)))  # fmt: skip
            computed.append((name if division.cpu_s else GPU, count * division.computed_s))
        else:
            computed.append((GPU, count * _seconds(layer.vram_flops(rows), speeds.gpu)))
    computed_s = sum(seconds for _, seconds in computed)
    yield from [(PCIE, copies_s)] if copies_s > computed_s else computed


def _division(plan: Plan, layer: MoeWork, speeds: Speeds, tokens: int, chunks: int) -> Division:
    """The division of a layer's experts in RAM, as in service, by these speeds. The CPU's fit of two costs is the
    longer of both here."""
    gpu, nbytes = plan.gpu, layer.expert_bytes
    if gpu is None or speeds.pcie is None:
        raise ValueError("only prompts of a plan with a GPU are streamed")
    per_pair_s = _seconds(layer.expert_flops, speeds.cpu)
    pairs = tokens * layer.top_k / layer.experts / chunks
    expert_s = max(0.0, _seconds(nbytes, speeds.ram) - per_pair_s * pairs)
    experts_s = _seconds(layer.vram_flops(tokens), speeds.gpu) / chunks
    bits = {(-(-tokens // chunks)).bit_length(): GpuCost(0.0, experts_s)}
    rates = PrefillRates(_per_s(speeds.pcie), CpuExpertCost(expert_s, per_pair_s), bits)
    if gpu.prefill == "stream":
        return Division(layer.in_ram, layer.in_ram * nbytes / rates.copy_bytes_per_s, 0.0, chunks * experts_s)
    chosen = layer.top_k * layer.in_ram / layer.experts
    return divide(layer.in_ram, nbytes, tokens, chosen, rates, jobs=chunks)


def _dense_term(plan: Plan, work: Work, speeds: Speeds, first: int, rows: int) -> tuple[str, float]:
    """Seconds of a step for all but routed experts."""
    pair_flops = sum(mixer.pair_flops * mixer.seen(first + rows / 2) for mixer in work.spec.mixers)
    flops = rows * (work.dense_flops + pair_flops)
    nbytes = work.dense_bytes + _past_bytes(plan, work.spec, first)
    if speeds.vram is None:
        return _longer((RAM, _seconds(nbytes, speeds.ram)), (CPU, _seconds(flops, speeds.cpu)))
    return _longer((VRAM, _seconds(nbytes, speeds.vram)), (GPU, _seconds(flops, speeds.gpu)))


def _step_terms(plan: Plan, work: Work, speeds: Speeds, first: int, rows: int) -> Iterator[tuple[str, float]]:
    """Seconds of one step by what takes them, part after part."""
    spec = work.spec
    yield _dense_term(plan, work, speeds, first, rows)
    for layer, count in work.moe.items():
        in_ram = [_longer((RAM, _seconds(layer.ram_bytes(rows), speeds.ram)),
                          (CPU, _seconds(layer.ram_flops(rows), speeds.cpu)))]  # fmt: skip
        in_vram: tuple[str, float] = (VRAM, 0.0)
        if speeds.vram is not None:
            in_vram = _longer((VRAM, _seconds(layer.vram_bytes(rows), speeds.vram)),
                              (GPU, _seconds(layer.vram_flops(rows), speeds.gpu)))  # fmt: skip
            if layer.in_ram:
                in_ram.append((PCIE, _seconds(rows * spec.hidden * _CROSSING_BYTES, speeds.pcie)))
        for name, seconds in in_ram if sum(s for _, s in in_ram) > in_vram[1] else [in_vram]:
            yield name, count * seconds


def _longer(*terms: tuple[str, float]) -> tuple[str, float]:
    return max(terms, key=lambda term: term[1])


def _seconds(amount: float, speed: Speed | None) -> float:
    """0 for an unknown rate: the prediction then says so in a note."""
    return 0.0 if speed is None or speed.per_s is None else amount / speed.per_s


def _per_s(speed: Speed) -> float:
    """Raises ValueError for an unknown rate; bandwidths of memory are always known."""
    if speed.per_s is None:
        raise ValueError("the bandwidth of a memory is unknown")
    return speed.per_s


def _past_bytes(plan: Plan, spec: Model, context_tokens: float) -> float:
    """Bytes of one sequence's past that a step moves: KV that its windows see is read, states are read and written."""
    kv_bytes = KV_ELEM_BYTES[plan.kv_dtype] * sum(
        cache.elems_per_token * mixer.seen(context_tokens) for mixer in spec.mixers for cache in mixer.caches
    )
    elem_bytes = ELEM_BYTES[plan.dtype] if plan.gpu is None else BF16_BYTES
    return kv_bytes + 2 * spec.state_bytes_per_sequence(elem_bytes)


def _fixed_s(plan: Plan, work: Work) -> float:
    """Fixed costs of a step: the host's part on a CPU or a simulated GPU, else those of the GPU's layers."""
    if plan.gpu is None or plan.gpu.simulated:
        return HOST_S
    crossings = sum(count for layer, count in work.moe.items() if layer.in_ram)
    return len(work.spec.blocks) * GPU_LAYER_S + crossings * CROSSING_S


def _prediction(
    terms: Mapping[str, float], fixed: Mapping[str, float], length: int, requests: int, made: int
) -> Prediction:
    """made: tokens that the seconds give."""
    limit_s = sum(terms.values())
    all_terms = {name: seconds for name, seconds in {**terms, **fixed}.items() if seconds > 0}
    return Prediction(
        tokens=length,
        requests=requests,
        tokens_per_s=made / sum(all_terms.values()),
        limit_tokens_per_s=made / limit_s,
        seconds=sum(all_terms.values()),
        bound_by=max(all_terms, key=all_terms.__getitem__),
        terms=all_terms,
    )


def _prompts(plan: Plan, speeds: Speeds, fitting: list[int]) -> list[int]:
    """Lengths of prompts whose time can be predicted, with room for one token of the answer; none if the only device
    that computes has no known rate."""
    unknown = plan.gpu is not None and plan.gpu.gpu_only and speeds.gpu is not None and speeds.gpu.per_s is None
    return [] if unknown else [min(length, plan.context_tokens - 1) for length in fitting]


def _notes(plan: Plan, speeds: Speeds) -> Iterator[str]:
    if longer := [length for length in LENGTHS if length > plan.context_tokens]:
        lengths = ", ".join(map(str, longer))
        yield f"nothing is predicted at {lengths} tokens: the context has {plan.context_tokens}"
    if speeds.gpu is not None and speeds.gpu.per_s is None:
        how = "`proa doctor --json` measures it: plan with its file and --machine"
        if plan.gpu is not None and plan.gpu.gpu_only:
            yield f"prompts are not predicted, as the GPU's FLOPs are unknown; {how}"
        else:
            yield f"of prompts the GPU's FLOPs are not counted, as they are unknown; {how}"
    if speeds.pcie is not None and speeds.pcie.per_s is None and plan.gpu is not None and not plan.gpu.gpu_only:
        yield "the time that rows take over PCIe is not counted: its rate is unknown"
    if plan.gpu is not None and plan.gpu.simulated:
        yield "a simulated GPU computes in plain torch, which is far slower than these limits"
    if plan.dtype != "bfloat16":
        yield f"{plan.dtype} is computed in plain torch, which is far slower than these limits"
    if plan.gpu is not None and not plan.gpu.gpu_only and any(plan.gpu.resident):
        yield "every expert counts as equally likely; experts that move into VRAM make decode faster"
