"""A real checkpoint of one layer that says given texts: for tests of servers and clients with a real engine.

The next token depends on the last token alone: attention and MLP add zero, embeddings are nearly orthogonal codes, and
the row of the head that belongs to a token is the code of the token before it. Every token of a script has an id of
its own. Its spelling ends with its number in digits of the private use area, which the tokenizer's decoder removes; so
scripts may repeat text and special tokens. The chat template looks for a script's key in the messages, and ends the
prompt with the token from which that script starts.

    write_scripted_model(folder, {"weather?": ["<tool_call>...</tool_call>", "It is sunny."], "": "Hello!"})

answers "weather?" with a call, the turn after it (the tool's result) with "It is sunny.", and all else with "Hello!".
Any temperature gives the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

# What one answer says: a text, in which the texts of special tokens become these tokens; or its tokens, one by one. A
# piece of several tokens' texts ("<tool", "_call>") is how a model writes the look of a special token in plain text.
Script = str | tuple[str, ...]

ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# A short template of Qwen3's form.
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' ~ (tool | tojson) }}{%- endfor %}
    {{- '\n</tools>\nA call is\n<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' ~ messages[0].content ~ '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' ~ m.content ~ '\n</tool_response><|im_end|>\n' }}
    {%- elif m.role != 'system' %}
        {{- '<|im_start|>' ~ m.role ~ '\n' }}
        {%- if m.reasoning_content %}{{- '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}{%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- (call.function.arguments | tojson) ~ '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

_SELECT = """
{%- set scripts = SCRIPTS -%}
{%- set chosen = namespace(key='', turn=0, tail='') -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{%- set chosen.turn = chosen.turn + 1 -%}{%- else -%}
{%- set said = m.content | default('', true) -%}
{%- set said = said if said is string else said | map(attribute='text') | join(' ') -%}
{%- for key in scripts if key and key in said -%}
{%- set chosen.key = key -%}{%- set chosen.turn = 0 -%}
{%- endfor -%}{%- endif -%}{%- endfor -%}
{%- for tail in TAILS if rendered.endswith(tail) and not chosen.tail -%}{%- set chosen.tail = tail -%}{%- endfor -%}
{%- set turns = scripts[chosen.key] -%}
{{- rendered[: rendered | length - chosen.tail | length] -}}
{%- if add_generation_prompt -%}
{{- '<|say:' ~ turns[[chosen.turn, turns | length - 1] | min] ~ '|>' -}}
{%- endif -%}{{- chosen.tail -}}"""

_RANDOM, _FLAGS = 128, 16  # dimensions of a code: random signs; per end token, signs that say that it follows
_BASE_VOCAB = 1500
_PIECE_CHARS = 3


def write_scripted_model(
    folder: Path,
    scripts: Mapping[str, Script | Sequence[Script]],
    *,
    template: str = QWEN3,
    added: Sequence[str] = ADDED,
    special: Sequence[str] = (),
    ends: Sequence[str] = ("<|im_end|>",),
    openings: Sequence[str] = (),
) -> Path:
    """Write config.json, weights, tokenizer and template to `folder`; return it.

    scripts: by key, the answer for conversations in which a message that is not the assistant's contains the key: the
    last such message counts, in it the last key. A list has the answer for each assistant's turn since then, and
    repeats its last one. The key "" is for conversations without a key.
    added, special: tokens of the vocabulary that are written as these texts; only `special` are removed by
    skip_special_tokens. ends: special tokens that end an answer: a script's own last token, else the first one.
    openings: what `template` may end a prompt with, such as "<think>\\n", and the script continues.
    """
    keyed = {key: list(turns) if isinstance(turns, list) else [turns] for key, turns in {"": "", **scripts}.items()}
    numbers = iter(range(sum(map(len, keyed.values()))))
    table = {key: [next(numbers) for _ in turns] for key, turns in keyed.items()}
    vocabulary = _Vocabulary(added, special, ends)
    tails = sorted(openings, key=len, reverse=True)
    for number, script in enumerate(script for turns in keyed.values() for script in turns):
        vocabulary.add_script([f"<|say:{number}|>{tail}" for tail in ("", *tails)], script)
    folder.mkdir(parents=True, exist_ok=True)
    selection = _SELECT.replace("SCRIPTS", json.dumps(table, ensure_ascii=False)).replace("TAILS", json.dumps(tails))
    _write_tokenizer(folder, vocabulary, "{%- set rendered %}" + template + "{% endset -%}" + selection)
    _write_weights(folder, vocabulary)
    return folder


@dataclass
class _Vocabulary:
    """Spellings by id, and which token follows which."""

    added: Sequence[str]
    special: Sequence[str]
    ends: Sequence[str]
    backend: tokenizers.Tokenizer = field(default_factory=lambda: _base_tokenizer())
    tokens: list[tuple[str, bool | None]] = field(default_factory=list)  # spelling; special, plain added, or ordinary
    follows: dict[int, int] = field(default_factory=dict)  # (number in `tokens`) -> (number in `tokens`)
    flagged: dict[int, int] = field(default_factory=dict)  # number in `tokens` -> index of the end token that follows

    def __post_init__(self) -> None:
        self.tokens += [(text, True) for text in (*self.ends, *self.special)]
        self.tokens += [(text, False) for text in self.added]

    def add_script(self, selectors: Sequence[str], script: Script) -> None:
        """Add the selectors, all of which start `script`, and a new token for each of its pieces."""
        pieces = list(self._pieces(script)) if isinstance(script, str) else list(script)
        end = self.ends.index(pieces.pop()) if pieces and pieces[-1] in self.ends else 0
        before = []
        for selector in selectors:
            before.append(len(self.tokens))
            self.tokens.append((selector, True))
        kinds = {**dict.fromkeys(self.added, False), **dict.fromkeys((*self.special, *self.ends), True)}
        for piece in pieces:
            number = len(self.tokens)
            digits = "".join(chr(0xE000 + int(digit)) for digit in str(number))
            spelling = piece if piece in kinds else piece.replace(" ", "\u2581")
            self.tokens.append((spelling + digits, kinds.get(piece)))
            self.follows.update(dict.fromkeys(before, number))
            before = [number]
        self.flagged.update(dict.fromkeys(before, end))

    def _pieces(self, text: str) -> Iterator[str]:
        names = sorted((*self.added, *self.special, *self.ends), key=len, reverse=True)
        start = 0
        while start < len(text):
            name = next((n for n in names if text.startswith(n, start)), None)
            nearest = min((i for n in names if (i := text.find(n, start)) >= 0), default=len(text))
            piece = name or text[start : min(nearest, start + _PIECE_CHARS)]
            yield piece
            start += len(piece)


def _base_tokenizer() -> tokenizers.Tokenizer:
    """Train a small BPE tokenizer for prompts; characters that it does not know are bytes."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581?[^\u2581]+|\u2581+"), "isolated")
    here = Path(__file__).resolve().parents[1]
    corpus = [(here / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")]
    trainer = trainers.BpeTrainer(vocab_size=_BASE_VOCAB, show_progress=False)
    backend.train_from_iterator(corpus, trainer)
    return backend


def _write_tokenizer(folder: Path, vocabulary: _Vocabulary, template: str) -> None:
    model = json.loads(vocabulary.backend.to_str())["model"]
    known = [f"<0x{byte:02X}>" for byte in range(256)]
    known += sorted(model["vocab"], key=model["vocab"].__getitem__)
    known += [text for text, _ in vocabulary.tokens]
    vocab = {text: number for number, text in enumerate(known)}
    assert len(vocab) == len(known), "two tokens have the same spelling"
    merges = [tuple(pair) for pair in model["merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    backend.normalizer, backend.pre_tokenizer = vocabulary.backend.normalizer, vocabulary.backend.pre_tokenizer
    digits = [decoders.Replace(chr(0xE000 + digit), "") for digit in range(10)]
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), *digits, decoders.ByteFallback(), decoders.Fuse()]
    )
    for text, kind in vocabulary.tokens:
        if kind is not None:
            backend.add_tokens([AddedToken(text, special=kind, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": vocabulary.ends[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _write_weights(folder: Path, vocabulary: _Vocabulary) -> None:
    vocab = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    ids = [vocab[text] for text, _ in vocabulary.tokens]
    hidden = _RANDOM + _FLAGS * len(vocabulary.ends)
    hidden += -hidden % 64
    signs = torch.randint(0, 2, (len(vocab), hidden), generator=torch.Generator().manual_seed(0))
    codes = (2 * signs - 1).float()
    codes[:, _RANDOM:] = -1
    codes[:, _RANDOM : _RANDOM + _FLAGS] = 1  # an answer that does not begin with a selector ends at once
    for number in vocabulary.follows:
        codes[ids[number], _RANDOM:] = -1
    for number, end in vocabulary.flagged.items():
        codes[ids[number], _RANDOM:] = -1
        codes[ids[number], _RANDOM + _FLAGS * end : _RANDOM + _FLAGS * (end + 1)] = 1
    head = torch.zeros(len(vocab), hidden)
    for before, after in vocabulary.follows.items():
        head[ids[after]] += codes[ids[before]]
    for end in range(len(vocabulary.ends)):
        head[ids[end], _RANDOM + _FLAGS * end : _RANDOM + _FLAGS * (end + 1)] = hidden / _FLAGS
    width = 64
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": codes,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(hidden),
        f"{layer}input_layernorm.weight": torch.ones(hidden),
        f"{layer}post_attention_layernorm.weight": torch.ones(hidden),
        f"{layer}self_attn.q_proj.weight": torch.zeros(2 * width, hidden),
        f"{layer}self_attn.k_proj.weight": torch.zeros(width, hidden),
        f"{layer}self_attn.v_proj.weight": torch.zeros(width, hidden),
        f"{layer}self_attn.o_proj.weight": torch.zeros(hidden, 2 * width),
        f"{layer}mlp.gate_proj.weight": torch.zeros(width, hidden),
        f"{layer}mlp.up_proj.weight": torch.zeros(width, hidden),
        f"{layer}mlp.down_proj.weight": torch.zeros(hidden, width),
    }
    save_file({name: value.bfloat16() for name, value in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": len(vocab),
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": width,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "eos_token_id": [ids[end] for end in range(len(vocabulary.ends))],
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
