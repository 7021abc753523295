"""The prefix tree: finds computed pages that a new prompt can reuse. Never: tensors, requests, when to evict.

One node per page. A compressed tree (runs of pages on an edge) would save memory but needs node splits; the
plain one is fast enough: for a context of 131,072 tokens (8,192 pages of 16) one core of a 2-core cloud machine
takes 1.2 ms to make the keys (once per request), 0.4 ms to match, 0.3 ms to lock or unlock, 4 ms to insert and
3 ms to evict. A node and its key take 0.45 KiB; the page itself, even of a small model, hundreds of KiB.

A model with recurrent states can continue only from a node that has a copy of its states (cache/states.py): only such
nodes match, and a copy is dropped when its node is evicted.

Locks make `num_evictable` exact in O(1): a node's `busy` counts the locks on it plus its busy children, so it
is 0 exactly when no node at or below it is in use, and a change propagates up only while it flips idle/busy.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from proa.cache.pages import IntegrityError, PageAllocator
from proa.cache.states import StateCopies


class PrefixNode:
    """One page in the tree. Opaque to callers, who pass it to lock, unlock and insert."""

    __slots__ = ("busy", "children", "depth", "key", "page", "parent", "stamp")

    def __init__(self, key: Hashable, page: int, parent: PrefixNode | None) -> None:
        self.key = key
        self.page = page  # -1: the root
        self.parent = parent  # None: the root, or evicted
        self.depth: int = parent.depth + 1 if parent else 0  # pages from the root to this node
        self.children: dict[Hashable, PrefixNode] = {}
        self.busy = 0
        self.stamp = 0  # when it was last unlocked; larger is later


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest reusable prefix. `num_idle` of its pages count as evictable until `node` is locked.

    known: the deepest node of the prompt in the tree: `node`, or one behind it without a copy of states.
    """

    node: PrefixNode
    pages: list[int]
    num_idle: int
    known: PrefixNode


