"""Heat and swaps: invariants for any counts, and hits on Zipf traces with drift, compared with an LRU."""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from examples import examples
from proa.machine.cost.heat import (
    EAGER,
    HALF_LIVES_TOKENS,
    MOST_HALF_LIVES,
    SCORE_HALF_LIFE_TOKENS,
    STRICT,
    SURE,
    Heat,
    Swap,
    choose_swaps,
    swap_threshold,
    swaps_with_room,
)
from proa.weights.frequencies import frequencies

Ids = NDArray[np.int64]  # [tokens, layers, k]
HERE = np.array([[True, False]])


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 4), st.integers(2, 9), st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(0, 1))
def test_swaps_of_any_heat(layers: int, experts: int, seed: int, resident: float, movable: float) -> None:
    rng = np.random.default_rng(seed)
    inside, may = rng.random((layers, experts)) < resident, rng.random((layers, experts)) < movable
    heat = Heat(experts, inside.sum(1).tolist())
    for _ in range(5):
        heat.observe(rng.integers(0, 30, (layers, experts)), int(rng.integers(1, 40)), inside)
        found = heat.swaps(inside, may)
        assert found == heat.swaps(inside, may)
        assert len({swap.layer for swap in found}) == len(found)
        gains = [heat.heat[s.layer, s.promote] - heat.heat[s.layer, s.evict] for s in found]
        assert gains == sorted(gains, reverse=True)
        for swap in found:
            assert not inside[swap.layer, swap.promote]
            assert inside[swap.layer, swap.evict]
            assert may[swap.layer, [swap.promote, swap.evict]].all()
        count = inside.sum(1)
        for swap in found:
            inside[swap.layer, [swap.promote, swap.evict]] = True, False
        assert (inside.sum(1) == count).all()


@pytest.mark.parametrize("tokens", [1, 40, 5000])
def test_heat_can_be_foreseen(tokens: int) -> None:
    """A choice foreseen in one layer gives what its observation gives, and changes nothing; a layer's swaps follow."""
    rng = np.random.default_rng(tokens)
    resident = np.arange(12) % 3 == 0
    heat = Heat(12, [4, 4])
    heat.observe(rng.integers(0, 30, (2, 12)), 100, np.stack([resident] * 2))
    before, chosen = heat.heat.copy(), rng.integers(0, tokens + 1, (2, 12))
    foreseen = [heat.foreseen(layer, chosen[layer], tokens) for layer in (0, 1)]
    assert (heat.heat == before).all()
    movable = rng.random(12) < 0.8
    swaps = heat.swaps_of(1, foreseen[1], resident, movable, 3)
    assert all(swap.layer == 1 for swap in swaps)
    promoted, evicted = [swap.promote for swap in swaps], [swap.evict for swap in swaps]
    assert len({*promoted, *evicted}) == 2 * len(swaps), "no expert moves twice"
    assert movable[promoted + evicted].all()
    assert resident[evicted].all()
    assert not resident[promoted].any()
    assert (foreseen[1][promoted] > foreseen[1][evicted]).all()
    left = resident.copy()
    left[promoted], left[evicted] = True, False
    assert len(swaps) == 3 or not heat.swaps_of(1, foreseen[1], left, movable, 1), "as many as are worth it"
    best = heat.best_half_life
    heat.observe(chosen, tokens, np.stack([resident] * 2))
    np.testing.assert_allclose(heat._heats[best], foreseen, rtol=1e-5)


@settings(max_examples=examples(200), deadline=None)
@given(st.data(), st.integers(1, 12), st.integers(1, 9))
def test_swaps_of_a_layer_are_those_found_one_after_another(data: st.DataObject, experts: int, most: int) -> None:
    flags = st.lists(st.booleans(), min_size=experts, max_size=experts)
    counts = data.draw(st.lists(st.integers(0, 12), min_size=experts, max_size=experts), label="heat")
    resident, movable = (np.array(data.draw(flags, label=name)) for name in ("resident", "movable"))
    heat, layer_heat = Heat(experts, [int(resident.sum())]), np.array(counts, np.float32)
    want, now = list[Swap](), resident.copy()
    while len(want) < most and (found := choose_swaps(layer_heat[None], now[None], movable[None], heat.threshold)):
        want += [Swap(3, found[0].promote, found[0].evict)]
        now[[found[0].promote, found[0].evict]] = True, False
    assert heat.swaps_of(3, layer_heat, resident, movable, most) == want


