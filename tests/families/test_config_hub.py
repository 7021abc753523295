"""config.json files as they are published: Proa accepts each one and finds the published model's numbers.

hub_configs.json has for each repository the name that docs/formats.md lists, the published number of parameters, where
the text was found, and config.json itself (with hf_quant_config.json where that says how the weights are quantised).

A number without a unit is what the Hub counts in the safetensors files, as public lists of such counts repeat it (that
of Llama 1 is keras-hub's); `counted_too` says what it counts besides the parameters that Proa has. Where the
Hub counts packed codes, the number is that of the model which was quantised. A number with a unit is the one of the
model's card or report. All hold to 0.5 %, but for what CUT_OFF names.

Missing is the model of NOT_FOUND, and DeepSeek-Coder-V2 is there by its Lite only. Missing of the publishers' own
quantised files are FP8 of Qwen3-Coder, Qwen3-Coder-Next, GLM-4.5-Air, 4.6 and 4.7 (of GLM-4.7-FP8 only what stands
before quantization_config was found; its keys are accepted), AWQ and GPTQ of Qwen2.5 and of most Qwen1.5, Qwen2 and
Qwen3, and Kimi-K2-Thinking's INT4. Entries whose origin says memory, written down, defaults, values, or "as
transformers reads it" are not the published text. Looked through were files of these names in public repositories,
exact strings of their keys, stored pages of huggingface.co, issues, articles, and the packages aiconfigurator (all
versions), gpustack, genz-llm, llm-analysis, hf-mem, llmcalc, kvfit, vidur, lmdeploy, mlx-lm, auto-round and
llmcompressor.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import pytest
import torch
import transformers

from families.hub_texts import CONFIGS, ENTRIES
from proa.models.families import declare, registry
from proa.models.gguf_architectures import ARCHITECTURES as GGUF_ARCHITECTURES
from proa.models.quantisation import legacy_modelopt, quantisation
from proa.models.spec import Attention, GatedDeltaNet, Model, Moe, Rope, RopeScaling

QUANTISED = [name for name, config in CONFIGS.items() if "quantization_config" in config]
FORMATS_PAGE = Path(__file__).parents[2] / "docs" / "formats.md"

# Models that docs/formats.md lists, but whose published config.json could not be found to be tested.
NOT_FOUND = {"MiniMax-M2.1"}

# Published numbers whose last digit is cut off instead of rounded: 142.8 billion parameters are called 142B.
CUT_OFF = {"rednote-hilab/dots.llm1.base"}

# Name: (context in tokens, KV bytes per token in bfloat16).
CACHES = {
    "Llama-1-7B (first conversion)": (2048, 524288),
    "meta-llama/Llama-2-7b-hf": (4096, 524288),
    "meta-llama/Llama-3.1-8B-Instruct": (131072, 131072),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (8192, 23040),
    "01-ai/Yi-1.5-34B": (4096, 245760),
    "Qwen/CodeQwen1.5-7B-Chat": (65536, 65536),
    "Qwen/Qwen2.5-7B-Instruct": (32768, 57344),
    "Qwen/Qwen2.5-7B-Instruct with the YaRN that its card recommends": (131072, 57344),
    "Qwen/Qwen3-8B": (40960, 147456),
    "Qwen/Qwen3-30B-A3B": (40960, 98304),
    "Qwen/Qwen2-57B-A14B": (131072, 57344),
    "Qwen/Qwen2-57B-A14B-Instruct": (32768, 57344),
    "Qwen/Qwen1.5-MoE-A2.7B": (8192, 196608),
    "mistralai/Mixtral-8x7B-v0.1": (32768, 131072),
    "mistralai/Mixtral-8x22B-v0.1": (65536, 229376),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (262144, 24576),
    "Qwen/Qwen3-Coder-Next": (262144, 24576),
    "zai-org/GLM-4.5-Air": (131072, 188416),
    "zai-org/GLM-4.6": (202752, 376832),
    "zai-org/GLM-4.7": (202752, 376832),
    "baidu/ERNIE-4.5-300B-A47B-PT": (131072, 221184),
    "ibm-granite/granite-3.1-1b-a400m-instruct": (131072, 49152),
    "MiniMaxAI/MiniMax-M2": (196608, 253952),
    "MiniMaxAI/MiniMax-M2 as changed for transformers 5": (196608, 253952),
    "rednote-hilab/dots.llm1.base": (32768, 1015808),
    "deepseek-ai/DeepSeek-Coder-V2-Lite-Base": (163840, 31104),
    "deepseek-ai/DeepSeek-V2.5": (163840, 69120),
    "deepseek-ai/DeepSeek-V3": (163840, 70272),
    "moonshotai/Kimi-K2-Instruct": (131072, 70272),
}


def spec_of(name: str) -> Model:
    return declare(CONFIGS[name]).spec


def published(text: str) -> tuple[float, float]:
    """Parse "30.5B": the number, and one unit of its last digit."""
    digits, unit = re.fullmatch(r"([\d.]+)([MB]?)", text).groups()  # type: ignore[union-attr]
    scale = {"": 1.0, "M": 1e6, "B": 1e9}[unit]
    decimals = len(digits.partition(".")[2])
    return float(digits) * scale, 10.0**-decimals * scale


def mtp_layer_params(spec: Model) -> int:
    """Parameters of one MTP layer, which Proa does not load: a block like the last one, a projection of two
    hidden states to one, and three norms."""
    block = f"blocks.{len(spec.blocks) - 1}."
    own = sum(prod(shape) for name, shape in spec.params() if name.startswith(block))
    return own + 2 * spec.hidden**2 + 3 * spec.hidden


def more_params(spec: Model, what: str | None) -> int:
    """Parameters in the published number that Proa does not count."""
    embedding = spec.vocab * spec.hidden
    return {
        None: 0,
        "the head, which is the embedding": embedding,
        "an MTP layer": mtp_layer_params(spec),
        "an MTP layer, its embedding and its head": mtp_layer_params(spec) + 2 * embedding,
    }[what]


@pytest.mark.one_table
@pytest.mark.parametrize("name", ENTRIES)
def test_published_number_of_parameters(name: str) -> None:
    spec, entry = spec_of(name), ENTRIES[name]
    found = spec.num_params + more_params(spec, entry.get("counted_too"))
    number, unit = published(entry["parameters"])
    if name in CUT_OFF:
        assert number <= found < number + unit
    else:
        assert found == pytest.approx(number, rel=0.005)


@pytest.mark.one_table
@pytest.mark.parametrize("name", [name for name in CONFIGS if "Llama-1" not in name])
def test_as_many_parameters_as_transformers(name: str) -> None:
    config = {key: value for key, value in CONFIGS[name].items() if key != "quantization_config"}
    model_class = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(config))
    corrections = sum(b.numel() for key, b in model.named_buffers() if key.endswith("e_score_correction_bias"))
    assert spec_of(name).num_params == model.num_parameters() + corrections


@pytest.mark.one_table
@pytest.mark.parametrize("name", CACHES)
def test_context_and_cache(name: str) -> None:
    spec = spec_of(name)
    assert (spec.max_positions, spec.kv_bytes_per_token(2)) == CACHES[name]


def test_quantisations() -> None:
    found = {}
    for name in QUANTISED:
        read = quantisation(CONFIGS[name])
        assert read
        found[name] = (read.method, read.activations)
    fp8, nvfp4 = ("fp8", "FP8, dynamic"), ("modelopt", "NVFP4 and a KV cache of FP8")
    assert found == {
        "nvidia/Llama-3.1-70B-Instruct-FP8": ("modelopt", "FP8 and a KV cache of FP8"),
        "Qwen/Qwen1.5-14B-Chat-AWQ": ("awq", ""),
        "Qwen/CodeQwen1.5-7B-Chat-AWQ": ("awq", ""),
        "Qwen/Qwen2-7B-Instruct-GPTQ-Int4": ("gptq", ""),
        "Qwen/Qwen1.5-MoE-A2.7B-Chat-GPTQ-Int4": ("gptq", ""),
        "Qwen/Qwen3-8B-FP8": fp8,
        "Qwen/Qwen3-32B-FP8": fp8,
        "Qwen/Qwen3-32B-FP8-Static-PerTensor": ("modelopt", "FP8 and a KV cache of FP8"),
        "Qwen/Qwen3-32B-AWQ": ("awq", ""),
        "Qwen/Qwen3-30B-A3B-FP8": fp8,
        "Qwen/Qwen3-30B-A3B-GPTQ-Int4": ("gptq", ""),
        "Qwen/Qwen3-30B-A3B-Thinking-2507-FP8": fp8,
        "Qwen/Qwen3-235B-A22B-FP8": fp8,
        "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": fp8,
        "nvidia/Qwen3-235B-A22B-NVFP4": nvfp4,
        "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8": fp8,
        "zai-org/GLM-4.5-FP8": ("compressed-tensors", "FP8"),
        "MiniMaxAI/MiniMax-M2": fp8,
        "MiniMaxAI/MiniMax-M2 as changed for transformers 5": fp8,
        "MiniMaxAI/MiniMax-M2.5": fp8,
        "nvidia/MiniMax-M2.5-NVFP4": nvfp4,
        "MiniMaxAI/MiniMax-M2.7": fp8,
        "nvidia/MiniMax-M2.7-NVFP4": nvfp4,
        "deepseek-ai/DeepSeek-V3": fp8,
        "deepseek-ai/DeepSeek-R1": fp8,
        "deepseek-ai/DeepSeek-V3.1": fp8,
        "nvidia/DeepSeek-V3.1-NVFP4": nvfp4,
        "moonshotai/Kimi-K2-Instruct": fp8,
        "openai/gpt-oss-20b": ("mxfp4", ""),
        "openai/gpt-oss-120b": ("mxfp4", ""),
    }


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-32B-FP8-Static-PerTensor", "nvidia/MiniMax-M2.5-NVFP4", "nvidia/MiniMax-M2.7-NVFP4"]
)
def test_config_and_hf_quant_config_say_the_same(name: str) -> None:
    old = {"quantization_config": legacy_modelopt(ENTRIES[name]["hf_quant_config"])}
    assert quantisation(old) == quantisation(ENTRIES[name]["config"])


def test_rope() -> None:
    assert spec_of("meta-llama/Llama-2-7b-hf").mixers[0].rope == Rope(128, 10000.0)
    assert spec_of("HuggingFaceTB/SmolLM2-135M-Instruct").mixers[0].rope == Rope(64, 100000.0)
    scaling = RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert spec_of("meta-llama/Llama-3.1-8B-Instruct").mixers[0].rope == Rope(128, 500000.0, scaling)
    yarn = spec_of("Qwen/Qwen2.5-7B-Instruct with the YaRN that its card recommends")
    assert yarn.mixers[0].rope == Rope(128, 1000000.0, RopeScaling("yarn", 4.0, 32768))


def test_routers() -> None:
    """For each documented model that routes: experts, of them chosen, their width, renormalised, shared gate."""
    found: dict[str, set[tuple[int, int, int, bool, bool]]] = {}
    for name, entry in ENTRIES.items():
        ffn = spec_of(name).blocks[-1].ffn
        if isinstance(ffn, Moe):
            numbers = (ffn.experts, ffn.top_k, ffn.width, ffn.router.renormalise, ffn.shared_gate)
            found.setdefault(entry["documented"], set()).add(numbers)
    assert found == {
        "Qwen3-30B-A3B": {(128, 8, 768, True, False)},
        "Qwen3-235B-A22B": {(128, 8, 1536, True, False)},
        "Qwen3-Coder-30B-A3B": {(128, 8, 768, True, False)},
        "Qwen3-Coder-480B-A35B": {(160, 8, 2560, True, False)},
        "Qwen2-57B-A14B": {(64, 8, 2560, False, True)},
        "Qwen1.5-MoE-A2.7B": {(60, 4, 1408, False, True)},
        "Mixtral 8x7B": {(8, 2, 14336, True, False)},
        "Mixtral 8x22B": {(8, 2, 16384, True, False)},
        "Qwen3-Next-80B-A3B": {(512, 10, 512, True, True)},
        "Qwen3-Coder-Next": {(512, 10, 512, True, True)},
        "GLM-4.5": {(160, 8, 1536, True, False)},
        "GLM-4.5-Air": {(128, 8, 1408, True, False)},
        "GLM-4.6": {(160, 8, 1536, True, False)},
        "GLM-4.7": {(160, 8, 1536, True, False)},
        "MiniMax-M2": {(256, 8, 1536, True, False)},
        "MiniMax-M2.5": {(256, 8, 1536, True, False)},
        "MiniMax-M2.7": {(256, 8, 1536, True, False)},
        "ERNIE-4.5-21B-A3B": {(64, 6, 1536, True, False)},
        "ERNIE-4.5-300B-A47B": {(64, 8, 3584, True, False)},
        "Granite-3.1-1B-A400M": {(32, 8, 512, True, False)},
        "Granite-3.1-3B-A800M": {(40, 8, 512, True, False)},
        "dots.llm1": {(128, 6, 1408, True, False)},
        "DeepSeek-V2": {(160, 6, 1536, False, False)},
        "DeepSeek-V2.5": {(160, 6, 1536, False, False)},
        "DeepSeek-Coder-V2": {(64, 6, 1408, False, False)},
        "DeepSeek-V2-Lite": {(64, 6, 1408, False, False)},
        "DeepSeek-V3": {(256, 8, 2048, True, False)},
        "DeepSeek-V3.1": {(256, 8, 2048, True, False)},
        "DeepSeek-R1": {(256, 8, 2048, True, False)},
        "Kimi-K2": {(384, 8, 2048, True, False)},
        "gpt-oss-20b": {(32, 4, 2880, True, False)},
        "gpt-oss-120b": {(128, 4, 2880, True, False)},
        "OLMoE-1B-7B": {(64, 8, 1024, False, False)},
    }


def test_both_published_forms_of_minimax_m2_are_one_model() -> None:
    assert spec_of("MiniMaxAI/MiniMax-M2") == spec_of("MiniMaxAI/MiniMax-M2 as changed for transformers 5")


def test_only_gpt_oss_slides() -> None:
    sliding = {name for name in CONFIGS if any(m.window for m in spec_of(name).mixers if isinstance(m, Attention))}
    assert sliding == {"openai/gpt-oss-20b", "openai/gpt-oss-120b"}


def test_qwen3_next() -> None:
    spec = spec_of("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert [isinstance(block.mixer, Attention) for block in spec.blocks] == [False, False, False, True] * 12
    assert spec.blocks[0].mixer == GatedDeltaNet(2048, 16, 32, 128, 128, 4)
    assert spec.ropes == {Rope(64, 1e7)}
    assert spec.state_bytes_per_sequence(2) == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert (spec.norm_offset, spec.recurrent) == (1.0, True)


def test_qwen3_coder_next_is_qwen3_next_with_half_its_theta() -> None:
    coder, instruct = spec_of("Qwen/Qwen3-Coder-Next"), spec_of("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert coder.ropes == {Rope(64, 5e6)}
    assert [type(block.mixer) for block in coder.blocks] == [type(block.mixer) for block in instruct.blocks]
    assert list(coder.params()) == list(instruct.params())


def documented() -> list[tuple[set[str], set[str], set[str]]]:
    """Each row of the first table of docs/formats.md: architectures, models (up to a semicolon), GGUF architectures."""
    table = FORMATS_PAGE.read_text("utf-8").partition("## Architectures")[2].partition("\n\nRoPE")[0]
    rows = [
        line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `") and "ForCausalLM" in line
    ]
    return [
        (
            set(re.findall("`([^`]+)`", architectures)),
            {name.strip() for name in models.partition(";")[0].split(",")},
            {name for name in re.findall("`([^`]+)`", gguf) if not name.startswith("--")},
        )
        for architectures, models, gguf in rows
    ]


def test_documented_architectures() -> None:
    rows = documented()
    assert sorted(name for row in rows for name in row[0]) == sorted(registry())
    assert {name for row in rows for name in row[2]} == set(GGUF_ARCHITECTURES)


def test_documented_models() -> None:
    """Each documented model has an entry of its row's architecture, unless its config was not found."""
    for architectures, models, _ in documented():
        found = {e["documented"] for e in ENTRIES.values() if e["config"]["architectures"][0] in architectures}
        assert found == models - NOT_FOUND
    assert {name for row in documented() for name in row[1]} >= NOT_FOUND
