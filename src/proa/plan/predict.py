"""Predicts how fast a plan decodes and computes prompts: bytes and operations over the machine's rates. Pure. Never:
measuring, decisions.

Each figure has a limit, which memory and arithmetic units set if nothing else costs time, and a prediction, by what
kernels reach of these rates (attained.py) and with fixed costs. docs/planning.md has the formulas and compares them
with measurements.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import msgspec

from proa.machine.cost.prefill import CpuExpertCost, Division, GpuCost, PrefillRates, divide
from proa.machine.rates import Rates
from proa.models.mixers import Mixer
from proa.models.spec import Model
from proa.native.doorbell import FORESEEN_ROWS
from proa.ops.sizes import PROMPT_ROWS, bank_bytes, ring_groups
from proa.plan.attained import Reached, attained, limits
from proa.plan.budget import ELEM_BYTES, KV_ELEM_BYTES
from proa.plan.fixed_costs import CROSSING_S, GPU_LAYER_S, HOST_S
from proa.plan.kernels import has_latents, prompt_share
from proa.plan.pass_time import PassLayer, pass_seconds
from proa.plan.placement import BF16_BYTES
from proa.plan.plan import Plan, step_seconds
from proa.plan.speeds import Speed, Speeds
from proa.plan.work import MoeWork, Work

LENGTHS = (512, 8192, 32768)  # contexts of decode, and lengths of prompts

RAM, VRAM, PCIE = "RAM bandwidth", "VRAM bandwidth", "PCIe"
CPU, GPU, FIXED = "CPU FLOPs", "GPU FLOPs", "fixed costs"
_LEAST_RAM = 0.2  # of RAM's bandwidth, which copies leave to the CPU
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
    limit, terms = (
        _decode_terms(plan, work, rates, context_tokens, requests) for rates in (limits(speeds), attained(speeds, plan))
    )
    return _prediction(limit, terms, {FIXED: _fixed_s(plan, work)}, context_tokens, requests, requests)


def _decode_terms(plan: Plan, work: Work, rates: Reached, context_tokens: int, requests: int) -> dict[str, float]:
    past_bytes = requests * _past_bytes(plan, work.spec, context_tokens)
    ram_s = sum(n * _read_s(layer, rates, requests) for layer, n in work.moe.items())
    dense_bytes = work.dense_bytes + work.head_bytes + past_bytes
    if plan.gpu is None or rates.vram is None:
        return {RAM: ram_s + dense_bytes / _known(rates.ram)}
    resident_s = sum(n * layer.vram_bytes(requests) for layer, n in work.moe.items()) / rates.vram
    ahead = rates.reads_ahead and (plan.gpu.deferred > 0 or (plan.gpu.read_ahead and requests <= FORESEEN_ROWS))
    return _overlapped(dense_bytes / rates.vram, resident_s, ram_s, read_ahead=ahead)


def _overlapped(dense_s: float, resident_s: float, ram_s: float, *, read_ahead: bool) -> dict[str, float]:
    """step_seconds by what takes them: only the longer of two that overlap counts."""
    total_s = step_seconds(dense_s, resident_s, ram_s, read_ahead=read_ahead)
    if ram_s <= (dense_s if read_ahead else 0) + resident_s:
        return {VRAM: total_s}
    return {VRAM: 0.0 if read_ahead else dense_s, RAM: ram_s}


def prefill(plan: Plan, work: Work, speeds: Speeds, prompt_tokens: int, cached_tokens: int = 0) -> Prediction:
    """Predict the steps of one prompt, alone on the machine, behind a prefix of `cached_tokens` in the prefix cache,
    which do not count as the prompt's. Each step reads its weights once; experts in VRAM run beside those of the CPU.
    Where prompts are streamed, each pass copies its experts once."""
    limit, terms = (
        _prompt_terms(plan, work, rates, prompt_tokens, cached_tokens)
        for rates in (limits(speeds), attained(speeds, plan))
    )
    steps = len(list(_steps(prompt_tokens, _chunk_tokens(plan))))
    return _prediction(limit, terms, {FIXED: steps * _fixed_s(plan, work)}, prompt_tokens, 1, prompt_tokens)


def _prompt_terms(
    plan: Plan, work: Work, rates: Reached, prompt_tokens: int, cached_tokens: int
) -> dict[str, float]:  # fmt: skip
    terms: defaultdict[str, float] = defaultdict(float)
    streamed = _streamed_tokens(plan, prompt_tokens) if rates.pcie else 0
    passes = _steps(streamed, plan.pass_tokens or 1)
    steps = ((streamed + at, rows) for at, rows in _steps(prompt_tokens - streamed, _chunk_tokens(plan)))
    found = itertools.chain(
        *(_pass_terms(plan, work, rates, cached_tokens + at, rows) for at, rows in passes),
        *(_step_terms(plan, work, rates, cached_tokens + at, rows) for at, rows in steps),
    )
    for name, seconds in found:
        terms[name] += seconds
    on = _known(rates.ram if rates.vram is None else rates.vram)
    terms[RAM if rates.vram is None else VRAM] += work.head_bytes / on  # logits of the last token only
    return terms


def _streamed_tokens(plan: Plan, tokens: int) -> int:
    """How many of a prompt's tokens are computed in passes of streamed prefill: the first ones."""
    if not plan.pass_tokens or plan.cells is None:
        return tokens if plan.pass_tokens else 0
    return plan.cells.streamed_tokens(0, tokens, tokens, whole=False)[0]


