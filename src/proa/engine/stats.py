"""Counters of the engine, sent to the frontend with every step. Never: logic. All but the gauges of the scheduler only
grow."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from proa.native.doorbell import Counters


@dataclass
class SchedulerTotals:
    """Counters of a scheduler; see SchedulerStats."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


class SchedulerStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges up to `state_copies`, then counters."""

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0  # with those that are lent to experts
    pages_cached: int = 0  # held only by the prefix cache, evictable at once
    state_copies: int = 0  # cached copies of recurrent states
    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


class StepSeconds(msgspec.Struct, frozen=True, array_like=True):
    """Time of all steps by the stages of engine/executors/clock.py, in their order. Idle time is not counted."""

    schedule: float = 0.0
    inputs: float = 0.0
    program: float = 0.0
    sample: float = 0.0
    publish: float = 0.0  # up to the step before

    @property
    def host(self) -> float:
        """All but the model's time."""
        return self.schedule + self.inputs + self.sample + self.publish

    @property
    def total(self) -> float:
        return self.host + self.program


class CpuExpertStats(msgspec.Struct, frozen=True, array_like=True):
    """Jobs of CPU workers for a GPU: one for each MoE layer and step that selects an expert in RAM."""

    jobs: int = 0
    weight_bytes: int = 0  # of the experts needed, each once per job
    needed: int = 0  # experts, each once per job
    foreseen: int = 0  # of these, predicted before the job came
    seconds: float = 0.0  # from a job's arrival to its answer, and for deferred pairs; part of StepSeconds.program
    waiting_seconds: float = 0.0  # from an answer to the next job
    gaps: int = 0  # pairs of jobs of consecutive MoE layers
    gap_seconds: float = 0.0  # between the two jobs of these pairs
    deferred: int = 0  # (token, expert) pairs that were computed after the answer
    deferred_seconds: float = 0.0  # of `seconds`, for these


class ResidencyStats(msgspec.Struct, frozen=True, array_like=True):
    """Which selected experts were in VRAM; counted where experts move, or on request. Gauges from lent_slots on."""

    looks: int = 0  # times that selections were counted
    choices: int = 0  # (token, expert) pairs
    hits: int = 0  # of these, pairs whose expert was in VRAM
    hit_bytes: int = 0  # of selected experts in VRAM, each once per step
    missed_bytes: int = 0  # of selected experts elsewhere, each once per step
    moved_bytes: int = 0  # copied between VRAM and RAM, both ways
    lent_slots: int = 0  # experts in idle KV pages
    lent_bytes: int = 0  # of idle KV pages that hold experts, or soon will


class PrefillStats(msgspec.Struct, frozen=True, array_like=True):
    """Prompts whose experts in RAM were divided between copies to the GPU and the CPU. Gauges from copy_bytes_per_s
    on."""

    passes: int = 0  # steps in parts
    tokens: int = 0
    streamed: int = 0  # experts copied to the GPU, over all layers
    left_to_cpu: int = 0  # experts in RAM that were not
    streamed_bytes: int = 0
    copy_seconds: float = 0.0  # of passes that were measured: none beside decode
    predicted_seconds: float = 0.0  # of these passes
    took_seconds: float = 0.0  # of these passes
    own_seconds: float = 0.0  # of this, the GPU's time for all but experts
    experts_seconds: float = 0.0  # for experts
    waited_seconds: float = 0.0  # its waits for copies
    cpu_wait_seconds: float = 0.0  # its waits for the CPU's sums
    decided_seconds: float = 0.0  # its waits for the division of experts by a layer's routing
    routed: int = 0  # passes divided by their routing to the end
    promoted: int = 0  # experts that moved from the ring to slots
    copy_bytes_per_s: float = 0.0  # rates by which the next prompt is divided
    cpu_expert_seconds: float = 0.0
    cpu_pair_seconds: float = 0.0


