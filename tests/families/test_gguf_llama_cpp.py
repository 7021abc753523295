"""The tests' GGUF files in llama.cpp itself, if llama-cpp-python is installed: its logits equal those of transformers,
so the files are what its converter would write, and Proa reads them like llama.cpp does (test_gguf_logits.py).

llama.cpp hard-codes some sizes, and rounds gpt-oss's YaRN to whole dimensions, unlike OpenAI: SIZES are those of tiny
models for which that makes no difference.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from teacher_forced import prompts
from tiny import TINY, tiny_reference
from tiny_gguf import SAID, make_tiny_gguf

api: Any = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: benchmarks/peers/README.md")

SIZES: dict[str, dict[str, Any]] = {
    **{
        name: {} for name in ("llama2", "smollm2", "llama-yarn", "qwen2", "qwen3", "qwen3-moe", "mixtral", "minimax-m2")
    },
    "deepseek-v3": {},
    "qwen2-moe": {"shared_expert_intermediate_size": 112},
    "glm4-moe": {"num_nextn_predict_layers": 0},
    "glm4-moe-groups": {"num_nextn_predict_layers": 0},
    "dots1": {"num_key_value_heads": 4},
    "ernie": {"intermediate_size": 96, "moe_layer_end_index": 4},
    "gpt-oss": {"rope_parameters": {**TINY["gpt-oss"].config["rope_parameters"], "truncate": True}},
    "qwen3-next": {"linear_value_head_dim": 16, "rms_norm_eps": 1e-6},
    "deepseek-v2": {"n_group": 1, "topk_group": 1, "topk_method": "greedy"},  # it chooses groups as DeepSeek-V3 does
    "deepseek-v2-lite": {"num_hidden_layers": 27, "hidden_size": 32},  # it knows the model by its layers
}
IN_TWO_FORMS = [name for name in SIZES if name.startswith(("deepseek", "qwen3-next"))]


def logits(file: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
    """float32 [tokens, vocab], of one step with a float32 KV cache."""
    api.llama_backend_init()
    model = api.llama_model_load_from_file(str(file).encode(), api.llama_model_default_params())
    assert model, "llama.cpp refused the file"
    wanted = api.llama_context_default_params()
    wanted.n_ctx, wanted.n_threads, wanted.n_threads_batch = 128, 1, 1
    wanted.type_k = wanted.type_v = wanted.flash_attn_type = 0
    context = api.llama_init_from_model(model, wanted)
    batch = api.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    assert api.llama_decode(context, batch) == 0
    vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    rows = [np.ctypeslib.as_array(api.llama_get_logits_ith(context, i), (vocab,)).copy() for i in range(len(tokens))]
    api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_model_free(model)
    return np.stack(rows)


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Any:
    """Silence llama.cpp's log; the callback must live as long as the library may call it."""
    hear = api.llama_log_callback(lambda level, text, context: None)
    api.llama_log_set(hear, ctypes.c_void_p(0))
    return hear


@pytest.mark.parametrize(("name", "old"), [(name, False) for name in SIZES] + [(name, True) for name in IN_TWO_FORMS])
def test_llama_cpp_computes_what_transformers_does(name: str, old: bool, tmp_path: Path) -> None:
    sizes, tokens = {**SAID[name], **SIZES[name]}, prompts([20])[0]
    got = logits(make_tiny_gguf(name, tmp_path / "m.gguf", old=old, vocabulary=False, **sizes), tokens)
    with torch.inference_mode():
        want = tiny_reference(name, **sizes)(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()