def _chunk_tokens(plan: Plan) -> int:
    """Most tokens of a prompt that are computed at once."""
    return plan.max_batch_tokens if plan.cells is None else plan.cells.tokens


def _steps(tokens: int, most: int) -> Iterator[tuple[int, int]]:
    """(first token, rows) of each step of a prompt."""
    return ((first, min(most, tokens - first)) for first in range(0, tokens, most))


def _pass_terms(plan: Plan, work: Work, rates: Reached, first: int, rows: int) -> Iterator[tuple[str, float]]:
    """Seconds of one pass of streamed prefill: of its copies, with what waits for them, or of all that is computed, if
    that is longer, with the waits for copies."""
    chunks = list(_steps(rows, _chunk_tokens(plan)))
    times = (_block_times(plan, work, rates, first + at, count) for at, count in chunks)
    blocks = [sum(map(max, of)) for of in zip(*times, strict=True)]  # of all chunks
    in_graphs = plan.gpu is not None and plan.gpu.block_graphs and rows <= PROMPT_ROWS[-1]
    launch_s = 0.0 if in_graphs else len(chunks) * rates.launch_s
    experts = {layer: _experts_time(plan, layer, rates, rows, len(chunks)) for layer in work.moe}
    layers = [
        replace(experts[work.experts[i]], own_s=max(own_s, launch_s)) if i in work.experts
        else PassLayer(max(own_s, launch_s))
        for i, own_s in enumerate(blocks)
    ]  # fmt: skip
    computed = [(GPU, sum(blocks)), (FIXED, sum(layer.own_s for layer in layers) - sum(blocks))]
    for layer, count in work.moe.items():
        name, _ = _longer(*_cpu_terms(layer, rates, rows))
        computed.append(_longer((name, count * experts[layer].cpu_s), (GPU, count * experts[layer].experts_s)))
    copies_s, computed_s = sum(layer.copies_s for layer in layers), sum(seconds for _, seconds in computed)
    took_s = pass_seconds(layers)
    yield FIXED, rates.pass_s
    yield from [(PCIE, took_s)] if copies_s > computed_s else [*computed, (PCIE, took_s - computed_s)]


