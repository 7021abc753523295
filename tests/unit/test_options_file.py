"""The options file: --config file.yaml."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from option_strategies import instances
from proa.cli.serve import ServeCommand
from proa.config.field import declarations, values_of
from proa.config.options import ServeOptions
from proa.config.parse import Parsed, given_options, parse
from proa.errors import UsageError


def read(folder: Path, text: str | bytes, *argv: str) -> Parsed[ServeOptions]:
    file = folder / "serve.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return parse(ServeOptions, ["--config", str(file), *argv], prog="proa serve", summary="serve")


def test_flat_and_by_group_and_comments(tmp_path: Path) -> None:
    text = """
        port: 8001        # flat
        cache: {context: 32_768, kv_memory: 2GiB}
        engine:
          scheduler:
            max_running: 8
            max_queued_tokens: 64k
        strict: yes
        ignore_config_key: [a, b]
        revision: null
    """
    parsed = read(tmp_path, text)
    assert parsed.options.server.port == 8001
    assert parsed.options.server.strict is True
    assert parsed.options.engine.cache.context == 32768
    assert parsed.options.engine.cache.kv_memory == 2 << 30
    assert parsed.options.engine.scheduler.max_running == 8
    assert parsed.options.engine.scheduler.max_queued_tokens == 65536
    assert parsed.options.engine.model.ignore_config_key == ("a", "b")
    assert parsed.sources["port"] == "serve.yaml line 2"


def test_flags_beat_the_file(tmp_path: Path) -> None:
    parsed = read(tmp_path, "port: 8001\nmax_running: 8\nprefix_cache: false\n", "--port=8002", "--prefix-cache")
    assert (parsed.options.server.port, parsed.options.engine.scheduler.max_running) == (8002, 8)
    rows = {a.name: (a.value, a.source) for a in given_options(parsed.options, parsed.sources)}
    assert rows == {"port": ("8002", "--port"), "max_running": ("8", "serve.yaml line 2")}


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_gives_defaults(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text).options == ServeOptions()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prot: 1", ["serve.yaml line 1", "there is no option prot", "Did you mean port?"]),
        ("port: 1\nmax-running: 2", ["line 2", "there is no option max-running", "Did you mean max_running?"]),
        ("cache:\n  contxt: 4", ["line 2", "contxt", "Did you mean context?"]),
        ("cache:\n  port: 4", ["line 2", "port is not an option of the group cache", "to the group server"]),
        ("cache: 4", ["line 1", "cache is a group", "indented"]),
        ("cash:\n  context: 4", ["there is no option cash", "Did you mean cache?"]),
        ("cache: &c\n  cache: *c", ["line 2", "cache is a group"]),
        ("port: 1\nport: 2", ["line 2 sets port again", "line 1"]),
        ("context: 3\ncache: {context: 2}", ["line 2 sets context again"]),
        ("port: '8001'", ["serve.yaml line 1: port is '8001' (text)", "an integer from 0 to 65535"]),
        ("port: 99999", ["port is 99999", "from 0 to 65535"]),
        ("port:", ["port is none (no value)"]),
        ("port: 80.5", ["port is 80.5 (a number)"]),
        ("strict: 1", ["strict is 1 (a number)", "true or false"]),
        ("served_model_name: no", ["served_model_name is false (true or false)", "Give text"]),
        ("revision: 1.10", ["revision is 1.1 (a number)"]),
        ("revision: 2024-01-01", ["revision is", "type date"]),
        ("dtype: bfloat61", ["Did you mean bfloat16?"]),
        ("ram: [1]", ["ram is [1] (a list)"]),
        ("ignore_config_key: a", ["ignore_config_key is 'a' (text)", "a list of strings"]),
        ("revision: !!python/object:os.system x", ["line 1 cannot be read", "constructor"]),
        ("- port", ["is not a YAML mapping"]),
        ("port", ["is not a YAML mapping"]),
        ("port: [", ["not valid YAML"]),
        ("a: 1\n---\nb: 1", ["not valid YAML"]),
        (b"port: \xff", ["not valid YAML"]),
        ("port: \x00", ["not valid YAML"]),
    ],
)
def test_wrong_files(tmp_path: Path, text: str | bytes, parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_model_may_stand_in_the_file_beside_its_group(tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    for text, dtype in (("model: demo\ndtype: float32\n", "float32"), ("model: demo\n", "auto")):
        file.write_text(text)
        command = parse(ServeCommand, ["--config", str(file)], prog="proa serve", summary="serve").options
        assert (command.model, command.serve.engine.model.dtype) == ("demo", dtype)
    file.write_text("model: {dtype: float32}\n")
    command = parse(ServeCommand, ["--config", str(file), "demo"], prog="proa serve", summary="serve").options
    assert (command.model, command.serve.engine.model.dtype) == ("demo", "float32")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.yaml cannot be read: No such file"):
        parse(ServeOptions, ["--config", str(tmp_path / "nowhere.yaml")], prog="proa", summary="serve")


@given(instances(ServeOptions), st.booleans())
def test_options_survive_a_round_trip_through_yaml(options: ServeOptions, by_group: bool) -> None:
    declared = declarations(ServeOptions)
    content: dict[str, object] = {}
    for name, value in values_of(options).items():
        value = list(value) if isinstance(value, tuple) else value
        group = content.setdefault(declared[name].path[-1], {}) if by_group else content
        assert isinstance(group, dict)
        group[name] = value
    with tempfile.TemporaryDirectory() as folder:
        text = yaml.safe_dump(content, allow_unicode=True)
        assert read(Path(folder), text).options == options