def test_noise_alone_causes_no_swap() -> None:
    """A heat difference below the threshold, transfer cost plus noise, causes no swap."""
    heat = Heat(2, [1])
    inside, may = np.array([[True, False]]), np.ones((1, 2), bool)
    assert heat.threshold == STRICT
    heat.heat[:] = [[100, 100 + STRICT.least_gain + STRICT.noise * 200**0.5]]
    assert not heat.swaps(inside, may)
    heat.heat[:] = [[100, 100 + STRICT.least_gain + STRICT.noise * 240**0.5]]
    assert [(s.promote, s.evict) for s in heat.swaps(inside, may)] == [(1, 0)]


def test_threshold_falls_if_other_experts_are_chosen_more_often() -> None:
    heat, chosen = Heat(4, [2]), np.array([[0, 0, 5, 5]])
    for resident, threshold in (([1, 1, 0, 0], EAGER), ([0, 0, 1, 1], STRICT)):
        for _ in range(10 * SCORE_HALF_LIFE_TOKENS):
            heat.observe(chosen, 5, np.array([resident], bool))
        found = heat.threshold
        assert (found.least_gain, found.noise) == pytest.approx((threshold.least_gain, threshold.noise), abs=1e-3)
    between = [heat.threshold]
    for _ in range(3):
        heat.observe(np.array([[1, 0, 50, 50]]), 1, np.array([[0, 0, 1, 1]], bool))
        between.append(heat.threshold)
    assert between[-1] == STRICT, "the resident experts are the hottest"


@pytest.mark.parametrize(
    ("best", "resident", "least_gain", "noise"),
    [
        (0.5, 0.5, 2.0, 1.25),
        (0.4, 0.5, 2.0, 1.25),
        (0.51, 0.5, 1.5, 0.875),
        (0.52, 0.5, 1.0, 0.5),
        (0.9, 0.5, 1.0, 0.5),
    ],
)
def test_the_threshold_follows_the_gap_of_the_scores(
    best: float, resident: float, least_gain: float, noise: float
) -> None:
    found = swap_threshold(best, resident)
    assert (found.least_gain, found.noise) == pytest.approx((least_gain, noise))


@given(st.lists(st.integers(0, 4), max_size=12), st.lists(st.integers(0, 2), min_size=5, max_size=5), st.data())
def test_swaps_take_spare_slots_of_their_size(layers: list[int], sizes: list[int], data: st.DataObject) -> None:
    """Swaps are taken in order while a slot of their size is left; a size without slots holds up no other size."""
    spare = {size: data.draw(st.integers(0, 3)) for size in set(sizes)}
    swaps = [Swap(layer, i, i + 1) for i, layer in enumerate(layers)]
    found = swaps_with_room(swaps, sizes, spare)
    for size, slots in spare.items():
        of_size = [swap for swap in swaps if sizes[swap.layer] == size]
        assert [swap for swap in found if sizes[swap.layer] == size] == of_size[:slots]
    assert found == [swap for swap in swaps if swap in found]


def test_heat_halves() -> None:
    heat, half_life = Heat(2, [1]), HALF_LIVES_TOKENS[-1]
    assert heat.best_half_life == len(HALF_LIVES_TOKENS) - 1, "of equals the longest"
    heat.observe(np.array([[8, 0]]), 1, HERE)
    for _ in range(half_life):
        heat.observe(np.array([[0, 0]]), 1, HERE)
    assert heat.heat.tolist() == [[pytest.approx(4, rel=1e-4), 0]]


def test_heat_of_a_long_prompt_is_bounded() -> None:
    """An expert that all tokens of a prompt choose gets the heat of MOST_HALF_LIVES half-lives, for any length."""
    most = MOST_HALF_LIVES * HALF_LIVES_TOKENS[-1]
    for tokens in (most, 4096):
        heat = Heat(2, [1])
        heat.observe(np.array([[tokens, 0]]), tokens, HERE)
        assert heat.heat[0, 0] == most
    heat.observe(np.zeros((1, 2), np.int64), 0, HERE)
    assert heat.heat[0, 0] == most


def test_heat_of_a_prompt_in_turns() -> None:
    """Looks that see one layer of a long step each, as in turns, give each layer the heat of one look at all layers:
    former heat decays once, not with each look."""
    rng, layers, experts = np.random.default_rng(3), 6, 16
    inside = np.arange(experts) < np.full((layers, 1), 4)
    at_once, in_parts = Heat(experts, [4] * layers), Heat(experts, [4] * layers)
    for _ in range(200):
        chosen = rng.multinomial(2, np.full(experts, 1 / experts), layers)
        for heat in (at_once, in_parts):
            heat.observe(chosen, np.full(layers, 1.0), inside)
    prompt = rng.multinomial(4096 * 2, np.full(experts, 1 / experts), layers)
    at_once.observe(prompt, np.full(layers, 4096.0), inside)
    for layer in range(layers):
        only = np.arange(layers) == layer
        in_parts.observe(prompt * only[:, None], 4096.0 * only, inside)
    np.testing.assert_allclose(in_parts.heat, at_once.heat, rtol=1e-5)


