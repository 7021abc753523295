"""FreeToken's own Python API: its engine, with random weights made in memory, timed. Never: installing, Proa's side.

What runs is its offline interface: the scheduler, engine, CUDA graphs and kernels of its server. Two of its functions
are replaced, both of them for random weights. Its own fill experts from one serial generator, which takes minutes;
and they draw norms too, so that attention makes all rows alike and every token wants the same experts, which would be
easy for its cache. Here experts are chosen evenly, as in Proa's bench.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from freetoken_files import PACKAGE, REMEDY

from proa.bench.hybrid_shapes import ModelShape
from proa.errors import ProaError, UsageError

VERSION = "0.2.1"  # whose functions are replaced here
STRATEGIES = {"hybrid": "hybrid", "cpu": "cpu", "vram": "fused"}  # our name of a mode: its own
SETTLE_TOKENS = 32  # of each answer, not timed: reading a prompt empties the expert cache
WARM_UP_TOKENS = 16  # after those: compiles, tunes
MISSES_TOKENS = 16
PROMPT_ANSWER_TOKENS = 2  # of a prompt whose first token is timed
WARM_UP_PROMPTS = 2  # of each length, not timed
_QUIET = 1 << 30  # steps between two lines of its log
_SMALL = 0.2  # of what a layer adds, so that a token's own embedding decides about its experts


@dataclass(frozen=True)
class Case:
    """What to run. `cache_share`: of all experts, how many its cache in VRAM holds; only for hybrid."""

    model: Path
    shape: ModelShape
    mode: str
    cache_share: float
    threads: int  # 0: its own choice
    counts: tuple[int, ...]  # of requests
    prompt_tokens: int
    output_tokens: int  # that are timed
    prefill: tuple[int, ...] = ()  # lengths of single prompts whose first token is timed

    @property
    def longest_tokens(self) -> int:
        """Most tokens of a chunk: the prompts that decode together are computed in one, and so is the longest prompt."""
        return max(max(self.counts) * self.prompt_tokens, *self.prefill, 8192)

    @property
    def slots(self) -> int:
        """Slots of the cache, as FreeToken counts them. Raises UsageError."""
        experts = self.shape.experts
        found = ceil(experts * self.shape.layers * self.cache_share)
        if found < experts:  # it reads prompts a layer at a time
            raise UsageError(
                f"A cache of {found} experts is less than a layer's {experts}.",
                "Use more of --layers or --cache-share.",
            )
        return found


@dataclass(frozen=True)
class Decoded:
    """One run: tokens per second of all requests together while all of them decode."""

    requests: int
    tokens_per_s: float


@dataclass(frozen=True)
class Misses:
    """Averages over layers and steps: experts wanted, and where those come from that the cache does not have."""

    wanted: float
    fetched: float
    cpu: float

    @property
    def hit_share(self) -> float:
        return 1 - (self.fetched + self.cpu) / self.wanted if self.wanted else 0.0


def module(name: str) -> Any:
    """Import a module of the package. Raises UsageError."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise UsageError(f"FreeToken cannot be used here ({error}).", REMEDY) from None


def version() -> str:
    """Raises UsageError for another than the one whose functions are known."""
    found = importlib.metadata.version(PACKAGE)
    if found != VERSION:
        raise UsageError(f"This is FreeToken {found}.", f"Install {VERSION}: its functions are replaced by name.")
    return found


def need_gpu() -> None:
    if not torch.cuda.is_available():
        raise UsageError("FreeToken needs an NVIDIA GPU, and there is none here.", "Run it on a machine with one.")


