"""Typed, strict reading of a checkpoint's configuration. Never: knowledge of any family.

A family reads every key it understands. A key that is left over is an error, so that a new key that changes
the maths is never skipped silently. A key whose value is null counts as absent, whether a family reads it or not:
tools write null for every field that they leave unset.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import Any, Final, TypeVar, overload

from proa.errors import ConfigError

T = TypeVar("T")
D = TypeVar("D")


class _Missing(Enum):
    REQUIRED = auto()


REQUIRED: Final = _Missing.REQUIRED

# Keys that no family reads because they cannot change the logits.
BOOKKEEPING = frozenset({
    # provenance
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "attn_implementation",
    "auto_map", "is_llama_config", "model_name", "model_type", "name_or_path", "transformers.js_config",
    "transformers_version", "unsloth_fixed", "unsloth_version",
    # fields of transformers' base class that mean nothing to a causal language model
    "chunk_size_feed_forward", "finetuning_task", "id2label", "is_encoder_decoder", "label2id", "problem_type",
    "task_specific_params", "tokenizer_class", "torchscript",
    # read by weights/ and models/quantisation.py: how tensors are stored
    "compression_config", "dtype", "quantization_config", "torch_dtype",
    # training
    "attention_dropout", "hidden_dropout", "initializer_range", "output_router_logits", "pretraining_tp",
    "router_aux_loss_coef", "router_jitter_noise",
    # running and sampling; generation_config.json has the values that count
    "bos_token_id", "do_sample", "eos_token_id", "max_length", "output_attentions", "output_hidden_states",
    "pad_token_id", "return_dict", "temperature", "top_k", "top_p", "use_cache",
})  # fmt: skip


class Reader:
    """One JSON object of a config. `where` names it in errors; `ignore_keys` may stay unread."""

    def __init__(
        self, values: Mapping[str, Any], where: str = "config.json", ignore_keys: Collection[str] = ()
    ) -> None:
        self._values = values
        self._where = where
        self._ignore_keys = ignore_keys
        self._seen: set[str] = set()
        self._subs: list[Reader] = []

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys whose value is not null."""
        return tuple(key for key in self._values if self.has(key))

    def has(self, key: str) -> bool:
        """True if the key is present and not null."""
        return self._values.get(key) is not None

    @overload
    def get(self, key: str, kind: type[T]) -> T: ...
    @overload
    def get(self, key: str, kind: type[T], default: D) -> T | D: ...
    def get(self, key: str, kind: type[Any], default: Any = REQUIRED) -> Any:
        """Read one key; null counts as absent, and an int is accepted as a float. Raises ConfigError."""
        self._seen.add(key)
        value = self._values.get(key)
        if value is None:
            if default is REQUIRED:
                raise self.error(f"the key {key!r} is missing")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.error(f"{key!r} must be a value of type {kind.__name__}, but it is {value!r}")
        return value

    @overload
    def size(self, key: str) -> int: ...
    @overload
    def size(self, key: str, default: D) -> int | D: ...
    def size(self, key: str, default: Any = REQUIRED) -> Any:
        """Read an integer of at least 1."""
        value = self.get(key, int, default)
        if self.has(key) and value < 1:
            raise self.error(f"{key!r} must be at least 1, but it is {value}")
        return value

    @overload
    def get_any(self, keys: tuple[str, ...], kind: type[T]) -> T: ...
    @overload
    def get_any(self, keys: tuple[str, ...], kind: type[T], default: D) -> T | D: ...
    def get_any(self, keys: tuple[str, ...], kind: type[Any], default: Any = REQUIRED) -> Any:
        """Read a value that may stand under several keys; those that are present must agree. Raises ConfigError."""
        found = {key: self.get(key, kind) for key in keys if self.has(key)}
        self._seen.update(keys)
        if not found:
            return self.get(keys[0], kind, default)
        values = list(found.values())
        if any(value != values[0] for value in values):
            raise self.error(f"these keys mean the same and must agree: {found}")
        return values[0]

    def assume(self, key: str, value: object) -> None:
        """Read an absent or null key as `value` from now on: the family's default for a reader that others share."""
        if not self.has(key):
            self._values = {**self._values, key: value}

    def value(self, key: str) -> Any:
        """Read one key of any type; None if it is absent or null."""
        self._seen.add(key)
        return self._values.get(key)

    def expect(self, key: str, *allowed: object) -> None:
        """Raise ConfigError unless the key is absent, null or one of these values, which are the implemented ones."""
        self._seen.add(key)
        value = self._values.get(key)
        if value is not None and value not in allowed:
            choices = ", ".join(repr(a) for a in allowed) or "null"
            raise self.error(f"{key} = {value!r} is not implemented, only {choices}")

    def ignore(self, why: str, *keys: str) -> None:
        """Count keys as read that do not change this family's logits; `why` documents the call and is not used."""
        self._seen.update(keys)

    def sub(self, key: str) -> Reader:
        """A reader of the object under `key`, empty if absent; `refuse_unread` checks it together with this one."""
        inner = Reader(self.get(key, dict, {}), f"{self._where}: {key}", self._ignore_keys)
        self._subs.append(inner)
        return inner

    def error(self, problem: str) -> ConfigError:
        """Make a ConfigError that names this object, for the caller to raise."""
        return ConfigError(
            f"{self._where}: {problem}.",
            "Check that the file is complete and belongs to this model; --override-config KEY=JSON replaces a key.",
        )

    def rest(self) -> dict[str, Any]:
        """Keys with a value that have not been read so far."""
        read = self._seen | BOOKKEEPING | set(self._ignore_keys)
        return {key: self._values[key] for key in sorted(self.keys) if key not in read}

    def refuse_unread(self) -> None:
        """Raise ConfigError if a key with a value has not been read, here or in an object of `sub`."""
        left = self.rest()
        if left:
            shown = ", ".join(f"{key} = {value!r}"[:120] for key, value in left.items())
            flags = " ".join(f"--ignore-config-key {key}" for key in left)
            raise ConfigError(
                f"{self._where}: {len(left)} key(s) that Proa does not know for this architecture: {shown}.",
                f"They may change what the model computes. If you know that they do not, add {flags}.",
            )
        for inner in self._subs:
            inner.refuse_unread()
