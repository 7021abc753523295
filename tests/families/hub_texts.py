"""The published config.json files of tests/families/hub_configs.json, by repository. Never: tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from proa.models.quantisation import legacy_modelopt

ENTRIES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("hub_configs.json").read_bytes())
CONFIGS: dict[str, dict[str, Any]] = {
    name: {"quantization_config": legacy_modelopt(entry["hf_quant_config"]), **entry["config"]}
    if "hf_quant_config" in entry
    else entry["config"]
    for name, entry in ENTRIES.items()
}
