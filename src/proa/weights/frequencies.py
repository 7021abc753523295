"""How often dummy weights choose each expert: pure numbers. Never: weights, torch."""

from __future__ import annotations

ROUTERS = ("uniform", "zipf", "drift")
ALMOST_ALWAYS = 0.98


def zipf_frequencies(experts: int, top_k: int) -> list[float]:
    """How often each expert is chosen, hottest first: c / n, at most ALMOST_ALWAYS, top_k in sum."""
    low, high = 0.0, float(experts)
    for _ in range(60):  # bisection for c; the sum grows with it
        middle = (low + high) / 2
        total = sum(min(middle / rank, ALMOST_ALWAYS) for rank in range(1, experts + 1))
        low, high = (low, middle) if total > top_k else (middle, high)
    return [min(low / rank, ALMOST_ALWAYS) for rank in range(1, experts + 1)]


def frequencies(router: str, experts: int, top_k: int) -> list[float]:
    """Of a dummy router, one of ROUTERS, hottest first; top_k in sum. Raises ValueError for another."""
    if router == "uniform":
        return [top_k / experts] * experts
    if router in ("zipf", "drift"):
        return zipf_frequencies(experts, top_k)
    raise ValueError(f"there is no dummy router {router!r}")
