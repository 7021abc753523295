"""Teacher-forced logits, KV and recurrent states of every family on every path of a prompt and of decode, with decode
steps between the parts of prompts and with experts that move: as near to float32 as plain torch in bfloat16.

Routers choose all experts here, as in test_native_logits.py; copies of experts are full of NaN until they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engines import Loaded, load_decoder, load_native
from families.split_devices import DEVICES
from hybrid.restless import PromptCopier, Restless, SlowCopier
from hybrid_engines import Kept, Split, load_split
from proa.cache.pool import KvStorage
from proa.hybrid.copies import Copiers
from proa.hybrid.model import HybridModel
from proa.models.spec import Model
from proa.native.pool import Pool
from proa.ops.residency import ExpertShape
from proa.ops.sizes import EXPERT_ALIGNMENT_BYTES, RING_BANKS
from teacher_forced import MOE, PAGES, Computed, Turns, all_experts
from tiny import TINY, make_tiny

WHOLE, FEW = 1 << 22, 2  # bytes of a ring that holds all experts of a layer; experts in a bank of one that does not
# On a GPU, where cases are slow: states, latent attention, biases and windows, groups of a router, shared experts.
KINDS = ["qwen3-next", "deepseek-v3", "gpt-oss", "glm4-moe-groups", "ernie"]
ON_SIM = [pytest.param(name, "sim", id=name) for name in MOE]
ON_GPU = [pytest.param(name, "cuda", id=f"{name}, cuda", marks=pytest.mark.gpu) for name in KINDS]
FP8 = KvStorage(torch.float8_e4m3fn)


@dataclass(frozen=True)
class Way:
    """share: of experts in VRAM. streams: a value of --prefill, or half. few: the ring holds FEW experts of a layer at
    once."""

    share: float = 0.5
    inclusive: bool = False
    moves: bool = False
    in_place: bool = False
    streams: str | None = None
    few: bool = False

    def split(self, spec: Model) -> Split:
        ring_bytes = FEW * _expert_bytes(spec) if self.few else WHOLE
        return Split(
            self.share, self.inclusive, spare=2 if self.moves else 0, in_place=self.in_place, prefill=self.streams,
            ring_bytes=RING_BANKS * (ring_bytes + EXPERT_ALIGNMENT_BYTES),
        )  # fmt: skip


WAYS = {
    "all on the CPU": Way(0.0),
    "all on the GPU": Way(1.0),
    "half": Way(),
    "half move": Way(moves=True),
    "half move, RAM has all": Way(moves=True, inclusive=True),
    "read in place": Way(in_place=True),
    "read in place, half move": Way(in_place=True, moves=True),
    "streamed": Way(streams="stream"),
    "streamed in groups": Way(0.0, streams="stream", few=True),
    "streamed and on the CPU": Way(0.25, streams="half"),
    "streamed in groups and on the CPU": Way(0.0, streams="half", few=True),
    "streamed and on the CPU, half move, read in place": Way(in_place=True, moves=True, streams="half"),
    "streamed, half move, RAM has all": Way(inclusive=True, moves=True, streams="stream"),
}


def _expert_bytes(spec: Model) -> int:
    each = [ExpertShape(moe.expert.hidden, moe.expert.width) for moe in spec.routed.values()]
    return max(of.up.matrix_bytes + of.down.matrix_bytes for of in each)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


@dataclass(frozen=True)
class Yardstick:
    folder: Path
    exact: Computed
    plain: Computed

    def agrees(self, got: Computed) -> None:
        self._compare(self.exact.logits, self.plain.logits, got.logits, "logits")
        assert got.cached.keys() == self.exact.cached.keys()
        for name, exact in self.exact.cached.items():
            self._compare(exact, self.plain.cached[name], got.cached[name], name)

    def _compare(self, exact: Tensor, plain: Tensor, got: Tensor, what: str) -> None:
        scale = exact.abs().max()
        off_plain, off_got = ((rows - exact).pow(2).mean().sqrt() for rows in (plain, got))
        assert off_plain <= 0.05 * scale, f"{what}: the yardstick itself is off"
        assert off_got <= 1.05 * off_plain + 1e-4 * scale, what


Yardsticks = Callable[..., Yardstick]


@pytest.fixture(scope="module")
def yardstick(tmp_path_factory: pytest.TempPathFactory) -> Yardsticks:
    @cache
    def made(name: str, kv: KvStorage | None = None) -> Yardstick:
        """kv: of plain torch in bfloat16; the exact one keeps float32."""
        folder = make_tiny(name, tmp_path_factory.mktemp("tiny") / name)
        exact = computed(load_decoder(folder, torch.float32, **all_experts(folder)))
        plain = computed(load_decoder(folder, torch.bfloat16, kv, **all_experts(folder)))
        return Yardstick(folder, exact, plain)

    return made


def computed(model: Loaded, *, in_chunks: bool = True) -> Computed:
    return Turns(model.make(Turns.limits(in_chunks=in_chunks), PAGES)).run()


@pytest.mark.parametrize("teams", [1, 2], ids=["one node", "two nodes"])
@pytest.mark.parametrize("name", sorted(TINY))
def test_the_cpu(name: str, teams: int, yardstick: Yardsticks) -> None:
    of = yardstick(name)
    with Pool([[0]] * teams, pin=False) as pool:
        of.agrees(computed(load_native(of.folder, pool, **all_experts(of.folder)), in_chunks=False))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(set(TINY) - set(MOE)))
def test_a_gpu_without_experts(name: str, device: str, pool: Pool, yardstick: Yardsticks) -> None:
    of = yardstick(name)
    of.agrees(computed(load_split(of.folder, pool, Split(1.0), device)))


@pytest.mark.parametrize(("name", "device"), ON_SIM + ON_GPU)
@pytest.mark.parametrize("way", WAYS)
def test_experts_on_a_gpu_and_the_cpu(name: str, way: str, device: str, pool: Pool, yardstick: Yardsticks) -> None:
    check(yardstick(name), WAYS[way], device, pool)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_fp8_kv(way: str, device: str, pool: Pool, yardstick: Yardsticks) -> None:
    check(yardstick("qwen3-next", FP8), WAYS[way], device, pool, FP8)


def check(of: Yardstick, asked: Way, device: str, pool: Pool, kv: KvStorage | None = None) -> None:
    kept = list[Kept]()
    override = all_experts(of.folder)
    split = asked.split(load_decoder(of.folder, **override).spec)
    slow = Copiers(SlowCopier(2), PromptCopier())
    model = load_split(of.folder, pool, split, device, lambda: slow, keep=kept, kv=kv, **override)
    executor = model.make(Turns.limits(in_chunks=True), PAGES)
    hybrid = kept[0].hybrid
    if hybrid.moves is not None:
        hybrid.moves.heat = Restless()
    got = Turns(executor).run()
    happened(hybrid, asked, len(got.logits))
    kept[0].close()
    of.agrees(got)


def happened(hybrid: HybridModel, asked: Way, tokens: int) -> None:
    """Check that the experts were where the way says."""
    counters = hybrid.counters()
    assert (hybrid.moves is not None and hybrid.moves.moved.experts > 4) == asked.moves
    assert bool(counters.streamed) == (asked.streams is not None)
    assert bool(counters.left_to_cpu) == (asked.streams == "half")
    if asked.few:
        assert hybrid.passes_in_groups
    if not asked.moves and asked.streams is None:
        in_ram = sum(len(layer.memory.in_ram) for layer in hybrid.layers)
        assert (counters.pairs < in_ram * tokens) == asked.in_place
        assert counters.pairs or asked.share == 1
