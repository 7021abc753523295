"""Declared options: flags, keywords, and back."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given

from option_strategies import instances
from proa.config.field import argument, declarations, option, values_of
from proa.config.options import EngineOptions, GpuOptions, ServeOptions
from proa.config.parse import HelpShown, Parsed, from_keywords, given_options, help_text, parse, to_argv
from proa.config.value import check, parse_size
from proa.errors import UsageError


@dataclass(frozen=True)
class Inner:
    """Inner things"""

    depth: int = option(3, help="how deep", low=1, high=9)
    share: float = option(0.5, help="how much: 50 % by default", low=0, high=1, common=True)


@dataclass(frozen=True)
class Command:
    """Outer things"""

    what: str = argument(help="what to do", metavar="WHAT")
    colour: str = option("red", help="which colour", choices=("red", "green", "blue"), short="c", common=True)
    loud: bool = option(False, help="make noise")
    warm: bool = option(True, help="keep warm")
    room: int | None = option(None, help="how much room", metavar="SIZE", kind="size", low=1)
    tag: tuple[str, ...] = option((), help="a mark (repeatable)")
    key: str | None = option(None, help="a secret", secret=True)
    inner: Inner = field(default_factory=Inner)


def run(*argv: str) -> Parsed[Command]:
    return parse(Command, argv, prog="proa test", summary="test things")


def test_defaults_and_flags() -> None:
    assert run("it").options == Command("it")
    parsed = run("--no-warm", "it", "-c", "green", "--tag", "a", "--tag=b", "--room", "1.5G", "--depth=7", "--loud")
    assert parsed.options == Command("it", "green", True, False, 3 << 29, ("a", "b"), None, Inner(7))
    assert parsed.sources["warm"] == "--no-warm"
    assert parsed.sources["what"] == "WHAT"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["it", "--dept", "2"], ["no option --dept", "Did you mean --depth?", "--help-all"]),
        (["it", "--no-wram"], ["--no-wram", "--no-warm"]),
        (["it", "-x"], ["no option -x"]),
        (["it", "--depth"], ["--depth needs a value"]),
        (["it", "--loud=1"], ["--loud takes no value"]),
        (["it", "--depth", "two"], ["--depth is 'two'", "an integer from 1 to 9"]),
        (["it", "--depth", "10"], ["--depth is 10", "from 1 to 9"]),
        (["it", "--depth", "-1"], ["--depth is -1", "from 1 to 9"]),
        (["it", "--share", "nan"], ["--share is nan", "a number from 0 to 1"]),
        (["it", "--share", "1.01"], ["--share is 1.01"]),
        (["it", "-c", "gren"], ["--colour is 'gren'", "Did you mean green?", "red, green or blue"]),
        (["it", "--room", "many"], ["--room is 'many'", "24GiB"]),
        (["it", "--room", "0"], ["--room is 0 B", "at least 1 B"]),
        (["it", "--key="], ["--key is empty"]),
        (["it", "--tag="], ["--tag is empty"]),
        (["it\udcff"], [" is not UTF-8", "rename"]),
        (["it", "--key=\udcff"], ["--key is not UTF-8"]),
        (["it", "--tag=a", "--tag=b\udcff"], ["--tag is not UTF-8"]),
        (["it", "more"], ["unexpected argument 'more'"]),
        ([], ["WHAT is missing (what to do)"]),
    ],
)
def test_wrong_flags(argv: list[str], parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        run(*argv)
    assert caught.value.exit_code == 2
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_secret_is_never_shown() -> None:
    parsed = run("it", "--key", "hunter2")
    assert "hunter2" not in repr(given_options(parsed.options, parsed.sources))


def test_given_options_have_values_and_sources() -> None:
    parsed = run("it", "--room=1KiB", "--depth=3", "--no-warm")
    rows = {a.name: (a.value, a.source) for a in given_options(parsed.options, parsed.sources)}
    assert rows == {"what": ("it", "WHAT"), "room": ("1.00 KiB", "--room"), "warm": ("off", "--no-warm")}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("512", 512), ("512B", 512), ("512M", 512 << 20), ("512MiB", 512 << 20), ("512mib", 512 << 20),
        ("512MB", 512_000_000), ("1.5G", 3 << 29), ("24 GiB", 24 << 30), ("2T", 2 << 40), ("0.3K", 307),
        ("1P", 1 << 50),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "1.5.G", "1X", "1 G B", "1e3", "0x10", "1iB", "GiB1", "inf", "nan"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("4096", 4096),
        ("32k", 32768),
        ("64K", 65536),
        ("0.5k", 512),
        ("128 k", 131072),
        ("1M", 1 << 20),
        ("1m", 1 << 20),
    ],
)
def test_numbers_of_tokens(text: str, tokens: int) -> None:
    options = parse(ServeOptions, [f"--context={text}"], prog="proa serve", summary="serve").options
    assert options.engine.cache.context == tokens
    if not text.isdecimal():
        assert from_keywords(EngineOptions, context=text).cache.context == tokens


@pytest.mark.parametrize("text", ["", "k", "32kb", "32KiB", "1.5", "0.3k", "32 kk", "32g", "1e3", "k32", "inf"])
def test_wrong_numbers_of_tokens(text: str) -> None:
    with pytest.raises(UsageError, match=r"--context is .* an integer \(32k is 32768\) from 2 to"):
        parse(ServeOptions, [f"--context={text}"], prog="proa serve", summary="serve")


def test_help_is_short_and_help_all_complete() -> None:
    with pytest.raises(HelpShown) as short:
        run("--help")
    with pytest.raises(HelpShown) as full:
        run("it", "--help-all")
    assert "--colour" in short.value.text
    assert "--depth" not in short.value.text
    assert "`proa test --help-all` shows 6 more options" in short.value.text
    for flag in ("--colour", "--depth", "--loud", "--no-warm", "--room SIZE", "--tag", "WHAT", "Inner things:"):
        assert flag in full.value.text
    assert "50 % by default (default: 0.5)" in " ".join(full.value.text.split())


@pytest.mark.parametrize("group", [EngineOptions, ServeOptions])
def test_declared_defaults_are_allowed_values(group: type) -> None:
    for declared in declarations(group).values():
        if declared.default is not None:
            assert check(declared, declared.default, declared.flag) == declared.default
        assert not declared.info.help.split()[0].istitle()  # a phrase, not a sentence
        assert not declared.info.help.endswith(".")


def test_every_option_of_serve_is_in_its_full_help() -> None:
    text = help_text(ServeOptions, prog="proa serve", summary="serve", full=True)
    for declared in declarations(ServeOptions).values():
        assert f"--{'no-' if declared.default is True else ''}{declared.flag[2:]}" in text


def test_the_same_name_twice_is_refused() -> None:
    @dataclass(frozen=True)
    class Other:
        depth: int = option(1, help="another depth")

    @dataclass(frozen=True)
    class Both:
        one: Inner = field(default_factory=Inner)
        two: Other = field(default_factory=Other)

    both = declared_locally(Both, one=Inner, two=Other)
    with pytest.raises(TypeError, match="depth is declared twice"):
        declarations(both)


@pytest.mark.parametrize("hint", ["list[int]", "int | str", "tuple[int, ...]", "bytes"])
def test_unsupported_types_are_refused(hint: str) -> None:
    @dataclass(frozen=True)
    class Odd:
        odd: Any = option(None, help="odd")  # noqa: RUF009

    Odd.__annotations__["odd"] = hint
    with pytest.raises(TypeError, match="options are bool, int, float, str"):
        declarations(Odd)


def test_a_plain_field_is_refused() -> None:
    @dataclass(frozen=True)
    class Plain:
        odd: int = 3

    with pytest.raises(TypeError, match="neither an option"):
        declarations(Plain)


def declared_locally(group: type, **hints: type) -> type:
    """Make types defined inside a test resolvable by name."""
    group.__annotations__.update(hints)
    return group


# ---- Python keywords ----


def test_keywords() -> None:
    assert from_keywords(EngineOptions, gpu=1, gpu_experts=16).gpus == GpuOptions(gpu="1", gpu_experts="16")
    options = from_keywords(EngineOptions, context=4096, ram="8GiB", ignore_config_key=["a"], prefix_cache=False)
    assert (options.cache.context, options.machine.ram) == (4096, 8 << 30)
    assert options.model.ignore_config_key == ("a",)
    assert options.cache.prefix_cache is False
    assert from_keywords(EngineOptions) == EngineOptions()
    assert from_keywords(EngineOptions, context=None) == EngineOptions()
    assert from_keywords(EngineOptions, max_itl=2.5).scheduler.max_itl == "2.5", "refused by the plan: it has no unit"


@pytest.mark.parametrize(
    ("keywords", "parts"),
    [
        ({"contxt": 1}, ["There is no option contxt", "Did you mean context?"]),
        ({"max-running": 1}, ["Did you mean max_running?"]),
        ({"tensor_parallel_size": 2}, ["There is no option tensor_parallel_size", "The options are revision"]),
        ({"port": 1}, ["There is no option port"]),
        ({"prefill_share": 0.5}, ["There is no option prefill_share", "max_itl replaces it"]),
        ({"max_itl": True}, ["max_itl is true (true or false)", "text or a number"]),
        ({"context": "4096"}, ["context is '4096' (text)", "an integer"]),
        ({"context": "32kb"}, ["context is '32kb' (text)"]),
        ({"context": 4096.0}, ["context is 4096.0 (a number)"]),
        ({"context": True}, ["context is true (true or false)"]),
        ({"context": 1}, ["context is 1"]),  # it would have no room for an answer
        ({"max_running": None}, ["max_running is none (no value)"]),
        ({"prefix_cache": 1}, ["prefix_cache is 1 (a number)", "true or false"]),
        ({"dtype": "bf16"}, ["dtype is 'bf16'", "auto, bfloat16, float16 or float32"]),
        ({"ram": "lots"}, ["ram is 'lots'"]),
        ({"ignore_config_key": "a"}, ["ignore_config_key is 'a' (text)", "a list of strings"]),
        ({"ignore_config_key": [1]}, ["ignore_config_key is [1] (a list)"]),
        ({"revision": ["x" * 100]}, ["revision is ['xxx", "..."]),
    ],
)
def test_wrong_keywords(keywords: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        from_keywords(EngineOptions, **keywords)
    for part in parts:
        assert part in str(caught.value)


# ---- round trips ----


@given(instances(ServeOptions))
def test_options_survive_a_round_trip_through_flags(options: ServeOptions) -> None:
    assert parse(ServeOptions, to_argv(options), prog="proa", summary="serve").options == options


@given(instances(EngineOptions))
def test_options_survive_a_round_trip_through_keywords(options: EngineOptions) -> None:
    assert from_keywords(EngineOptions, **values_of(options)) == options