class RandomWeights:
    """Both functions that replace FreeToken's."""

    def __init__(self) -> None:
        self._experts: dict[tuple[object, ...], torch.Tensor] = {}  # random ones, one for all of a kind

    def install(self) -> None:
        module("freetoken.moe.expert_banks")._dummy_fill = self.expert
        module("freetoken.engine.engine")._make_dummy_weight_state_dict = self.dense

    def expert(self, role: str, bank: torch.Tensor) -> None:
        """Fill `bank` [experts, rows, columns] of "gate_up" or "down", or their scales for FP8 blocks.

        All experts of a bank are alike: a copy is written by all cores, random numbers by one.
        """
        if role.endswith("_scale"):
            bank.fill_(_size(role) / (_columns(bank) * 128) ** 0.5)
            return
        key = (role.startswith("down"), bank.dtype, bank.device, *bank.shape[1:])
        if key not in self._experts:
            values = torch.randn(bank.shape[1:], device=bank.device)
            if bank.dtype != torch.float8_e4m3fn:
                values *= _size(role) / _columns(bank) ** 0.5
            self._experts[key] = values.to(bank.dtype)
        one = self._experts[key]
        if bank.element_size() == 1:  # copies of FP8 are one value at a time
            bank, one = bank.view(torch.uint8), one.view(torch.uint8)
        bank.copy_(one.expand(bank.shape))

    def dense(
        self, model_state: Mapping[str, torch.Tensor], *, device: torch.device, host_keys: frozenset[str] = frozenset()
    ) -> dict[str, torch.Tensor]:
        """Values for all else. Raises UsageError for tables that should lie in RAM: that is no default."""
        if host_keys:
            raise UsageError(f"{', '.join(sorted(host_keys))} should lie in RAM.", "Leave embed_weights as it is.")
        return {name: self._dense(name, like, device) for name, like in model_state.items()}

    def _dense(self, name: str, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        shape, dtype = like.shape, like.dtype
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=device)
        if like.dim() == 1:  # norms
            return torch.ones(shape, dtype=dtype, device=device)
        if name.endswith("weight_scale_inv"):
            return torch.full(shape, _size(name) / (_columns(like) * 128) ** 0.5, dtype=dtype, device=device)
        values = torch.randn(shape, device=device)
        if "embed_tokens" not in name and dtype != torch.float8_e4m3fn:
            values *= _size(name) / _columns(like) ** 0.5
        return values.to(dtype)


def _columns(weight: torch.Tensor) -> int:
    return weight.shape[-1]


def _size(name: str) -> float:
    """Size of the results of a layer with this weight, whose input is about 1."""
    return _SMALL if "o_proj" in name or name.startswith("down") else 1.0


class Program:
    """A loaded engine."""

    def __init__(self, case: Case) -> None:
        RandomWeights().install()
        self._case = case
        self._draw = random.Random(1)
        self._core = module("freetoken.core")
        self._finished = module("freetoken.llm.llm").RequestAllFinished
        begin = time.perf_counter()
        self.llm = timed(module("freetoken.llm").LLM)(str(case.model), dtype=torch.bfloat16, **engine_options(case))
        self.load_s = time.perf_counter() - begin
        self._began_s = 0.0  # the last requests

    def decode(self, requests: int, output_tokens: int) -> Decoded:
        """New random prompts at once. Sampled, not greedy: of the same token's repetition routing would be uneven."""
        made = SETTLE_TOKENS + output_tokens
        return decoded(self._answers(requests, self._case.prompt_tokens, made), made)

    def first_token(self, tokens: int) -> float:
        """Seconds to the first token of a new random prompt."""
        (arrivals,) = self._answers(1, tokens, PROMPT_ANSWER_TOKENS)
        if not arrivals:
            raise ProaError(f"FreeToken made no token for a prompt of {tokens}.", "See what it wrote above.")
        return arrivals[0] - self._began_s

    def first_tokens(self, runs: int) -> dict[int, list[float]]:
        """By length, after two prompts that warm up, as Proa's bench has."""
        return {
            tokens: [self.first_token(tokens) for _ in range(WARM_UP_PROMPTS + runs)][WARM_UP_PROMPTS:]
            for tokens in self._case.prefill
        }

    def _answers(self, requests: int, prompt_tokens: int, made: int) -> list[list[float]]:
        """When the tokens of `made` each came, for new random prompts that are sent at once."""
        prompts = [self._draw.choices(range(3, self._case.shape.vocab), k=prompt_tokens) for _ in range(requests)]
        sampling = self._core.SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=made)
        self.llm.pending_requests = [(prompt, sampling, None) for prompt in prompts]
        self.llm.status_map, self.llm.counter, self.llm.arrivals = {}, 0, {}
        self._began_s = time.perf_counter()
        with suppress(self._finished):
            self.llm.run_forever()
        return [self.llm.arrivals.get(i, []) for i in range(requests)]

    def measure(self, runs: int) -> dict[int, list[Decoded]]:
        for count in self._case.counts:
            self.decode(count, WARM_UP_TOKENS)
        return {count: [self.decode(count, self._case.output_tokens) for _ in range(runs)]
                for count in self._case.counts}  # fmt: skip

    def misses(self, requests: int) -> Misses | None:
        """None without an expert cache. Its counters are in the graphs, which are captured anew: to be called last."""
        cache = self.llm.engine.moe_offload_cache
        if cache is None or self._case.mode != "hybrid":
            return None
        cache.collect_stats = True
        self.llm.rebuild_cache(moe_cache_size=cache.cache_size)
        self.decode(requests, WARM_UP_TOKENS)
        cache.reset_stats()  # the prompt's own experts are not counted, those of settling are
        self.decode(requests, MISSES_TOKENS)
        found = cache.decode_miss_stats()
        return Misses(found["active_per_layer"], found["fetched_per_layer"], found["cpu_per_layer"])

    def facts(self) -> dict[str, Any]:
        """What it chose: its cache, its workers."""
        engine = self.llm.engine
        cache, workers = engine.moe_offload_cache, engine.cpu_moe_executor
        fetch = None if cache is None else cache.hybrid_fetch_fraction
        return {
            "resident_share": 1.0 if cache is None else cache.cache_size / (cache.num_layers * cache.num_experts),
            "fetch_share": fetch[0] if fetch else None,
            "cpu_threads": None if workers is None else workers.num_threads,
            "cpu_isa": None if workers is None else workers.isa,
            "attention": engine.config.attention_backend,
            "load_s": self.load_s,
            "vram_bytes": torch.cuda.max_memory_allocated(),
        }