def test_the_half_life_that_predicts_best_is_used() -> None:
    """Static routing selects the longest half-life; routing that changes every 20 tokens the shortest."""
    rng = np.random.default_rng(0)
    for changes, best in ((None, len(HALF_LIVES_TOKENS) - 1), (20, 0)):
        heat, odds = Heat(32, [8]), np.linspace(0.2, 1, 32) ** 2
        for token in range(1500):
            if changes is not None and token % changes == 0:
                rng.shuffle(odds)
            chosen = np.zeros((1, 32), np.int64)
            chosen[0, rng.choice(32, 4, replace=False, p=odds / odds.sum())] = 1
            heat.observe(chosen, 1, np.zeros((1, 32), bool))
        assert heat.best_half_life == best


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_top_sets_have_the_hottest_experts(slots: list[int], seed: int) -> None:
    """A top set has as many experts as slots, the hottest ones; experts tied with the last one may be added."""
    rng, heat = np.random.default_rng(seed), Heat(6, slots)
    for _ in range(7):
        heat.observe(rng.integers(0, 100, (len(slots), 6)), 3, np.zeros((len(slots), 6), bool))
    for which, own in enumerate(heat._heats):
        heat._update_top_set(which)
        for row, kept, count in zip(own, heat._top[which], slots, strict=True):
            assert set(np.flatnonzero(kept)) == {e for e in range(6) if count and row[e] >= np.sort(row)[-count]}


# ---- against an LRU cache whose copies cost nothing ----

LAYERS, TOP_K, MOST = 16, 8, 2  # so many experts a step in 16 layers: in 48 it would be 6


def zipf_trace(rng: np.random.Generator, exponent: float, experts: int, tokens: int) -> Ids:
    """A trace [tokens, layers, k] by Zipf's law: each layer ranks its experts differently."""
    weights = 1 / np.arange(1, experts + 1) ** exponent
    log = np.log(np.stack([rng.permutation(weights) for _ in range(LAYERS)]))
    keys = log + rng.gumbel(size=(tokens, LAYERS, experts))
    found: Ids = np.argpartition(-keys, TOP_K, axis=2)[:, :, :TOP_K]
    return found


def fading_trace(rng: np.random.Generator, fade_tokens: float, experts: int, tokens: int) -> Ids:
    """A trace whose routing drifts: log-weights are AR(1) processes with a decay time of `fade_tokens`."""
    log, kept = 2 * rng.normal(size=(LAYERS, experts)), np.exp(-1 / fade_tokens)
    found = []
    for _ in range(tokens):
        found.append(np.argpartition(-log - rng.gumbel(size=log.shape), TOP_K, axis=1)[:, :TOP_K])
        log = kept * log + np.sqrt(1 - kept**2) * 2 * rng.normal(size=log.shape)
    return np.stack(found)


def lru_hits(trace: Ids, slots: int) -> NDArray[np.float64]:
    """Hit rate of an LRU cache, for each token."""
    hits = np.zeros(len(trace))
    for layer in range(LAYERS):
        kept = OrderedDict.fromkeys(range(slots))
        for t, ids in enumerate(trace[:, layer].tolist()):
            for expert in ids:
                hits[t] += expert in kept
                kept[expert] = None
                kept.move_to_end(expert)
                if len(kept) > slots:
                    kept.popitem(last=False)
    return hits / (LAYERS * TOP_K)


