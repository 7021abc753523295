"""Tokenizers of checkpoints: folders, GGUF files; missing and damaged files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from transformers import TokenizersBackend

from fakes import CHATML, make_tokenizer
from proa.errors import RequestError, TokenizerError, WeightsError
from proa.text.sentencepiece import CONTROL, NORMAL
from proa.text.tokenizer import Tokenizer
from proa.text.tokenizer_source import wrap_in
from proa.types import Chat
from unit.sentencepiece_models import PIECES, SP_TEXTS, model_proto

USER = Chat(messages=[{"role": "user", "content": "Hello"}])
TEXTS = ("Hello world", "  two spaces", "über 12345 😀\n\nnew", "<|im_start|>user\nx<|im_end|>", "")


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content = {k: v for k, v in {**content, **changes}.items() if v is not None}
    path.write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "model")


# ---- folders ----


def test_encodes_as_the_library_does(folder: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    for text in TEXTS:
        assert tokenizer.encode(text) == library.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.vocab_size == library.get_vocab_size()


def test_a_file_of_a_folder_stands_for_the_folder(folder: Path) -> None:
    whole, by_file = Tokenizer.load(folder), Tokenizer.load(folder / "tokenizer.json")
    assert by_file.encode("Hello") == whole.encode("Hello")
    assert by_file.template is not None


def test_a_chat_is_rendered_and_gets_no_special_tokens_twice(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", add_bos_token=True, chat_template="{{ bos_token }}" + CHATML)
    tokenizer = Tokenizer.load(folder)
    text = "<|endoftext|><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render(USER) == text
    assert tokenizer.encode(text, add_special_tokens=False).count(0) == 1


@pytest.mark.parametrize(
    ("config", "around"),
    [
        ({}, ([], [])),
        ({"add_bos_token": True}, ([0], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([0], [2])),
        ({"add_bos_token": False}, ([], [])),
        ({"add_bos_token": True, "bos_token": {"content": "<|im_start|>", "lstrip": False}}, ([1], [])),
    ],
)
def test_bos_and_eos_are_added_as_configured(
    folder: Path, config: dict[str, Any], around: tuple[list[int], list[int]]
) -> None:
    edit(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast", **config)
    tokenizer = Tokenizer.load(folder)
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [*around[0], *plain, *around[1]]


@pytest.mark.parametrize("config", [{}, {"add_eos_token": False}, {"add_bos_token": None}])
def test_the_bos_of_tokenizer_json_stays_unless_the_config_speaks_of_it(folder: Path, config: dict[str, Any]) -> None:
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    wrap_in(library, "<|endoftext|>", None)
    library.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    about = {"bos_token": "<|endoftext|>", "tokenizer_class": "LlamaTokenizerFast"}
    path.write_text(json.dumps(json.loads(path.read_text()) | config | about))
    assert Tokenizer.load(folder).encode("Hello") == library.encode("Hello").ids
    edit(folder / "tokenizer_config.json", add_bos_token=False)
    assert Tokenizer.load(folder).encode("Hello") == library.encode("Hello", add_special_tokens=False).ids


@pytest.mark.parametrize("adds", [{"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("bos", [None, "<|endoftext|>"])
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", None])
def test_classes_without_switches_add_what_tokenizer_json_adds(
    folder: Path, name: str | None, bos: str | None, adds: dict[str, Any]
) -> None:
    """These classes of transformers, 4 and 5, do not read add_bos_token."""
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    wrap_in(library, bos, None)
    library.save(str(folder / "tokenizer.json"))
    edit(folder / "tokenizer_config.json", tokenizer_class=name, bos_token="<|endoftext|>", **adds)
    assert Tokenizer.load(folder).encode("Hello") == library.encode("Hello").ids
    assert TokenizersBackend.from_pretrained(folder).encode("Hello") == library.encode("Hello").ids


def test_a_bos_that_is_no_token_is_refused(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer", add_bos_token=True, bos_token="<s>")
    with pytest.raises(TokenizerError, match="add '<s>' to each text, but its vocabulary has no such token"):
        Tokenizer.load(folder)


def test_eos_ids_are_the_union_of_all_files(folder: Path) -> None:
    assert Tokenizer.load(folder).eos_token_ids == {2}
    edit(folder / "config.json", eos_token_id=0)
    assert Tokenizer.load(folder).eos_token_ids == {0, 2}
    edit(folder / "generation_config.json", eos_token_id=[7, 8])
    assert Tokenizer.load(folder).eos_token_ids == {0, 2, 7, 8}


def test_tokens_that_only_tokenizer_config_has_are_added(folder: Path) -> None:
    size = Tokenizer.load(folder).vocab_size
    new = {"content": "<tool>", "special": True, "normalized": False}
    edit(folder / "tokenizer_config.json", added_tokens_decoder={str(size): new})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("a<tool>")[-1] == size
    assert tokenizer.decode([size]) == ""
    edit(folder / "tokenizer_config.json", added_tokens_decoder={str(size + 5): new})
    with pytest.raises(TokenizerError, match=f"has id {size + 5} in .*, but {size} in"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    "listed",
    [
        {"additional_special_tokens": ["<|im_start|>", {"content": "no token"}]},
        {"extra_special_tokens": ["<|im_start|>"]},
        {"extra_special_tokens": {"turn_token": "<|im_start|>"}},
    ],
    ids=["transformers 4", "transformers 5", "by name"],
)
def test_named_special_tokens_are_whole_though_tokenizer_json_lists_none(folder: Path, listed: dict[str, Any]) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens": []}))
    edit(folder / "tokenizer_config.json", eos_token="<|im_end|>", pad_token="!", **listed)
    tokenizer = Tokenizer.load(folder)
    tokens = tokenizer.encode("<|im_start|>a!<|im_end|>")
    assert (tokens[0], tokens[-1], len(tokens)) == (1, 2, 4)
    assert tokenizer.decode(tokens) == "a!"


def test_truncation_in_tokenizer_json_is_ignored(folder: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(folder / "tokenizer.json"))
    assert 4 < len(Tokenizer.load(folder).encode("one two three four five six")) < 64


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "in config"),
        ({"chat_template.json": json.dumps({"chat_template": "json file"})}, "json file"),
        ({"chat_template.jinja": "jinja file"}, "jinja file"),
        ({"additional_chat_templates/tool_use.jinja": "tools"}, "in config"),
    ],
)
def test_where_templates_are_found(folder: Path, files: dict[str, str], expected: str) -> None:
    edit(folder / "tokenizer_config.json", chat_template="in config")
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.render(USER) == expected
    if any("tool_use" in name for name in files):
        assert tokenizer.render(Chat(messages=USER.messages, tools=[{"type": "function"}])) == "tools"


def test_named_templates_in_a_list(folder: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.render(USER) == "plain"
    assert tokenizer.render(Chat(messages=USER.messages, tools=[{"type": "function"}])) == "tools"


def test_a_template_file_replaces_the_checkpoints(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ eos_token }} own")
    assert Tokenizer.load(folder, str(tmp_path / "own.jinja")).render(USER) == "<|im_end|> own"
    with pytest.raises(TokenizerError, match=r"nowhere\.jinja cannot be read.*--chat-template"):
        Tokenizer.load(folder, str(tmp_path / "nowhere.jinja"))


def test_a_chat_without_template_names_both_remedies(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_tokenizer(tmp_path, chat_template=None))
    with pytest.raises(RequestError, match=r"--chat-template FILE, or use /v1/completions") as caught:
        tokenizer.render(USER)
    assert caught.value.http_status == 400


def test_a_folder_without_tokenizer_names_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json, tokenizer\.model.*--tokenizer PATH"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": {"type": "Nonsense"}}'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{,"),
        ("generation_config.json", "\x00"),
    ],
)
def test_damaged_files_are_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=f"{name} cannot be read"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_byte_order_mark_is_no_damage(folder: Path, name: str) -> None:
    before = Tokenizer.load(folder).eos_token_ids
    (folder / name).write_text((folder / name).read_text("utf-8") if (folder / name).exists() else "{}", "utf-8-sig")
    assert Tokenizer.load(folder).eos_token_ids == before


def test_other_vocabularies_go_through_transformers(folder: Path) -> None:
    original = Tokenizer.load(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    edit(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", added_tokens_decoder=None)
    converted = Tokenizer.load(folder)
    for text in TEXTS[:3]:
        assert converted.encode(text) == original.encode(text)
    (folder / "vocab.json").write_text("{")
    with pytest.raises(TokenizerError, match="cannot be converted"):
        Tokenizer.load(folder)


def test_a_lone_surrogate_is_an_error_of_the_request(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"U\+D83D at character 2"):
        Tokenizer.load(folder).encode("ab\ud83d")


# ---- GGUF ----


def write_gguf(path: Path, kind: str, tokens: list[str], **values: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    for name, value in values.items():
        key = f"tokenizer.{name}" if name.startswith("chat_template") else f"tokenizer.ggml.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_gguf(folder: Path, path: Path, **values: Any) -> Path:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    given = {
        "pre": "gpt-2",
        "merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "token_type": [CONTROL] * 3 + [NORMAL] * (len(vocabulary) - 3),
        "bos_token_id": 0,
        "eos_token_id": 2,
        "chat_template": CHATML,
        **values,
    }
    return write_gguf(path, "gpt2", vocabulary, **{k: v for k, v in given.items() if v is not None})


def test_a_byte_level_gguf_equals_its_folder(folder: Path, tmp_path: Path) -> None:
    original, tokenizer = Tokenizer.load(folder), Tokenizer.load(byte_level_gguf(folder, tmp_path / "m.gguf"))
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == original.decode(original.encode(text))
    assert tokenizer.render(USER) == original.render(USER)
    assert tokenizer.eos_token_ids == {0, 2}  # <|endoftext|> is one by its text
    assert tokenizer.vocab_size == original.vocab_size


def test_a_sentencepiece_gguf_equals_its_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_proto())
    texts, scores, types = ([p[i] for p in PIECES] for i in range(3))
    path = write_gguf(
        tmp_path / "m.gguf", "llama", texts, scores=scores, token_type=types, bos_token_id=1, eos_token_id=2
    )
    original, tokenizer = Tokenizer.load(tmp_path), Tokenizer.load(path)
    for text in (*SP_TEXTS, "[INST] the [INST]</s>the"):
        assert tokenizer.encode(text) == original.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == original.decode(original.encode(text))


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "a 1234's", ["a", " 1234", "'s"]),
        ("smollm", "a 1234's", ["a", " ", "1", "2", "3", "4", "'s"]),
        ("qwen2", "a 1234'S", ["a", " ", "1", "2", "3", "4", "'S"]),
        ("llama-bpe", "a 1234'S", ["a", " ", "123", "4", "'S"]),
        ("tekken", "aB 12", ["a", "B", " ", "1", "2"]),
        ("qwen2", "e\u0301", ["é"]),
        ("glm4", "a 1234'S", ["a", " ", "123", "4", "'S"]),
        ("gpt-4o", "aB's 1234//\n\n x", ["a", "B's", " ", "123", "4", "//\n\n", " x"]),
        ("gpt-4o", "中文abc", ["中文abc"]),
        ("minimax-m2", "HE'LL", ["HE'LL"]),
        ("kimi-k2", "中文aB's 1234//\n", ["中文", "a", "B's", " ", "123", "4", "//\n"]),
        ("kimi-k2", "x/\n/y", ["x", "/\n", "/y"]),
        ("deepseek-v3", "中文カナab1234's?\n 한국", ["中文カナ", "ab", "123", "4", "'s", "?\n", " 한국"]),
        ("deepseek-v3", "  x++ y", [" ", " x", "++", " y"]),
        ("deepseek-llm", "Über 1234's\n\n?!한국中", ["Ü", "ber", " ", *"1234", "'", "s", "\n", "\n", "?!", "한국中"]),
        ("deepseek-llm", "Ωмир 𝐀ḉ", ["Ωмир", " 𝐀", "ḉ"]),
        ("deepseek-coder", "x_1 = 'ab'  ", ["x", "_", "1", " =", " '", "ab", "'", "  "]),
    ],
)
def test_pre_tokenizers_split_as_the_original(
    folder: Path, tmp_path: Path, pre: str, text: str, words: list[str]
) -> None:
    backend = Tokenizer.load(byte_level_gguf(folder, tmp_path / "m.gguf", pre=pre))._backend
    normal = backend.normalizer.normalize_str(text) if backend.normalizer else text
    spans = backend.pre_tokenizer.pre_tokenize_str(normal)
    assert [normal[start:end] for _, (start, end) in spans] == words


@pytest.mark.parametrize(("values", "first"), [({}, None), ({"add_bos_token": True}, 0), ({"pre": "llama-bpe"}, 0)])
def test_gguf_flags_for_bos(folder: Path, tmp_path: Path, values: dict[str, Any], first: int | None) -> None:
    tokens = Tokenizer.load(byte_level_gguf(folder, tmp_path / "m.gguf", **values)).encode("Hello")
    assert (tokens[0] if tokens[0] == 0 else None) == first


def test_gguf_eos_ids_and_named_templates(folder: Path, tmp_path: Path) -> None:
    path = byte_level_gguf(folder, tmp_path / "m.gguf", eot_token_id=1, **{"chat_template.tool_use": "tools"})
    tokenizer = Tokenizer.load(path)
    assert tokenizer.eos_token_ids == {0, 1, 2}
    assert tokenizer.render(Chat(messages=USER.messages, tools=[{"type": "function"}])) == "tools"


@pytest.mark.parametrize(
    ("special", "ends"),
    [
        (["<|return|>", "<|end|>", "<|call|>"], [0, 2]),  # gpt-oss
        (["[EOS]", "<|im_end|>", "<|im_user|>", "[EOT]"], [0, 1, 3]),  # Kimi-K2
        (["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"], [0, 1, 2]),  # Llama 3.1
        (["<|endoftext|>", "<|end|>", "<|user|>"], [0, 1]),
    ],
)
def test_all_ends_of_answers_are_known(folder: Path, tmp_path: Path, special: list[str], ends: list[int]) -> None:
    """GGUF has one key for eos, and converters write no other."""
    content = json.loads((folder / "tokenizer.json").read_text())
    made = {"<|endoftext|>", "<|im_end|>"}  # of this tokenizer
    vocabulary = sorted(set(content["model"]["vocab"]) - made, key=content["model"]["vocab"].get)
    tokens, first = [*vocabulary, "aa", *special], len(vocabulary) + 1
    path = write_gguf(
        tmp_path / "m.gguf", "gpt2", tokens, pre="gpt-4o", merges=["a a"], eos_token_id=first,
        token_type=[NORMAL] * first + [CONTROL] * len(special),
    )  # fmt: skip
    assert Tokenizer.load(path).eos_token_ids == {first + i for i in ends}


def test_a_split_gguf_has_its_tokenizer_in_the_first_part(folder: Path, tmp_path: Path) -> None:
    byte_level_gguf(folder, tmp_path / "m-00001-of-00002.gguf")
    second = tmp_path / "m-00002-of-00002.gguf"
    second.write_bytes(b"GGUF")
    assert Tokenizer.load(second).vocab_size == Tokenizer.load(folder).vocab_size


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"pre": "brand-new"}, "pre-tokenizer is 'brand-new'.*--tokenizer PATH"),
        ({"pre": None}, "pre-tokenizer is 'None'"),
        ({"merges": None}, "has no merges.*--tokenizer PATH"),
        (
            {"merges": ["H e", "H nowhere"]},
            r"the merge 'H nowhere' \(number 1\), but no token 'nowhere'\..*--tokenizer PATH",
        ),
        ({"merges": ["Hello"]}, r"the merge 'Hello' \(number 0\), which is not two tokens"),
    ],
)
def test_unknown_pre_tokenizers_and_wrong_merges_are_refused(
    folder: Path, tmp_path: Path, values: dict[str, Any], says: str
) -> None:
    with pytest.raises(TokenizerError, match=says):
        Tokenizer.load(byte_level_gguf(folder, tmp_path / "m.gguf", **values))


@pytest.mark.parametrize("name", ["padding", "unknown"])
def test_an_id_that_is_no_token_may_be_unneeded(folder: Path, tmp_path: Path, name: str) -> None:
    """Converted fine-tunes have it whose padding token was added without an embedding."""
    tokenizer = Tokenizer.load(byte_level_gguf(folder, tmp_path / "m.gguf", **{f"{name}_token_id": 100_000}))
    assert tokenizer.encode("Hello") == Tokenizer.load(folder).encode("Hello")


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom"])
def test_an_id_that_is_no_token_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    path = byte_level_gguf(folder, tmp_path / "m.gguf", **{f"{name}_token_id": 100_000})
    with pytest.raises(TokenizerError, match=rf"has \d+ tokens, but tokenizer.ggml.{name}_token_id is 100000"):
        Tokenizer.load(path)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "has 3 tokens, but tokenizer.ggml.scores has 0 entries"),
        ({"scores": [0.0, 1.0]}, "tokenizer.ggml.scores has 2 entries"),
        ({"scores": [0.0, 1.0, 2.0], "token_type": [1]}, "tokenizer.ggml.token_type has 1 entries"),
    ],
)
def test_arrays_of_another_length_are_refused(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    with pytest.raises(TokenizerError, match=says):
        Tokenizer.load(write_gguf(tmp_path / "m.gguf", "llama", ["<unk>", "a", "b"], **values))


def test_an_unknown_kind_of_gguf_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.model 'bert'"):
        Tokenizer.load(write_gguf(tmp_path / "m.gguf", "bert", ["a"]))


@pytest.mark.parametrize(
    ("keep_bytes", "said"), [(0, "empty"), (3, "damaged"), (20, "damaged"), (100, "damaged"), (2000, "damaged")]
)
def test_a_cut_gguf_is_an_error(folder: Path, tmp_path: Path, keep_bytes: int, said: str) -> None:
    path = byte_level_gguf(folder, tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(WeightsError, match=rf"m\.gguf.*{said}"):
        Tokenizer.load(path)


def test_loading_needs_neither_torch_nor_transformers(folder: Path, tmp_path: Path) -> None:
    path = byte_level_gguf(folder, tmp_path / "m.gguf")
    code = (
        "import sys; from pathlib import Path; from proa.text.tokenizer import Tokenizer; "
        f"[Tokenizer.load(Path(p)).encode('x') for p in {[str(folder), str(path)]!r}]; "
        "sys.exit(', '.join({'torch', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