def engine_options(case: Case) -> dict[str, Any]:
    """As its server would have them, but for room for not much more than these requests."""
    most = max(case.counts)
    longest = max(case.prompt_tokens, *case.prefill, 0)
    tokens = longest + SETTLE_TOKENS + max(case.output_tokens, WARM_UP_TOKENS, MISSES_TOKENS) + 1
    options: dict[str, Any] = {
        "moe_strategy": STRATEGIES[case.mode],
        "use_dummy_weight": True,
        "max_running_req": most,
        "cuda_graph_max_bs": most,
        "max_extend_tokens": case.longest_tokens,
        "num_token_override": max(16384, 4 * most * tokens),  # old prompts stay a while
        "max_seq_len_override": max(4096, tokens),
        "moe_cpu_threads": case.threads,
        "decode_log_interval": _QUIET,
    }
    if case.mode == "hybrid":
        options["moe_cache_size"] = case.slots
        options["moe_prefill_overlap"] = case.slots >= 2 * case.shape.experts  # two layers at a time
    return options


def timed(base: type) -> Any:
    """Its class, which notes when tokens come: `arrivals`, request -> seconds."""
    token = module("freetoken.message").DetokenizeMsg

    class Timed(base):  # type: ignore[misc]
        arrivals: dict[int, list[float]]

        def offline_send_result(self, reply: Sequence[Any]) -> None:
            now = time.perf_counter()
            for message in reply:
                if isinstance(message, token):
                    self.arrivals.setdefault(message.uid, []).append(now)
            super().offline_send_result(reply)

    return Timed


def decoded(arrivals: Sequence[Sequence[float]], made: int) -> Decoded:
    """While all requests decode, as Proa's bench counts, after SETTLE_TOKENS; each made `made`. Raises ProaError."""
    if any(len(moments) != made for moments in arrivals):
        found = ", ".join(str(len(moments)) for moments in arrivals)
        raise ProaError(f"FreeToken made {found} tokens instead of {made} each.", "See what it wrote above.")
    begin = max(moments[SETTLE_TOKENS - 1] for moments in arrivals)
    end = min(moments[-1] for moments in arrivals)
    if end <= begin:
        raise ProaError("Its requests never decoded together.", "Use more --output-tokens or fewer --requests.")
    tokens = sum(begin < moment <= end for moments in arrivals for moment in moments)
    return Decoded(len(arrivals), tokens / (end - begin))
