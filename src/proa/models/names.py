"""Parameter names -> checkpoint names, by rules. Never: tensors, shapes, files.

A rule is (pattern over Proa's names, checkpoint pattern): `{i}` is a layer, `{e}` an expert, `{p}` and `{w}`
any one word. A family passes only the rules that differ; they take precedence over HF. Every matching rule gives a
candidate, in order of precedence, since one model is published under more than one naming.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from proa.models.spec import Model

Rules = tuple[tuple[str, str], ...]

HF: Rules = (
    ("embed.weight", "model.embed_tokens.weight"),
    ("norm.weight", "model.norm.weight"),
    ("head.weight", "lm_head.weight"),
    ("blocks.{i}.norm1.weight", "model.layers.{i}.input_layernorm.weight"),
    ("blocks.{i}.norm2.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    ("blocks.{i}.mixer.q_norm.weight", "model.layers.{i}.self_attn.q_norm.weight"),
    ("blocks.{i}.mixer.k_norm.weight", "model.layers.{i}.self_attn.k_norm.weight"),
    ("blocks.{i}.mixer.{p}.{w}", "model.layers.{i}.self_attn.{p}_proj.{w}"),
    ("blocks.{i}.ffn.router.weight", "model.layers.{i}.mlp.gate.weight"),
    ("blocks.{i}.ffn.router.correction", "model.layers.{i}.mlp.gate.e_score_correction_bias"),
    ("blocks.{i}.ffn.experts.{e}.{p}.{w}", "model.layers.{i}.mlp.experts.{e}.{p}_proj.{w}"),
    ("blocks.{i}.ffn.experts.{p}.weight", "model.layers.{i}.mlp.experts.{p}_proj"),
    ("blocks.{i}.ffn.experts.{p}.bias", "model.layers.{i}.mlp.experts.{p}_proj_bias"),
    ("blocks.{i}.ffn.shared.{p}.weight", "model.layers.{i}.mlp.shared_expert.{p}_proj.weight"),
    ("blocks.{i}.ffn.shared.{p}.weight", "model.layers.{i}.mlp.shared_experts.{p}_proj.weight"),
    ("blocks.{i}.ffn.shared_gate.weight", "model.layers.{i}.mlp.shared_expert_gate.weight"),
    ("blocks.{i}.ffn.{p}.{w}", "model.layers.{i}.mlp.{p}_proj.{w}"),
)

# Tensors that may be in the file and are not parameters: (regular expression, why).
HF_IGNORED: Rules = (
    (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", "rotary frequencies follow from the config"),
    (r".*\.input_(scale|global_scale|zero_point)", "activations stay bfloat16"),
    (
        r".*\.(kv_scale|[kv]_(scale|zero_point)|[kv]_proj\.output_scale)",
        "scales of an FP8 KV cache, read by --kv-dtype fp8",
    ),
)


MTP_NOT_LOADED = "MTP (multi-token prediction) layers, not loaded"


def ignored_mtp(prefix: str, layers: int, mtp_layers: int) -> Rules:
    """Ignore rules for MTP layers, numbered from `layers` on. prefix: a regular expression up to the layer number."""
    return tuple((rf"{prefix}{layers + i}\..*", MTP_NOT_LOADED) for i in range(mtp_layers))


@dataclass(frozen=True)
class NameTable:
    """Names of one checkpoint's tensors, and how their values lie.

    stacked_out_in: layout of experts stacked in one tensor: True [E, out, in], False [E, in, out], None: decided by the
    shapes. alternating: in a fused gate_up stack, rows of gate and up are interleaved, gate first; else all gate rows
    come first. changed: (regular expression over tensor names, stored value as a function of the parameter x): "x + 1"
    or "-exp(x)".
    """

    rules: Rules = ()
    defaults: Rules = HF
    ignored: Rules = HF_IGNORED
    stacked_out_in: bool | None = None
    alternating: bool = False
    changed: Rules = ()

    def candidates(self, name: str) -> tuple[str, ...]:
        """Checkpoint names that may hold Proa's parameter `name`, in order of precedence."""
        numbers = [part for part in name.split(".") if part.isdigit()]
        letters = iter("ie")
        template = ".".join("{%s}" % next(letters) if p.isdigit() else p for p in name.split("."))  # noqa: UP031
        values = dict(zip("ie", numbers, strict=False))
        return tuple(t.format(**values) for t in _templates(self.rules + self.defaults, template))

    def how_changed(self, tensor: str) -> str:
        """The function that the file applied to this tensor's values ("x + 1", "-exp(x)"); "" if none."""
        return next((how for pattern, how in self.changed if re.fullmatch(pattern, tensor)), "")

    def why_ignored(self, tensor: str) -> str | None:
        """Why a tensor of the file need not be loaded; None if no rule ignores it."""
        return next((why for pattern, why in self.ignored if re.fullmatch(pattern, tensor)), None)


@dataclass(frozen=True)
class Declared:
    """The content of a checkpoint's config: the model's shapes and the names of its tensors."""

    spec: Model
    names: NameTable


@cache
def _templates(rules: Rules, name: str) -> tuple[str, ...]:
    """Checkpoint templates for a name with {i} and {e} in place of numbers; cached, a model has a handful."""
    found = []
    for pattern, target in rules:
        regex = re.sub(r"\\{([pw])\\}", r"(?P<\1>[a-z_]+)", re.escape(pattern))
        if match := re.fullmatch(regex, name):
            words = {"i": "{i}", "e": "{e}", **match.groupdict()}
            found.append(target.format(**words))
    return tuple(dict.fromkeys(found))