def _experts_time(plan: Plan, layer: MoeWork, rates: Reached, tokens: int, chunks: int) -> PassLayer:
    """The time of a layer's experts, which are divided as in service, by these rates. The GPU computes all experts that
    the CPU does not."""
    gpu = plan.gpu
    if gpu is None:
        raise ValueError("only prompts of a plan with a GPU are streamed")
    all_s = _seconds(tokens * layer.top_k * layer.expert_flops, rates.gpu_experts)
    if not layer.in_ram:
        return PassLayer(0.0, experts_s=all_s)
    whole = gpu.prefill == "stream" or plan.deterministic
    division = _division(layer, rates, tokens, chunks, all_s, whole=whole)
    groups = ring_groups(division.streamed, layer.expert_bytes, bank_bytes(gpu.ring_bytes))
    gpu_s = all_s * (1 - (layer.in_ram - division.streamed) / layer.experts)
    return PassLayer(0.0, division.copies_s, groups, gpu_s, division.cpu_s)


def _division(
    layer: MoeWork, rates: Reached, tokens: int, chunks: int, all_s: float, *, whole: bool
) -> Division:  # fmt: skip
    """The division of a layer's experts in RAM. Copies take their part of RAM's bandwidth from the CPU. all_s: of all
    experts on the GPU. whole: all are copied."""
    nbytes, copied_per_s, alone_per_s = layer.expert_bytes, _known(rates.pcie_beside), _known(rates.pcie)
    if whole:
        return Division(layer.in_ram, layer.in_ram * nbytes / alone_per_s, 0.0)
    pair_s = _seconds(layer.expert_flops, rates.cpu_of(layer.weight_bytes))
    # Where reading and multiplying overlap, an expert costs the longer of both.
    read_share = rates.read_share(layer.weight_bytes)
    overlapped_s = pair_s * tokens * layer.top_k / layer.experts / chunks if rates.overlaps else 0.0

    def divided(ram_per_s: float) -> Division:
        cost = CpuExpertCost(max(0.0, nbytes / (read_share * ram_per_s) - overlapped_s), pair_s)
        known = PrefillRates(copied_per_s, cost, {(-(-tokens // chunks)).bit_length(): GpuCost(0.0, all_s / chunks)})
        chosen = layer.top_k * layer.in_ram / layer.experts
        return divide(layer.in_ram, nbytes, tokens, chosen, known, jobs=chunks)

    ram = _known(rates.ram)
    found = divided(ram)
    if found.streamed:
        found = divided(max(ram - copied_per_s, _LEAST_RAM * ram))
    if found.streamed == layer.in_ram:
        found = replace(found, copies_s=found.streamed * nbytes / alone_per_s)
    return found


def _dense_term(plan: Plan, work: Work, rates: Reached, first: int, rows: int) -> tuple[str, float]:
    """Seconds of a step for all but routed experts."""
    reads, computes = zip(*_block_times(plan, work, rates, first, rows), strict=True)
    on_cpu = rates.vram is None
    return _longer((RAM if on_cpu else VRAM, sum(reads)), (CPU if on_cpu else GPU, sum(computes)))


def _block_times(plan: Plan, work: Work, rates: Reached, first: int, rows: int) -> Iterator[tuple[float, float]]:
    """Seconds of reading and of computing in each block of a step, for all but routed experts. Blocks count as equally
    large to read: prompts are seldom limited by that."""
    nbytes = (work.dense_bytes + _past_bytes(plan, work.spec, first)) / len(work.spec.blocks)
    reads_s = _seconds(nbytes, rates.ram if rates.vram is None else rates.vram)
    for block, flops in zip(work.spec.blocks, work.block_flops, strict=True):
        past_flops = rows * _past_flops(plan, block.mixer, first, rows) if block.mixer else 0.0
        rule_flops = rows * block.mixer.row_flops if block.mixer else 0
        if rates.vram is None:
            yield reads_s, _seconds(rows * flops + past_flops + rule_flops, rates.cpu)
            continue
        at = rates.gpu_latents if block.mixer and has_latents(block.mixer) else rates.gpu_attention
        computed_s = _seconds(rows * flops, rates.gpu) + _seconds(rule_flops, rates.gpu_rules)
        yield reads_s, computed_s + _seconds(past_flops, at)


def _past_flops(plan: Plan, mixer: Mixer, first: int, rows: int) -> float:
    """Operations of one row of a prompt for queries, keys and weighted values."""
    # Plain torch computes all; so do prompts with --deterministic.
    fewer = plan.gpu is not None and not plan.gpu.simulated and not plan.deterministic
    share = prompt_share(mixer, rows, first) if fewer else 1.0
    return share * mixer.pair_flops * mixer.seen(first + rows / 2)


def _launch_term(work: Work, rates: Reached, computed_s: float) -> tuple[str, float]:
    """Seconds by which the host's launches of a step, op by op, take longer than what the GPU computes meanwhile."""
    return FIXED, max(0.0, len(work.spec.blocks) * rates.launch_s - computed_s)


def _cpu_terms(layer: MoeWork, rates: Reached, rows: int) -> list[tuple[str, float]]:
    """Seconds of the CPU's experts of a layer in one step."""
    reads = RAM, _read_s(layer, rates, rows)
    computes = CPU, _seconds(layer.ram_flops(rows), rates.cpu_of(layer.weight_bytes))
    return [_longer(reads, computes)] if rates.overlaps else [reads, computes]


def _read_s(layer: MoeWork, rates: Reached, rows: int) -> float:
    """Seconds of the CPU's reading of its experts that so many rows choose."""
    return layer.ram_bytes(rows) / (rates.read_share(layer.weight_bytes) * _known(rates.ram))


def _step_terms(plan: Plan, work: Work, rates: Reached, first: int, rows: int) -> Iterator[tuple[str, float]]:
    """Seconds of one step by what takes them, part after part."""
    dense = _dense_term(plan, work, rates, first, rows)
    terms = [dense]
    for layer, count in work.moe.items():
        in_ram = _cpu_terms(layer, rates, rows)
        in_vram: tuple[str, float] = (VRAM, 0.0)
        if rates.vram is not None:
            reads_s = _seconds(layer.vram_bytes(rows), rates.vram)
            products_s = _seconds(layer.vram_flops(rows), rates.gpu_experts)
            both_s = max(reads_s, products_s) if rates.gpu_overlaps else reads_s + products_s
            in_vram = VRAM if reads_s > products_s else GPU, both_s
            if layer.in_ram:
                in_ram.append((PCIE, _seconds(rows * work.spec.hidden * _CROSSING_BYTES, rates.pcie)))
        for name, seconds in in_ram if sum(s for _, s in in_ram) > in_vram[1] else [in_vram]:
            terms.append((name, count * seconds))
    yield from terms
    if plan.gpu is not None and plan.gpu.prompt_graphs and first == 0 and rows <= PROMPT_ROWS[-1]:
        yield FIXED, len(work.spec.blocks) * GPU_LAYER_S  # launched at once, as a decode step
        return
    # The CPU's experts wait for the launches before them, the GPU's do not.
    gpu_only = plan.gpu is not None and plan.gpu.gpu_only
    yield _launch_term(work, rates, sum(seconds for _, seconds in terms) if gpu_only else dense[1])


def _longer(*terms: tuple[str, float]) -> tuple[str, float]:
    return max(terms, key=lambda term: term[1])


def _seconds(amount: float, per_s: float | None) -> float:
    """0 for an unknown rate: the prediction then says so in a note."""
    return 0.0 if per_s is None else amount / per_s


def _known(per_s: float | None) -> float:
    """Raises ValueError for an unknown rate: that of a memory is always known, that of PCIe for streamed prompts."""
    if per_s is None:
        raise ValueError("the bandwidth of a memory or of PCIe is unknown")
    return per_s


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
    limit: Mapping[str, float], terms: Mapping[str, float], fixed: Mapping[str, float], length: int, requests: int,
    made: int,
) -> Prediction:  # fmt: skip
    """limit: seconds by the limits of the machine; terms, fixed: as predicted. made: tokens that the seconds give."""
    limit_s = sum(limit.values())
    names = dict.fromkeys((*terms, *fixed))
    summed = {name: terms.get(name, 0.0) + fixed.get(name, 0.0) for name in names}
    all_terms = {name: seconds for name, seconds in summed.items() if seconds > 0}
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
