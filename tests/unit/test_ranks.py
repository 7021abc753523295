"""A model divided over ranks: what is where. tests/families/test_rank_sums.py computes with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from examples import examples
from proa.errors import UsageError
from proa.models.ranks import Mesh, Part, Rank, divide
from proa.models.spec import Attention, Block, GatedDeltaNet, LatentAttention, Mlp, Model, Moe, Rope, Router
from proa.plan.packed_size import packed_size
from proa.plan.placement import moe_layers
from proa.plan.vram import vram_demand
from rank_runs import meshes
from tiny import TINY, tiny_spec

ROPE = Rope(16)
GQA = Attention(64, 8, 2, 16, ROPE, gated=True, o_bias=True, sinks=True)
DELTA = GatedDeltaNet(64, key_heads=2, value_heads=6, key_dim=16, value_dim=32, taps=4)
MLA = LatentAttention(64, 4, 40, 32, 24, 16, ROPE)
MLP = Mlp(64, 96, bias=True)
MOE = Moe(64, 8, 2, 24, Router("softmax", True), shared=Mlp(64, 40), shared_gate=True)


def model(*blocks: Block, tied: bool = False) -> Model:
    return Model(64, 100, blocks, 1e-6, 512, tied)


def equal(ranks: int) -> Mesh:
    return Mesh(((1,) * ranks,))


def over(ranks: tuple[Rank, ...], name: str) -> list[Part | None]:
    return [rank.parts[name] for rank in ranks]


@pytest.mark.parametrize("family", sorted(TINY))
def test_one_rank_has_the_model_itself(family: str) -> None:
    spec = tiny_spec(family)
    (only,) = divide(spec, Mesh())
    assert only.spec == spec
    assert only.parts == {name: Part(name, (range(shape[0]),), _columns(only, name)) for name, shape in spec.params()}


def _columns(rank: Rank, name: str) -> range | None:
    """All columns, said or not."""
    part = rank.parts[name]
    assert part is not None
    assert part.columns is None or part.columns == range(dict(rank.spec.params())[name][1])
    return part.columns


@settings(deadline=None, max_examples=examples(150))
@given(family=st.sampled_from(sorted(TINY)), data=st.data())
def test_the_parts_of_all_ranks_are_the_model(family: str, data: st.DataObject) -> None:
    spec = tiny_spec(family)
    ranks = divide(spec, data.draw(meshes(len(spec.blocks))))
    owners = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in spec.params()}
    said: Counter[str] = Counter()
    zeros = 0
    for rank in ranks:
        shapes = dict(rank.spec.params())
        assert shapes.keys() == rank.parts.keys()
        for name, shape in shapes.items():
            part = rank.parts[name]
            if part is None:
                zeros += prod(shape)
                continue
            said[part.name] += bool(part.shared)
            columns = slice(None) if part.columns is None else slice(part.columns.start, part.columns.stop)
            of = [slice(rows.start, rows.stop) for rows in part.rows]
            places = [(rows, ..., columns) if len(shape) > 1 else (rows,) for rows in of]
            assert sum(owners[part.name][place].numel() for place in places) == prod(shape)
            assert all(owners[part.name][place].shape[1:] == shape[1:] for place in places)
            for place in places:
                owners[part.name][place] += 1
    for name, count in owners.items():
        assert (count > 0).all(), f"{name}: some elements have no owner"
        assert said[name] or (count == 1).all(), f"{name} is shared, but no rank says why"
    assert sum(rank.spec.num_params for rank in ranks) == zeros + sum(int(count.sum()) for count in owners.values())


@settings(deadline=None, max_examples=examples(150))
@given(family=st.sampled_from(sorted(TINY)), data=st.data())
def test_cuts_fall_on_units(family: str, data: st.DataObject) -> None:
    spec = tiny_spec(family)
    shapes = dict(spec.params())
    rows, columns = data.draw(st.sampled_from([1, 4, 16, 64])), data.draw(st.sampled_from([1, 8, 16, 32]))

    def units(name: str) -> tuple[int, int]:
        matrix = len(shapes.get(name, ())) == 2 and not name.endswith(("ba.weight", "router.weight"))
        return (rows, columns) if matrix else (1, 1)

    try:
        ranks = divide(spec, data.draw(meshes(len(spec.blocks))), units)
    except UsageError as error:
        assume("units of" not in error.message)
        raise
    for rank in ranks:
        for part in filter(None, rank.parts.values()):
            row_unit, column_unit = units(part.name)
            ends = [end for of in part.rows for end in (of.start, of.stop)]
            assert all(end % row_unit == 0 or end == shapes[part.name][0] for end in ends), part
            ends = [part.columns.start, part.columns.stop] if part.columns else []
            assert all(end % column_unit == 0 or end == shapes[part.name][1] for end in ends), part


def test_heads() -> None:
    """Query heads go with their KV head, which ranks share if there are more ranks than KV heads."""
    two, four = divide(model(Block(GQA, MLP)), equal(2)), divide(model(Block(GQA, MLP)), equal(4))
    assert over(two, "blocks.0.mixer.q.weight")[1] == Part("blocks.0.mixer.q.weight", (range(128, 256),))
    assert over(two, "blocks.0.mixer.o.weight")[1] == Part("blocks.0.mixer.o.weight", (range(64),), range(64, 128))
    assert [rank.spec.mixers[0].kv_heads for rank in two] == [1, 1]
    assert [(rank.spec.mixers[0].heads, rank.spec.mixers[0].kv_heads) for rank in four] == [(2, 1)] * 4
    keys = over(four, "blocks.0.mixer.k.weight")
    assert [part and part.rows for part in keys] == [(range(16),), (range(16),), (range(16, 32),), (range(16, 32),)]
    assert all(part and "share one" in part.shared for part in keys)
    assert [rank.spec.mixers[0].o_bias for rank in four] == [True, False, False, False]
    assert [part is None for part in over(four, "blocks.0.ffn.down.bias")] == [False, True, True, True]


def test_unequal_shares() -> None:
    """A fast GPU beside a slow one."""
    for shares, heads, width in (((2, 1), (4, 2), (64, 32)), ((5, 1), (5, 1), (80, 16)), ((9, 1), (5, 1), (86, 10))):
        ranks = divide(model(Block(replace(GQA, heads=6, kv_heads=6), MLP)), Mesh((shares,)))
        assert tuple(rank.spec.mixers[0].heads for rank in ranks) == heads
        assert tuple(rank.spec.blocks[0].ffn.width for rank in ranks) == width


def test_heads_of_the_delta_rule() -> None:
    """Rows lie per key head: q, k, then v and z of its value heads; with more ranks than key heads they are picked."""
    two, six = divide(model(Block(DELTA, MLP)), equal(2)), divide(model(Block(DELTA, MLP)), equal(6))
    head = 2 * 16 + 2 * 3 * 32
    assert over(two, "blocks.0.mixer.qkvz.weight")[1] == Part("blocks.0.mixer.qkvz.weight", (range(head, 2 * head),))
    last = over(six, "blocks.0.mixer.qkvz.weight")[5]
    assert last
    assert last.rows == (
        range(head, head + 32),
        range(2 * head - 128, 2 * head - 96),
        range(2 * head - 32, 2 * head),
    )
    gates = over(six, "blocks.0.mixer.ba.weight")[5]
    assert gates
    assert gates.rows == (range(8, 9), range(11, 12))
    channels = over(six, "blocks.0.mixer.conv.weight")[5]
    assert channels
    assert channels.rows == (range(16, 32), range(48, 64), range(64 + 5 * 32, 64 + 6 * 32))


def test_latents_are_computed_by_every_rank() -> None:
    ranks = divide(model(Block(MLA, MLP)), equal(2))
    assert over(ranks, "blocks.0.mixer.kv_b.weight")[1] == Part("blocks.0.mixer.kv_b.weight", (range(80, 160),))
    latents = over(ranks, "blocks.0.mixer.kv_a.weight")
    assert (
        latents[0]
        == latents[1]
        == Part("blocks.0.mixer.kv_a.weight", (range(48),), None, "all heads share the latents")
    )


@pytest.mark.parametrize(
    ("block", "name", "why"),
    [
        (Block(replace(GQA, qk_norm="full"), MLP), "mixer.o.weight", "normalised over all heads together"),
        (Block(replace(MLA, heads=2), MLP), "mixer.o.weight", "2 heads cannot be divided over 3 ranks"),
        (Block(replace(DELTA, key_heads=1, value_heads=2), MLP), "mixer.out.weight", "2 value heads cannot be divided"),
        (Block(GQA, Mlp(64, 2)), "ffn.down.weight", "a width of 2 cannot be divided over 3 ranks"),
    ],
)
def test_what_cannot_be_divided_is_added_once(block: Block, name: str, why: str) -> None:
    ranks = divide(model(block), equal(3))
    assert over(ranks, f"blocks.0.{name}")[1:] == [None, None]
    shared = {part.shared for rank in ranks for part in rank.parts.values() if part}
    assert any(why in reason for reason in shared)


def test_experts_whole_or_by_width() -> None:
    spec = model(Block(GQA, MOE))
    whole, narrow, both = (divide(spec, Mesh(((1,) * 4,), groups)) for groups in (None, 1, 2))

    def moes(ranks: tuple[Rank, ...]) -> list[tuple[int, int, int]]:
        found = [block.ffn for rank in ranks for block in rank.spec.blocks if isinstance(block.ffn, Moe)]
        return [(ffn.experts, ffn.width, ffn.scored) for ffn in found]

    assert moes(whole) == [(2, 24, 8)] * 4
    assert moes(narrow) == [(8, 6, 8)] * 4
    assert moes(both) == [(4, 12, 8)] * 4
    assert over(both, "blocks.0.ffn.experts.0.down.weight")[3] == Part(
        "blocks.0.ffn.experts.4.down.weight", (range(64),), range(12, 24)
    )
    assert {rank.spec.blocks[0].ffn.shared for rank in whole} == {Mlp(64, 10)}


def test_a_shared_expert_with_fewer_groups_than_ranks() -> None:
    ranks = divide(model(Block(GQA, MOE)), equal(4), lambda name: (1, 16) if "shared.down" in name else (1, 1))
    shared = [(ffn.shared and ffn.shared.width, ffn.shared_gate) for rank in ranks for ffn in [rank.spec.blocks[0].ffn]]
    assert shared == [(16, True), (16, True), (8, True), (None, False)]


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_has_one_matrix_of_the_vocabulary(tied: bool) -> None:
    first, middle, last = divide(model(*[Block(GQA, MLP)] * 4, tied=tied), Mesh(((2,), (1,), (1,))))
    assert [rank.blocks for rank in (first, middle, last)] == [range(2), range(2, 3), range(3, 4)]
    assert [rank.spec.vocab for rank in (first, middle, last)] == [100, 0, 100]
    stored = [rank.parts["embed.weight"] for rank in (first, last)]
    assert [part and part.name for part in stored] == ["embed.weight", "embed.weight" if tied else "head.weight"]
    assert middle.parts["blocks.0.mixer.q.weight"] == Part("blocks.2.mixer.q.weight", (range(256),))


@pytest.mark.parametrize(
    ("mesh", "numbers", "remedy"),
    [
        (Mesh(((1,), (1,))), "1 blocks cannot be divided over 2 pipeline stages", "at most 1 stages"),
        (Mesh(((1,) * 101,), 1), "A vocabulary of 100 rows, in units of 1, cannot be divided over 101", "at most 100"),
        (equal(9), "8 experts cannot be divided over 9 groups", "at most 8"),
        (Mesh(((1,) * 4,), 3), "4 ranks of a pipeline stage cannot form 3 expert groups", "divides 4"),
        (Mesh(((1,) * 30,), 1), "Experts of width 24, in units of 1, cannot be divided over 30", "More expert groups"),
    ],
)  # fmt: skip
def test_refusals_have_numbers_and_a_remedy(mesh: Mesh, numbers: str, remedy: str) -> None:
    with pytest.raises(UsageError) as error:
        divide(model(Block(GQA, MOE)), mesh)
    assert numbers in error.value.message
    assert remedy.lower() in error.value.remedy.lower()


@pytest.mark.parametrize("shares", [(), ((),), ((1, 0),)])
def test_shares_are_positive(shares: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(UsageError, match="must be above 0"):
        Mesh(shares)


@pytest.mark.parametrize("mesh", [equal(2), Mesh(((1,), (1,), (1,))), Mesh(((1, 1), (1, 1)), 1)], ids=str)
@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3", "qwen3-next", "llama2", "smollm2"])
def test_ranks_are_planned_like_models(family: str, mesh: Mesh) -> None:
    """The planner's formulas take a rank's spec; ranks together hold the experts once, and the rest at least once."""
    spec = tiny_spec(family)
    specs = [rank.spec for rank in divide(spec, mesh)]
    whole, *parts = (packed_size(of, {name: "BF16" for name, _ in of.params()}).total_bytes for of in (spec, *specs))
    assert max(parts) < whole <= sum(parts)
    experts = [sum(layer.total_bytes for layer in moe_layers(of, {})) for of in (spec, *specs)]
    if mesh.expert_groups is None:  # by width, rows are padded to panels
        assert sum(experts[1:]) == experts[0]
    needs = [vram_demand(of, 16, 4, 512, False, {}).page_bytes for of in (spec, *specs)]
    assert max(needs[1:]) <= needs[0] <= sum(needs[1:])
