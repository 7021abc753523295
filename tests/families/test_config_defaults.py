"""Keys that a config leaves out mean what transformers' config classes take for them."""

from __future__ import annotations

import json

import pytest
import transformers

from proa.models.families import declare, registry
from tiny import TINY

BY_ARCHITECTURE = {architecture: config for architecture, config in TINY.values() if "layer_types" not in config}


def test_every_architecture_is_here() -> None:
    assert {*BY_ARCHITECTURE, "LLaMAForCausalLM"} == {*registry()}


@pytest.mark.parametrize("architecture", BY_ARCHITECTURE)
def test_the_context_of_a_config_without_it(architecture: str) -> None:
    config_class = getattr(transformers, architecture).config_class
    values = json.loads(config_class(**BY_ARCHITECTURE[architecture]).to_json_string(use_diff=False))
    values |= {"architectures": [architecture], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    del values["max_position_embeddings"]
    assert declare(values).spec.max_positions == config_class().max_position_embeddings
