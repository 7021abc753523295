"""Frequencies with which dummy routers choose each expert. Never: weights, torch."""

from __future__ import annotations

ROUTERS = ("uniform", "zipf", "drift")
ALMOST_ALWAYS = 0.98  # highest frequency of an expert


def zipf_frequencies(experts: int, top_k: int) -> list[float]:
    """Frequency of each expert, hottest first: c / n for the n-th, at most ALMOST_ALWAYS; they sum to top_k."""
    low, high = 0.0, float(experts)
    for _ in range(60):  # bisection for c; the sum grows with it
        middle = (low + high) / 2
        total = sum(min(middle / rank, ALMOST_ALWAYS) for rank in range(1, experts + 1))
        low, high = (low, middle) if total > top_k else (middle, high)
    return [min(low / rank, ALMOST_ALWAYS) for rank in range(1, experts + 1)]


def frequencies(router: str, experts: int, top_k: int) -> list[float]:
    """Frequency of each expert for one of ROUTERS, hottest first; they sum to top_k. Raises ValueError for another
    router."""
    if router == "uniform":
        return [top_k / experts] * experts
    if router in ("zipf", "drift"):
        return zipf_frequencies(experts, top_k)
    raise ValueError(f"there is no dummy router {router!r}")