class PrefixCache:
    """Holds one reference (through the allocator) on every page in the tree.

    A user of a path holds its own reference on each page of it and one lock on the deepest node.
    """

    def __init__(self, page_tokens: int, allocator: PageAllocator, copies: StateCopies | None = None) -> None:
        """copies: copies of recurrent states; None: the model has no recurrent layers."""
        self.page_tokens = page_tokens
        self.copies = copies
        self._allocator = allocator
        self._root = PrefixNode("", -1, None)
        self._num_pages = 0
        self._num_idle = 0
        self.uses = 0  # unlocks so far, which is the latest stamp
        self._ties = itertools.count()
        self._leaves: list[tuple[int, int, PrefixNode]] = []  # heap of (stamp, tie, node), may hold stale entries

    @property
    def root(self) -> PrefixNode:
        return self._root

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_evictable(self) -> int:
        """Number of pages with no lock at or below them, which `evict` can free now."""
        return self._num_idle

    def page_keys(
        self, tokens: Sequence[int], salt: str = "", first_page: int = 0, cell_tokens: int = 1
    ) -> list[Hashable]:  # fmt: skip
        """One key for each full page of `tokens` from `first_page` on. The tree only compares and hashes keys.

        The salt is part of the first page's key only: all other pages are reached through it. Likewise the key of a
        cell's first page has all tokens of the cell, since any page of it may depend on them. Tokens are 0..2**32-1.
        """
        size = self.page_tokens
        num_pages = len(tokens) // size
        if num_pages <= first_page:
            return []
        data = array("I", tokens[first_page * size : num_pages * size])
        width = data.itemsize * size
        raw = data.tobytes()
        keys: list[Hashable] = [raw[i : i + width] for i in range(0, len(raw), width)]
        if (cell_pages := cell_tokens // size) > 1:
            for page in range(-first_page % cell_pages, len(keys), cell_pages):
                keys[page] = raw[page * width : (page + cell_pages) * width]
        if first_page == 0:
            keys[0] = (salt, keys[0])
        return keys

    def match(self, keys: Sequence[Hashable]) -> PrefixMatch:
        """Find the longest prefix of `keys` that can be reused. Read-only: not even recency changes, unlock sets it."""
        node, num_idle = self._root, 0
        pages: list[int] = []
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            node = child
            pages.append(node.page)
            num_idle += node.busy == 0
        known = node
        while self.copies is not None and node.parent is not None and node not in self.copies:
            num_idle -= node.busy == 0
            node = node.parent
        return PrefixMatch(node, pages[: node.depth], num_idle, known)

    def lock(self, node: PrefixNode) -> None:
        """Protect the path from the root to `node` from eviction until it is unlocked as often as locked."""
        at: PrefixNode | None = node
        while at is not None:
            at.busy += 1
            if at.busy > 1 or at is self._root:
                return
            self._num_idle -= 1
            at = at.parent

    def unlock(self, node: PrefixNode) -> None:
        """Undo one `lock`; the path counts as used now. Raises IntegrityError if it is not locked."""
        if node.busy < 1:
            raise IntegrityError(f"the node of page {node.page} is not locked")
        self.uses += 1
        node.stamp = self.uses
        at: PrefixNode | None = node
        while at is not None:
            at.busy -= 1
            if at.busy > 0 or at is self._root:
                break
            self._num_idle += 1
            at = at.parent
        self._offer(node)

    def insert(self, node: PrefixNode, keys: Sequence[Hashable], pages: Sequence[int]) -> tuple[PrefixNode, list[int]]:
        """Add `pages` (one per key) below `node`, which the caller has locked; the lock moves to the deepest node.

        The tree takes a reference of its own to each new page. Where it has the key already, the caller's reference
        moves from its duplicate page to the tree's page. Returns the deepest node, and for each key the page that the
        caller now holds and must use in its page table.
        """
        start = node
        held: list[int] = []
        for key, page in zip(keys, pages, strict=True):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = PrefixNode(key, page, node)
                self._allocator.share((page,))
                self._num_pages += 1
                self._num_idle += 1
            elif child.page != page:
                self._allocator.share((child.page,))
                self._allocator.release((page,))
            node = child
            held.append(node.page)
        self.lock(node)
        self.unlock(start)
        return node, held

    def evict(self, num_pages: int, last_use: int | None = None) -> int:
        """Free up to `num_pages` idle pages, least recently used first, always from the leaves; O(log n) each.
        last_use: only those not used since `uses` had this value.

        Returns the number freed, which is less than `num_pages` only if num_evictable was, or because of last_use.
        """
        freed = 0
        while freed < num_pages and self._leaves:
            if last_use is not None and self._leaves[0][0] > last_use:
                break
            stamp, _, node = heapq.heappop(self._leaves)
            parent = node.parent
            if parent is None or node.busy or node.children or node.stamp != stamp:
                continue  # stale: evicted, in use, or offered again later with another stamp
            del parent.children[node.key]
            node.parent = None
            if self.copies is not None:
                self.copies.drop(node)
            self._allocator.release((node.page,))
            self._num_pages -= 1
            self._num_idle -= 1
            freed += 1
            self._offer(parent)  # evictable next, unless it was unlocked later than other leaves
        return freed

    def pages(self) -> Iterator[int]:
        """Every page in the tree, in no particular order."""
        return (node.page for node in self._nodes())

    def path(self, node: PrefixNode) -> list[int]:
        """The pages from the root to `node`."""
        pages = []
        while node.parent is not None:
            pages.append(node.page)
            node = node.parent
        return pages[::-1]

    def check(self) -> None:
        """Raise IntegrityError unless counts, links, locks, references and the heap of leaves are consistent."""
        nodes = list(self._nodes())
        pages = [node.page for node in nodes]
        if len(set(pages)) != len(pages):
            raise IntegrityError("a page is in the prefix tree twice")
        if len(nodes) != self._num_pages:
            raise IntegrityError(f"the prefix tree has {len(nodes)} nodes but its counter is {self._num_pages}")
        idle = [node for node in nodes if node.busy == 0]
        if len(idle) != self._num_idle:
            raise IntegrityError(f"{len(idle)} pages of the prefix tree are idle but its counter is {self._num_idle}")
        offered = {id(node) for stamp, _, node in self._leaves if stamp == node.stamp}
        if self.copies is not None and not self.copies.nodes <= set(nodes):
            raise IntegrityError("a copy of states belongs to no node of the prefix tree")
        for node in nodes:
            self._check_node(node, id(node) in offered)

    def _check_node(self, node: PrefixNode, is_offered: bool) -> None:
        where = f"the node of page {node.page}"
        if node.busy < sum(child.busy > 0 for child in node.children.values()):
            raise IntegrityError(f"{where} has a busy count ({node.busy}) below its number of busy children")
        if any(child.parent is not node or child.key != key for key, child in node.children.items()):
            raise IntegrityError(f"{where} has a child with another parent or key")
        references = self._allocator.references(node.page)
        if references < 1 or (references > 1) != (node.busy > 0):
            raise IntegrityError(f"{where} has {references} references while its lock count is {node.busy}")
        if node.busy == 0 and not node.children and not is_offered:
            raise IntegrityError(f"{where} is an idle leaf but not in the heap of leaves")

    def _nodes(self) -> Iterator[PrefixNode]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _offer(self, node: PrefixNode) -> None:
        """Put `node` in the heap of leaves if it is idle and a leaf; drop stale entries when they outnumber pages."""
        if node.busy or node.children or node is self._root:
            return
        heapq.heappush(self._leaves, (node.stamp, next(self._ties), node))
        if len(self._leaves) > 2 * self._num_pages + 64:
            self._leaves = [entry for entry in self._leaves if entry[0] == entry[2].stamp and entry[2].parent]
            heapq.heapify(self._leaves)