class PrefixFileStats(msgspec.Struct, frozen=True, array_like=True):
    """The prefix cache's files. Gauges up to prefill_tokens_per_s, then counters."""

    stored_bytes: int = 0  # of the folder, other models' included
    foreign_files: int = 0  # of other models, KV types or versions
    restore_bytes_per_s: float = 0.0  # running averages, by which restoring and computing are compared; 0: unknown
    prefill_tokens_per_s: float = 0.0
    restored_pages: int = 0
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    refused_restores: int = 0  # computing was predicted to be quicker
    written_files: int = 0
    written_bytes: int = 0
    evicted_files: int = 0
    bad_files: int = 0  # truncated, changed or unreadable
    failed_writes: int = 0


class PrefixRamStats(msgspec.Struct, frozen=True, array_like=True):
    """The prefix cache's runs of pages in RAM. Gauges up to restore_bytes_per_s, then counters."""

    stored_bytes: int = 0  # RAM of the buffers that hold runs
    restore_bytes_per_s: float = 0.0  # running average, by which restoring and computing are compared; 0: unknown
    restored_pages: int = 0
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    written_runs: int = 0  # copied from pages; runs that were read from files are not counted
    written_bytes: int = 0
    evicted_runs: int = 0


class GapStats(msgspec.Struct, frozen=True, array_like=True):
    """Gaps between consecutive decode steps of a request. Gauges from longest_beside_seconds on."""

    undisturbed: int = 0  # no prompt was computed meanwhile
    undisturbed_seconds: float = 0.0
    beside: int = 0  # a prompt was
    beside_seconds: float = 0.0
    over_limit: int = 0  # of these, longer than --max-itl
    given_up: int = 0  # prefill steps beside decode steps that went on in turns, because gaps exceeded --max-itl
    longest_beside_seconds: float = 0.0
    limit_seconds: float = 0.0  # --max-itl, as a time; 0: not known yet, or none


class Stats(msgspec.Struct, frozen=True, tag=True):
    scheduler: SchedulerStats = SchedulerStats()
    seconds: StepSeconds = StepSeconds()
    cpu_experts: CpuExpertStats = CpuExpertStats()
    residency: ResidencyStats = ResidencyStats()
    prefill: PrefillStats = PrefillStats()
    prefix_files: PrefixFileStats = PrefixFileStats()
    prefix_ram: PrefixRamStats = PrefixRamStats()
    gaps: GapStats = GapStats()

    def values(self) -> dict[str, float]:
        """Every value by its path, such as "scheduler.steps"."""
        return {
            f"{part}.{name}": value
            for part in self.__struct_fields__
            for name, value in msgspec.structs.asdict(getattr(self, part)).items()
        }


def of_experts(done: Counters) -> tuple[CpuExpertStats, ResidencyStats, PrefillStats]:
    """The statistics in a device session's counters."""
    cpu = CpuExpertStats(
        jobs=done.jobs, weight_bytes=done.weight_bytes, needed=done.experts, foreseen=done.foreseen,
        seconds=done.moe_s, waiting_seconds=done.waiting_s, gaps=done.gaps, gap_seconds=done.gap_s,
        deferred=done.deferred, deferred_seconds=done.deferred_s,
    )  # fmt: skip
    residency = ResidencyStats(
        looks=done.looks, choices=done.choices, hits=done.hits, hit_bytes=done.hit_bytes,
        missed_bytes=done.missed_bytes, moved_bytes=done.moved_bytes, lent_slots=done.lent_slots,
        lent_bytes=done.lent_bytes,
    )  # fmt: skip
    prefill = PrefillStats(
        passes=done.passes, tokens=done.pass_tokens, streamed=done.streamed, left_to_cpu=done.left_to_cpu,
        streamed_bytes=done.streamed_bytes, copy_seconds=done.copy_s, predicted_seconds=done.predicted_s,
        took_seconds=done.took_s, own_seconds=done.own_s, experts_seconds=done.experts_s,
        waited_seconds=done.waited_s, cpu_wait_seconds=done.cpu_wait_s,
        decided_seconds=done.decided_s, routed=done.routed, promoted=done.promoted,
        copy_bytes_per_s=done.copy_bytes_per_s, cpu_expert_seconds=done.cpu_expert_s, cpu_pair_seconds=done.cpu_pair_s,
    )  # fmt: skip
    return cpu, residency, prefill
