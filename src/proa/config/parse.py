"""Parses declared options from the command line, the options file and Python keywords, and formats them back.

Precedence: flag, then options file, then default. A repeatable option given as flags replaces the file's list.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from proa.config.field import Declaration, build, declarations, values_of
from proa.config.file import read_options_file
from proa.config.suggest import did_you_mean
from proa.config.value import check, from_data, from_text, to_text
from proa.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Parsed(Generic[T]):
    """Parsed options, and the source of each option that was given: "--port" or "serve.yaml line 3"."""

    options: T
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GivenOption:
    """An option that differs from its default; `value` is formatted for display, secrets hidden."""

    name: str
    value: str
    source: str


class HelpShown(Exception):
    """Raised for --help and --help-all; `text` is the help to write to stdout."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def parse(group: type[T], argv: Sequence[str], *, prog: str, summary: str, epilog: str = "") -> Parsed[T]:
    """Parse a command's arguments and its --config file. Raises UsageError; HelpShown for --help and --help-all."""
    options = declarations(group)
    parser = _parser(options, prog)
    found, unknown = parser.parse_known_args(list(argv))
    given: dict[str, Any] = vars(found)
    if "help_all" in given or "help" in given:
        raise HelpShown(help_text(group, prog=prog, summary=summary, epilog=epilog, full="help_all" in given))
    if unknown:
        raise _unknown(unknown[0], options, prog)
    values, sources = _read_file(given.pop("config", None), options)
    for name, raw in given.items():
        values[name] = _from_flag(options[name], raw)
        sources[name] = f"--no-{options[name].flag[2:]}" if raw is False else options[name].spelling
    for option in options.values():
        if option.required and option.name not in values:
            raise UsageError(
                f"{prog}: {option.spelling} is missing ({option.info.help}).", f"Give it; see `{prog} --help`."
            )
    return Parsed(build(group, values), sources)


def from_keywords(group: type[T], **keywords: Any) -> T:
    """Make options from Python keywords: from_keywords(EngineOptions, context=4096, ram="8GiB").

    Raises UsageError for an unknown keyword (with "did you mean"), a wrong type, or a value out of range.
    """
    options = declarations(group)
    for name in keywords:
        if name not in options:
            known = f"The options are {', '.join(options)}."
            raise UsageError(f"There is no option {name}.", did_you_mean(name, options) or known, param=name)
    return build(group, {name: from_data(options[name], value, name) for name, value in keywords.items()})


def given_options(options: Any, sources: Mapping[str, str] | None = None) -> tuple[GivenOption, ...]:
    """Return the options that differ from their defaults; `sources` as in Parsed, "Python" for options without one."""
    declared, sources = declarations(type(options)), sources or {}
    return tuple(
        GivenOption(name, to_text(declared[name], value), sources.get(name, "Python"))
        for name, value in values_of(options).items()
        if value != declared[name].default
    )


def to_argv(options: Any) -> list[str]:
    """Format options as command line arguments that parse back to them; options with default values are omitted."""
    declared = declarations(type(options))
    argv: list[str] = []
    for name, value in values_of(options).items():
        option = declared[name]
        if value == option.default:
            continue
        if option.positional:
            argv.insert(0, value)
        elif option.type is bool:
            argv.append(option.flag if value else f"--no-{option.flag[2:]}")
        else:
            argv += [f"{option.flag}={v}" for v in (value if option.repeatable else [value])]
    return argv


def help_text(group: type, *, prog: str, summary: str, epilog: str = "", full: bool = False) -> str:
    """Format a command's help: the common options, or with `full` all options by group."""
    options = declarations(group)
    shown = {n: o for n, o in options.items() if full or o.info.common or o.positional}
    more = "" if len(shown) == len(options) else f"`{prog} --help-all` shows {len(options) - len(shown)} more options."
    parser = _parser(shown, prog, by_group=full)
    parser.description = f"{summary[0].upper()}{summary[1:]}."
    parser.epilog = "\n".join(filter(None, (epilog, more)))
    return parser.format_help()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse checks no values here (see _parser), so a known flag can only lack a value or have an extra one.
        flag = message.removeprefix("argument ").partition(": ")[0].split("/")[-1]
        wrong = "takes no value" if "ignored explicit argument" in message else "needs a value"
        raise UsageError(f"{flag} {wrong}.", "See --help.")


