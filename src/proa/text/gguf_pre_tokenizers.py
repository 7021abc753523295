"""Pre-tokenizers of byte-level BPE (how text is split into words) by their GGUF name, tokenizer.ggml.pre.

GGUF files store only the name. The regular expressions are those of llama.cpp (src/llama-vocab.cpp) and of the models'
own tokenizer.json; where the two are written differently, this table has the latter, made for the same regex engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Regex, pre_tokenizers

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _ENDING +
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _ENDING +
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
# Han characters form words of their own and are part of no other word.
_KIMI_SPLIT = r"[\p{Han}]+|" + _O200K_SPLIT.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("[\\r\\n/]*", "[\\r\\n]*")
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3_SPLIT = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_SCRIPTS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
# Code points of the cased letters that DeepSeek-LLM's tokenizer lists: not all scripts that have upper and lower case.
_CASED = """
    B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5
    3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A
    1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4
    1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128
    212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D
    A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F
    104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
"""


def _characters(ranges: str) -> str:
    """Convert hexadecimal code point ranges, such as "C0-D6 D8", to the inside of a regex character class."""
    return re.sub(r"\s", "", re.sub(r"[0-9A-F]+", lambda point: chr(int(point[0], 16)), ranges))


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _splits(*regexes: str) -> Callable[[], Any]:
    """Return a factory that applies the regexes in order, each to the words that the previous ones produced."""
    return lambda: pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in regexes),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx")
PRE_TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2"), _gpt2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _single_digits),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _splits(_QWEN2_SPLIT)),
    **dict.fromkeys((*LLAMA3, "glm4", "chatglm-bpe"), _splits(_LLAMA3_SPLIT)),
    "tekken": _splits(_TEKKEN_SPLIT),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _splits(_O200K_SPLIT)),
    "kimi-k2": _splits(_KIMI_SPLIT),
    "deepseek-llm": _splits(
        "[\r\n]", rf"\s?[A-Za-z{_characters(_CASED)}]+", _DEEPSEEK_MARKS, r"\s+$", _DEEPSEEK_SCRIPTS, r"\p{N}"
    ),
    "deepseek-coder": _splits("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_SCRIPTS, r"\p{N}"),
    "deepseek-v3": _splits(r"\p{N}{1,3}", _CJK, _DEEPSEEK3_SPLIT),
}
# A word that is itself a vocabulary entry becomes that token, without applying merges.
IGNORE_MERGES = frozenset((*LLAMA3, "tekken"))
# The original tokenizer.json normalises text to Unicode NFC first.
NFC = frozenset(("qwen2", "deepseek-r1-qwen", "megrez"))