def heat_hits(
    trace: Ids, experts: int, slots: int, prompt: Ids | None = None, most: int = MOST
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Hit rate by heat, whose swaps take effect two steps later, and swaps per token. prompt: observed first."""
    heat = Heat(experts, [slots] * LAYERS)
    inside, may = np.zeros((LAYERS, experts), bool), np.ones((LAYERS, experts), bool)
    inside[:, :slots] = True
    hits, moved = np.zeros(len(trace)), np.zeros(len(trace))
    moving: deque[tuple[int, int, int, int]] = deque()
    if prompt is not None and len(prompt):
        read = np.stack([np.bincount(ids.ravel(), minlength=experts) for ids in prompt.swapaxes(0, 1)])
        heat.observe(read, len(prompt), inside)
    for t, ids in enumerate(trace):
        while moving and moving[0][0] <= t:
            _, layer, promote, evict = moving.popleft()
            inside[layer, [promote, evict]] = True, False
            may[layer, [promote, evict]] = True
        hits[t] = np.take_along_axis(inside, ids, 1).mean()
        chosen = np.zeros((LAYERS, experts), np.int64)
        np.put_along_axis(chosen, ids, 1, 1)
        heat.observe(chosen, 1, inside)
        for swap in heat.swaps(inside, may)[:most]:
            may[swap.layer, [swap.promote, swap.evict]] = False
            moving.append((t + 2, swap.layer, swap.promote, swap.evict))
            moved[t] += 1
    return hits, moved


@pytest.mark.parametrize("exponent", [0.6, 1.0])
@pytest.mark.parametrize("slots", [32, 64])
def test_hits_after_a_change_of_routing(exponent: float, slots: int) -> None:
    """At least 90 % of an LRU's hits, before all layers' routing changes and 500 tokens after."""
    experts, rng = 128, np.random.default_rng(slots)
    trace = np.concatenate([zipf_trace(rng, exponent, experts, 700) for _ in range(2)])
    ours, _ = heat_hits(trace, experts, slots)
    by_lru = lru_hits(trace, slots)
    static = np.isin(trace, np.arange(slots)).mean((1, 2))
    for settled in (slice(500, 700), slice(1200, 1400)):
        assert ours[settled].mean() >= 0.9 * by_lru[settled].mean()
        assert ours[settled].mean() >= static[settled].mean()
    assert ours[700:720].mean() < 0.9 * ours[1200:].mean(), "there was no drift"


@pytest.mark.parametrize("exponent", [0.0, 1.0])
@pytest.mark.parametrize("slots", [13, 32, 64])
def test_few_swaps_with_static_routing(exponent: float, slots: int) -> None:
    """Swaps are below 1 % of the reads, hits at least 98 % of static placement's, and with skewed routing at least 97 %
    of the hits of the experts that the whole trace chooses most."""
    trace = zipf_trace(np.random.default_rng(1), exponent, 128, 1000)
    ours, moved = heat_hits(trace, 128, slots)
    static = np.isin(trace, np.arange(slots)).mean((1, 2))
    assert moved[500:].mean() < 0.01 * LAYERS * TOP_K
    assert ours[500:].mean() >= 0.98 * static[500:].mean()
    chosen = np.stack([np.bincount(trace[:, layer].ravel(), minlength=128) for layer in range(LAYERS)])
    hottest = np.argsort(-chosen, 1)[:, :slots]
    best = np.stack([np.isin(trace[500:, layer], hottest[layer]).mean() for layer in range(LAYERS)]).mean()
    if exponent:
        assert ours[500:].mean() >= 0.97 * best


def test_a_prompt_seeds_heat() -> None:
    """Swaps follow a prompt's counts at once: after 60 tokens hits are nearly final."""
    trace = zipf_trace(np.random.default_rng(2), 1.0, 128, 1124)
    seeded, cold = (heat_hits(trace[of:], 128, 32, prompt=trace[:of], most=LAYERS)[0] for of in (1024, 0))
    assert seeded[10:40].mean() > 1.1 * cold[10:40].mean()
    assert seeded[60:].mean() >= 0.97 * cold[1000:].mean()


@pytest.mark.parametrize("slots", [32, 64])
def test_hits_with_drifting_routing(slots: int) -> None:
    """With routing that drifts within 100 tokens, as in real models: 90 % of an LRU's hits, a third of its fetches."""
    trace = fading_trace(np.random.default_rng(slots), 100, 128, 700)
    ours, moved = heat_hits(trace, 128, slots, most=6)
    by_lru = lru_hits(trace, slots)[300:].mean()
    assert ours[300:].mean() >= 0.9 * by_lru
    assert moved[300:].mean() <= (1 - by_lru) * LAYERS * TOP_K / 3


@pytest.mark.parametrize("tokens", [16, 64, 256, 512, 1024, 4096])
def test_chance_makes_hardly_an_expert_surely_hot(tokens: int) -> None:
    """Choices of a first prompt, 128 experts, a quarter on the GPU. All alike: at most three swaps beyond SURE in 60
    layers. A Zipf router, from 512 tokens on: most of the swaps."""
    rng, alike, by_router = np.random.default_rng(tokens), 0, list[tuple[int, int]]()
    for _ in range(60):
        resident, movable = rng.permutation(128) < 32, np.ones(128, bool)
        zipf = rng.permutation(np.array(frequencies("zipf", 128, 8)))
        for often in (np.full(128, 8 / 128), zipf):
            heat, chosen = Heat(128, [32]), rng.binomial(tokens, often)
            foreseen = heat.foreseen(0, chosen, tokens)
            sure = len(heat.swaps_of(0, foreseen, resident, movable, 64, SURE))
            if often is zipf:
                by_router.append((sure, len(heat.swaps_of(0, foreseen, resident, movable, 64))))
            else:
                alike += sure
    assert alike <= 3
    assert all(sure <= every for sure, every in by_router)
    assert tokens < 512 or 2 * sum(sure for sure, _ in by_router) > sum(every for _, every in by_router)
