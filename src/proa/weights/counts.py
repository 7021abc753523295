"""Bounds on a config's numbers of layers and experts, checked before an object is made for each of them. Never: shapes
(sources.py), the parts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from proa.errors import ConfigError
from proa.models.spec import Model

# Keys that count layers, in config.json and (with the architecture as prefix) in GGUF metadata.
LAYER_COUNTS = ("num_hidden_layers", "num_nextn_predict_layers")
GGUF_LAYER_COUNTS = ("block_count", "nextn_predict_layers")

# Limits for random weights, where there are no files to compare with. Published models have up to 126 layers and
# 24 000 experts.
_MOST_LAYERS, _MOST_EXPERTS = 10_000, 1_000_000
_LAYER = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d+)\.")


def refuse_more_layers(
    values: Mapping[str, Any], keys: Collection[str], tensors: Collection[str], where: str
) -> None:  # fmt: skip
    """Raise ConfigError if one of `keys` counts more layers than the tensor names `tensors` have. Without tensors
    (random weights) the limit is far beyond every published model. `where` names the config in errors.
    """
    numbers = {int(match[1]) for name in tensors if (match := _LAYER.search(name))}
    most = (len(numbers) or len(tensors)) if tensors else _MOST_LAYERS
    for key in keys:
        count = values.get(key)
        if isinstance(count, int) and count > most:
            has = f"the weight files hold {most} layers" if tensors else f"at most {most} were expected"
            raise ConfigError(
                f"{where}: {key} is {count}, but {has}.",
                "Check that config and weights belong together and that all files were downloaded.",
            )


def refuse_many_experts(spec: Model, where: str) -> None:
    """Raise ConfigError for more routed experts in all layers together than any model has."""
    experts = sum(ffn.experts for ffn in spec.routed.values())
    if experts > _MOST_EXPERTS:
        raise ConfigError(
            f"{where}: the layers have {experts} experts in total, but at most {_MOST_EXPERTS} were expected.",
            "Check the number of experts per layer.",
        )
