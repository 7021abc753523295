"""Updates the rates of prompts by what a pass took. Never: dividing by them (machine/cost/prefill.py)."""

from __future__ import annotations

from dataclasses import replace

from proa.hybrid.pass_state import Pass
from proa.hybrid.pass_totals import Times
from proa.machine.cost.prefill import HALF, LAYER, CpuExpertCost, PrefillRates, divide
from proa.native.doorbell import Counters


def after_layer(rates: PrefillRates, one: Pass, expert_bytes: int, jobs: Counters | None) -> PrefillRates:
    """The rates after the layer before the one under way, whose copies and job have ended: the pass's next layers need
    not wait for its end to be divided by them. expert_bytes: of that layer; jobs: of the CPU, up to that layer."""
    at = one.at - 1
    seconds = [upload.seconds() for upload in one.uploads.get(at, ())]
    if seconds and None not in seconds:
        nbytes = len(one.groups[at].experts) * expert_bytes
        rates = rates.after_copies(nbytes, sum(s for s in seconds if s is not None), LAYER)
    # That layer's job alone, and not the first of a pass, for which the workers wake up: with few experts it takes 1.1
    # to 2 times as long as the next ones (H200, 16 vCPUs).
    if at > 0 and jobs is not None and one.jobs is not None and jobs.jobs - one.jobs.jobs == 1:
        rates = _after_jobs(rates, one.jobs, jobs, LAYER)
    return rates


def after_pass(rates: PrefillRates, one: Pass, times: Times, counters: Counters) -> PrefillRates:
    """The rates after a pass during which the CPU had no other jobs. counters: of its jobs."""
    if one.typical:
        launches = one.chunks * len(one.divisions)
        rates = rates.after_launches(one.chunk_tokens, launches, times.own, times.experts)
    rates = rates.after_decisions(one.decided, times.decided)
    if one.routed:
        return rates
    rates = rates.after_jobs(sum(of.cpu_s for of in one.divisions), counters.moe_s - one.before.moe_s)
    return _after_jobs(rates, one.before, counters, HALF)


def _after_jobs(rates: PrefillRates, before: Counters, after: Counters, weight: float) -> PrefillRates:
    experts, pairs = after.experts - before.experts, after.pairs - before.pairs
    return rates.after_counted_jobs(experts, pairs, after.moe_s - before.moe_s, weight)


def after_no_job(
    rates: PrefillRates, trial: CpuExpertCost, one: Pass, in_ram: int, expert_bytes: int, chosen_per_token: float
) -> PrefillRates:
    """The rates after a pass that gave the CPU no job, so that its cost was not measured. trial: the cost by the trial
    at start; in_ram, expert_bytes, chosen_per_token: of a layer, see `divisions`.

    A cost that was once measured too high must not keep all later passes from measuring it. So it goes back to that of
    the trial step by step, if the CPU would have got jobs at that.
    """
    by_trial = divide(in_ram, expert_bytes, one.tokens, chosen_per_token, replace(rates, cpu=trial), jobs=one.chunks)
    return rates if by_trial.streamed == in_ram else rates.nearer_to(trial)
