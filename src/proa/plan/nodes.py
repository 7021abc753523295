"""The bytes of a plan on each memory node. Pure. Never: decisions."""

from __future__ import annotations

import msgspec

from proa.machine.machine import Machine
from proa.machine.topology import UNBOUND
from proa.plan.plan import Plan


class NodeShare(msgspec.Struct, frozen=True, kw_only=True):
    """One memory node. node: its id; None: the machine reports no nodes, or weights are bound to none. workers: threads
    of its team. weights_bytes: packed weights on it, equal parts of every matrix; other memory of the engine (KV cache
    on a CPU, workspace, processes) lies where the kernel puts it. free_bytes: None: not reported."""

    node: int | None
    workers: int
    free_bytes: int | None
    weights_bytes: int

    @property
    def missing_bytes(self) -> int:
        """Weights beyond the node's free memory, which the kernel puts on another node."""
        return 0 if self.free_bytes is None else max(0, self.weights_bytes - self.free_bytes)


def node_shares(plan: Plan, machine: Machine) -> tuple[NodeShare, ...]:
    """Divide a plan's weights in RAM over the nodes of its workers, or of --numa-memory interleave."""
    free = {node.id: node.available_bytes for node in machine.numa}
    if plan.workers is None:
        return (_whole(plan, machine),)
    workers = {team.node: count for team, count in zip(plan.workers.teams, plan.workers.trials[0], strict=True)}
    nodes = plan.workers.interleave or tuple(team.node for team in plan.workers.teams)
    if UNBOUND in nodes:
        return (_whole(plan, machine),)
    each, more = divmod(plan.memory.weights_bytes, len(nodes))
    return tuple(
        NodeShare(
            node=node, workers=workers.get(node, 0), free_bytes=free.get(node), weights_bytes=each + (i < more)
        )
        for i, node in enumerate(nodes)
    )  # fmt: skip


def _whole(plan: Plan, machine: Machine) -> NodeShare:
    """All weights, bound to no node."""
    return NodeShare(
        node=None, workers=plan.threads, free_bytes=machine.available_bytes, weights_bytes=plan.memory.weights_bytes
    )
