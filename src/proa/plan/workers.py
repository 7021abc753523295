"""Threads of the native kernels: their CPUs, how they idle, which numbers of them are tried. Never: measuring."""

from __future__ import annotations

from collections.abc import Sequence

from proa.config.options import MachineOptions
from proa.errors import UsageError
from proa.machine.machine import Machine
from proa.machine.topology import Team, homes, share_out, teams, unclaimed
from proa.obs.units import format_ranges
from proa.plan.plan import Workers
from proa.types import Decision

# Between two decode steps lie some hundred microseconds of Python: workers that poll for a millisecond sleep only while
# no request runs.
SPIN_US = 1000
SAVING_SPIN_US = 50
# With a GPU they are woken before a step is launched, and the GPU's part of the first layer takes longer than waking.
# A step ended 0.4 ms earlier than with a millisecond, on 16 CPUs with a worker each (docs/lab).
LAUNCHED_SPIN_US = 20
# With a GPU, one CPU for each memory node has no worker if all have at least so many: the thread that launches a
# prompt's work is busy meanwhile, and the other workers wait for the one that shares its CPU at the end of each phase.
# H200, fp8, 128 tokens, 16 CPUs: experts are read at 39 to 60 GB/s by 16 workers, at 59 to 77 by 15; first token on 8
# and 4 of the CPUs 159 -> 149 and 192 -> 174 ms (decision 085).
LEAST_TO_SPARE = 4
# Where it shares its CPU with a worker of the same priority, it waits for the end of the worker's time slice when it
# wakes up, 0.5 ms on average and 4 at most; from 5 on it runs within 0.1 ms (Linux 6.18; a thread that computes two
# thirds of the time). Without a GPU the thread that launches is itself a worker, and the only others are the server's:
# 5 cost 7 to 10 % of the throughput of two CPUs (decision 083).
LAUNCHED_NICE = 5


def plan_threads(asked: int | None, machine: Machine, *, launched: bool) -> tuple[int, Decision]:
    """The number of workers, and its row. launched: see plan_workers. Raises UsageError if fewer CPUs are usable."""
    usable, cpus = machine.usable_cores, len(machine.usable_cpus)
    if asked is not None:
        if asked > cpus:
            raise UsageError(
                f"--threads {asked} is more than the {cpus} CPUs this process may use.",
                f"Use at most {cpus}, or widen its affinity or cpuset.",
            )
        why = "as asked" if asked <= usable else f"as asked, but the CPU quota is {machine.quota_cores:.4g} cores"
        return asked, Decision("threads", str(asked), str(asked), why)
    cores = machine.physical_cores or cpus
    if launched:
        got, why = _with_gpu(machine)
    else:
        got = min(cores, usable)
        why = f"{cores} cores usable" if cores == cpus else f"one per core: {cpus} usable CPUs are {cores} cores"
        if machine.quota_cores is not None and usable < cores:
            why = f"the CPU quota is {machine.quota_cores:.4g} of {cores} cores"
    return got, Decision("threads", "auto", str(got), why)


def _with_gpu(machine: Machine) -> tuple[int, str]:
    """The number of workers beside a GPU, and why."""
    usable, every = machine.usable_cores, teams(machine)
    why = f"{usable} CPUs usable"
    if usable < len(machine.usable_cpus):
        why = f"the CPU quota is {machine.quota_cores:.4g} of {len(machine.usable_cpus)} CPUs"
    got = usable - len(every)
    # Fewer workers may not give up a memory node, whose RAM would then have no weights.
    if min(len(team.cpus) for team in every) < LEAST_TO_SPARE or len(teams(machine, got)) < len(every):
        return usable, why
    left = "one is left" if len(every) == 1 else f"{len(every)} are left, one for each memory node,"
    return got, f"{why}; {left} to the threads that launch the GPU's work"


