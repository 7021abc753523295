"""Turns SamplingParams into engine requests: fills in defaults, checks limits, assigns seeds."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from proa.errors import ConfigError, ContextLengthExceeded, RequestError
from proa.types import MOST_LOGPROBS, EngineRequest, Sampling, SamplingParams

# What only the first of n choices does: the values that switch it off for the others.
_FIRST_CHOICE_ONLY: dict[str, Any] = {"prompt_logprobs": None, "return_progress": False}
_NEUTRAL: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Read the sampling defaults of a checkpoint's generation_config.json; keys it lacks get neutral values.

    `"do_sample": false` gives temperature 0 (greedy). Raises ConfigError for a value of the wrong type or range.
    """
    values = dict(_NEUTRAL)
    for name in _NEUTRAL:
        value = generation_config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
            raise ConfigError(f"generation_config.json: {name} is {value!r}, not a number.", "Correct the file.")
        values[name] = value
    if generation_config.get("do_sample") is False:
        values["temperature"] = 0.0
    try:
        return SamplingParams(**values)  # type: ignore[arg-type]  # top_k was checked to be an int
    except RequestError as error:
        raise ConfigError(f"generation_config.json: {error.message}", error.remedy) from error


class RequestRules(msgspec.Struct, frozen=True, kw_only=True):
    """The limits and defaults that one model applies to every request: context length (tokens), vocabulary size, eos
    tokens, sampling defaults, and how many sequences its engine runs and queues."""

    context_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    defaults: SamplingParams
    max_running: int
    max_queued: int

    def settle(self, prompt: Sequence[int], params: SamplingParams) -> Sampling:
        """Fill in the defaults and check a request's parameters against the model. Raises RequestError or
        ContextLengthExceeded."""
        self._check_sequences(params)
        self._check_tokens("prompt", prompt)
        self._check_tokens("stop_token_ids", params.stop_token_ids)
        self._check_tokens("logit_bias", params.logit_bias)
        if not prompt:
            raise RequestError("The prompt is empty.", "Send at least one token.", param="prompt")
        max_tokens = self._max_tokens(len(prompt), params.max_tokens)
        if params.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, but at most {max_tokens} tokens can be generated.",
                f"Lower min_tokens to {max_tokens} or less.",
                param="min_tokens",
            )
        asked = {name: getattr(params, name) for name in _NEUTRAL}
        settled = {n: getattr(self.defaults, n) if value is None else value for n, value in asked.items()}
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            eos_token_ids=self._eos(params),
            stop_token_ids=params.stop_token_ids,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            logit_bias=params.logit_bias,
            constraint=params.constraint,
            thinking=params.thinking,
            return_progress=params.return_progress,
            **settled,
        )

    def requests(
        self, prompt: list[int], params: SamplingParams, *, priority: int = 0, salt: str = ""
    ) -> list[EngineRequest]:
        """Build the n sequences of a request. With a seed, choice i uses seed + i; without, each gets a random seed.
        Only choice 0 computes prompt logprobs, which are equal for all, and reports progress. Raises RequestError,
        ContextLengthExceeded."""
        _check_routing(priority, salt)
        sampling = self.settle(prompt, params)
        group = secrets.token_hex(8)
        requests = []
        for i in range(params.n):
            seed = secrets.randbits(64) if params.seed is None else (params.seed + i) % 2**64
            own = msgspec.structs.replace(sampling, seed=seed, **({} if i == 0 else _FIRST_CHOICE_ONLY))
            requests.append(
                EngineRequest(id=f"{group}-{i}", tokens=prompt, sampling=own, priority=priority, group=group, salt=salt)
            )
        return requests

    def _check_sequences(self, params: SamplingParams) -> None:
        name, asked = ("best_of" if params.best_of is not None else "n"), params.sequences
        most = self.max_running + self.max_queued
        if asked > most:
            raise RequestError(
                f"{name} is {asked}, but the engine holds at most {most} sequences "
                f"({self.max_running} running, {self.max_queued} waiting).",
                f"Lower {name} to {most} or raise max_queued.",
                param=name,
            )
        ends = len({*self._eos(params), *params.stop_token_ids})
        if params.use_beam_search and asked + ends > MOST_LOGPROBS:
            raise RequestError(
                f"{name} is {asked}, and {ends} tokens end an answer: a beam needs the logprobs of {asked + ends} "
                f"tokens per step, but at most {MOST_LOGPROBS} are computed.",
                f"Lower {name} to {max(1, MOST_LOGPROBS - ends)} or less.",
                param=name,
            )

    def _eos(self, params: SamplingParams) -> tuple[int, ...]:
        return () if params.ignore_eos else tuple(sorted(self.eos_token_ids))

    def _max_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        room = self.context_tokens - prompt_tokens
        if asked is None and room > 0:
            return room
        if asked is not None and asked <= room:
            return asked
        total = f"{prompt_tokens + (asked or 1)} tokens ({prompt_tokens} in the prompt, {asked or 1} to generate)"
        remedy = f"Lower max_tokens to {room} or shorten the prompt." if room > 0 else "Shorten the prompt."
        raise ContextLengthExceeded(
            f"This model's maximum context length is {self.context_tokens} tokens. However, you requested {total}.",
            remedy,
            param="max_tokens" if room > 0 else "prompt",
        )

    def _check_tokens(self, param: str, tokens: Collection[int]) -> None:
        if any(kind is not int for kind in set(map(type, tokens))):  # refuses bool and numpy integers too
            wrong = next(t for t in tokens if type(t) is not int)
            raise RequestError(f"{param}: {wrong!r} is not a token id.", "Give token ids as int.", param=param)
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.vocab_size):
            wrong = next(t for t in tokens if not 0 <= t < self.vocab_size)
            raise RequestError(
                f"{param}: token id {wrong} is not in the vocabulary.",
                f"Use ids from 0 to {self.vocab_size - 1}.",
                param=param,
            )


def _check_routing(priority: int, salt: str) -> None:
    """Check priority and salt: a wrong type would fail in the engine process's decoder and end all requests."""
    if type(priority) is not int or not -(2**31) <= priority < 2**31:
        raise RequestError(f"priority is {priority!r}.", f"Use an int, {-(2**31)} to {2**31 - 1}.", param="priority")
    if not isinstance(salt, str) or any("\ud800" <= c <= "\udfff" for c in salt):
        raise RequestError(f"salt is {salt!r}.", "Use a str without surrogate code points.", param="salt")