def _parser(options: Mapping[str, Declaration], prog: str, by_group: bool = False) -> argparse.ArgumentParser:
    """Make a parser that only splits argv: no conversion and no defaults, so that flags and YAML share value.py."""
    parser = _Parser(
        prog=prog, allow_abbrev=False, add_help=False,
        usage=f"{prog} {' '.join(_usage(o) for o in options.values() if o.positional)} [options]".replace("  ", " "),
        formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    sections: dict[str, argparse._ArgumentGroup] = {}
    for option in options.values():
        title = "arguments" if option.positional else option.title if by_group and option.path else "options"
        if title not in sections:
            sections[title] = parser.add_argument_group(title)
        _add(sections[title], option)
    general = parser.add_argument_group("general")
    general.add_argument("--config", metavar="FILE", help="YAML file with options; flags take precedence")
    general.add_argument("-h", "--help", action="store_true", help="show the common options")
    general.add_argument("--help-all", action="store_true", help="show every option")
    return parser


def _usage(option: Declaration) -> str:
    return option.spelling if option.required else f"[{option.spelling}]"


def _add(section: argparse._ArgumentGroup, option: Declaration) -> None:
    info = option.info
    text = info.help.replace("%", "%%")
    if option.positional:
        # "?" even if it is required: --help works without it, and parse() raises the error.
        section.add_argument(option.name, metavar=option.spelling, help=text, nargs="?")
        return
    if not (option.required or option.repeatable or option.default is None or option.type is bool):
        text += f" (default: {to_text(option, option.default).replace('%', '%%')})"
    names = [f"-{info.short}"] if info.short else []
    if option.type is bool:
        # The help shows only the form that changes the default; both forms are accepted.
        yes, no = [*names, option.flag], [f"--no-{option.flag[2:]}"]
        for flags, value in ((yes, True), (no, False)):
            shown = argparse.SUPPRESS if value == option.default else text if value else f"turn off: {text}"
            section.add_argument(*flags, dest=option.name, action="store_const", const=value, help=shown)
        return
    metavar = info.metavar or (
        "|".join(info.choices) if info.choices else {int: "N", float: "X"}.get(option.type, "TEXT")
    )
    section.add_argument(
        *names, option.flag, dest=option.name, metavar=metavar, help=text,
        action="append" if option.repeatable else "store",
    )  # fmt: skip


def _from_flag(option: Declaration, raw: Any) -> Any:
    if option.type is bool:
        return raw
    if option.repeatable:
        return check(option, tuple(raw), option.spelling)
    return from_text(option, raw, option.spelling)


def _read_file(path: str | None, options: Mapping[str, Declaration]) -> tuple[dict[str, Any], dict[str, str]]:
    if path is None:
        return {}, {}
    found = read_options_file(Path(path), options)
    return {n: f.value for n, f in found.items()}, {n: f.source for n, f in found.items()}


def _unknown(word: str, options: Mapping[str, Declaration], prog: str) -> UsageError:
    if not word.startswith("-"):
        return UsageError(f"{prog}: unexpected argument {word!r}.", f"Leave it out; see `{prog} --help`.")
    flags = ["--config", "--help", "--help-all"]
    for option in options.values():
        if not option.positional:
            flags += [option.flag, f"--no-{option.flag[2:]}"] if option.type is bool else [option.flag]
    name = word.split("=")[0]
    remedy = f"{did_you_mean(name, flags)} `{prog} --help-all` shows every option.".strip()
    return UsageError(f"{prog} has no option {name}.", remedy, param=name)