def plan_workers(
    asked: MachineOptions, machine: Machine, threads: int, *, launched: bool = False
) -> tuple[Workers, tuple[Decision, ...]]:
    """Plan teams for `threads` CPUs. If --threads is not given, without a GPU other numbers of workers are tried too,
    also with their SMT siblings.

    launched: a GPU's steps call the workers; the thread that launches steps needs a CPU meanwhile.
    """
    machine, others = apart(asked, machine)
    fixed = asked.threads is not None or launched
    found = teams(machine, threads if fixed else max(threads, machine.usable_cores))
    nodes = _interleaved(asked, machine)
    workers = Workers(
        teams=found,
        trials=(share_out(found, threads),) if fixed else _trials(found, threads, asked),
        binding=asked.cpu_binding,
        homes=homes(machine, found) if asked.cpu_binding == "node" else (),
        interleave=nodes,
        spin_us=LAUNCHED_SPIN_US if launched else SAVING_SPIN_US if asked.power_saving else SPIN_US,
        nice=LAUNCHED_NICE if launched else 0,
        saving=asked.power_saving,
    )
    return workers, (_binding(workers, others), _memory(asked.numa_memory, workers), _power(workers, launched))


def no_workers(asked: MachineOptions) -> tuple[None, tuple[Decision, ...]]:
    """The rows of plan_workers for plain torch, which has no such workers."""
    why = "plain torch manages its own threads and memory"
    saving = "on" if asked.power_saving else "off"
    return None, (
        Decision("CPU binding", asked.cpu_binding, "none", why),
        Decision("NUMA memory", asked.numa_memory, "none", why),
        Decision("power saving", saving, "off", why),
    )


def _trials(of: Sequence[Team], threads: int, asked: MachineOptions) -> tuple[tuple[int, ...], ...]:
    """Worker counts per team to try: all of `threads`, one less per team, fractions of them, and with SMT siblings."""
    full = share_out(of, threads)
    parts = (3, 2, 1) if asked.power_saving else (2,)  # quarters
    tried = [
        full,
        tuple(max(1, cpus - 1) for cpus in full),
        *(tuple(-(-cpus * part // 4) for cpus in full) for part in parts),
        tuple(len(team.cpus) for team in of),
    ]
    return tuple(dict.fromkeys(tried))


def _interleaved(asked: MachineOptions, machine: Machine) -> tuple[int, ...]:
    ordinary = tuple(node.id for node in machine.numa if node.cpus and node.memory_bytes != 0 and node.memory_allowed)
    return ordinary if asked.numa_memory == "interleave" and len(ordinary) > 1 else ()


def apart(asked: MachineOptions, machine: Machine) -> tuple[Machine, str]:
    """The machine's CPUs to choose from, and a note about other engines.

    CPUs of other engines are left out if --threads is given and enough others remain. Without --threads all cores are
    used: another engine may be idle for hours.
    """
    if asked.cpu_binding != "core" or not machine.claimed_cpus:
        return machine, ""
    claimed, rest = format_ranges(machine.claimed_cpus), unclaimed(machine)
    if asked.threads and asked.threads <= len(rest.usable_cpus):
        return rest, f"; other Proa engines have {claimed}"
    return machine, f"; other Proa engines are bound to {claimed} too: with --threads, each takes CPUs of its own"


def _binding(workers: Workers, others: str) -> Decision:
    got, cpus = workers.binding, sorted({cpu for team in workers.teams for cpu in team.cpus})
    why = {
        "core": f"each worker has a CPU of its own: {format_ranges(cpus)}{others}",
        "node": "each worker moves within its node: " + "; ".join(map(format_ranges, workers.homes)),
        "none": "the system schedules workers on any CPU",
    }[got]
    return Decision("CPU binding", got, got, why)


def _memory(asked: str, workers: Workers) -> Decision:
    nodes = [str(team.node) for team in workers.teams]
    if workers.interleave:
        over = ", ".join(map(str, workers.interleave))
        return Decision("NUMA memory", asked, asked, f"pages of weights are interleaved over nodes {over}")
    if asked == "interleave":
        return Decision("NUMA memory", asked, "bind", "there is only one memory node")
    why = f"each team's weights lie on its node: {', '.join(nodes)}" if len(nodes) > 1 else "workers are on one node"
    return Decision("NUMA memory", asked, asked, why)


def _power(workers: Workers, launched: bool) -> Decision:
    asked = "on" if workers.saving else "off"
    why = f"an idle worker sleeps after {workers.spin_us} us"
    why += f"; workers have nice {workers.nice}: the thread that launches steps comes first" if workers.nice else ""
    if workers.saving and launched:
        return Decision("power saving", asked, "off", f"{why}, as always with a GPU; fewer workers are not tried there")
    fewest = "; decode has the fewest workers within 10 % of the fastest" if workers.saving else ""
    return Decision("power saving", asked, asked, why + fewest)
