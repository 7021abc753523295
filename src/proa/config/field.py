"""`option(...)` and `argument(...)`: one declaration per option, on a dataclass field, and how the
declarations of a group are read back. Never: knowledge of any option, parsing of values.

A *group* is a frozen dataclass whose fields are options or further groups. Option names are unique over
all groups of a command, so that a name alone (flag, YAML key, Python keyword) says which option is meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
SCALARS = (bool, int, float, str)


@dataclass(frozen=True)
class OptionInfo:
    """What CLI, YAML and docs need to know beyond the field's name, type and default.

    `metavar` names the unit or form ("TOKENS", "SIZE", "PATH"); `choices` lists the values allowed;
    `low`/`high` bound numbers inclusively; `common` options show in the short help; `short` is a
    one-letter flag; `secret` values are never printed. `kind` "size" accepts bytes with a suffix
    ("24GiB", "512M"), "tokens" a whole number with k or M ("32k"), "word" is text that YAML and Python may give as a
    whole number, "argument" is positional, "" is a flag.
    """

    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    kind: str = ""
    common: bool = False
    short: str = ""
    secret: bool = False


@dataclass(frozen=True)
class Declaration:
    """One option as declared: `path` are the field names of the groups around it, `title` the innermost
    group's docstring, `type` the value's type without `| None`, `str` with `repeatable` for tuple[str, ...]."""

    name: str
    path: tuple[str, ...]
    title: str
    type: type
    repeatable: bool
    default: Any
    info: OptionInfo

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def positional(self) -> bool:
        return self.info.kind == "argument"

    @property
    def spelling(self) -> str:
        """How a user names it on the command line: --max-running, or MODEL."""
        return (self.info.metavar or self.name.upper()) if self.positional else self.flag

    @property
    def required(self) -> bool:
        return self.default is MISSING


def option(default: Any = MISSING, *, help: str, **info: Any) -> Any:  # noqa: A002 - the word users know
    """A dataclass field that is also a CLI flag, a YAML key and a row of docs/options.md."""
    return field(default=default, metadata={"option": OptionInfo(help, **info)})


def argument(default: Any = MISSING, *, help: str, metavar: str) -> Any:  # noqa: A002 - the word users know
    """A dataclass field that is a positional argument; without default it must be given."""
    return field(default=default, metadata={"option": OptionInfo(help, metavar, kind="argument")})


def declarations(group: type) -> Mapping[str, Declaration]:
    """All options of a group and the groups in it, by name, in order of declaration.

    Raises TypeError where a group is declared wrongly: a name twice, an unsupported type, a plain field.
    """
    found: dict[str, Declaration] = {}
    for declared in _walk(group, ()):
        if declared.name in found:
            raise TypeError(f"option {declared.name} is declared twice in {group.__name__}")
        found[declared.name] = declared
    return found


def build(group: type[T], values: Mapping[str, Any]) -> T:
    """An instance of the group from values by option name; options not named keep their defaults."""
    hints = get_type_hints(group)
    arguments: dict[str, Any] = {}
    for f in _fields(group):
        if is_dataclass(hints[f.name]):
            arguments[f.name] = build(hints[f.name], values)
        elif f.name in values:
            arguments[f.name] = values[f.name]
    return group(**arguments)


def values_of(group: Any) -> dict[str, Any]:
    """The values of an instance by option name; the inverse of build."""
    flat: dict[str, Any] = {}
    for f in _fields(type(group)):
        value = group.__dict__[f.name]
        flat |= values_of(value) if is_dataclass(value) else {f.name: value}
    return flat


def _fields(group: type) -> tuple[Field[Any], ...]:
    if not is_dataclass(group):
        raise TypeError(f"{group.__name__} is no dataclass")
    return fields(group)


def _walk(group: type, path: tuple[str, ...]) -> Iterator[Declaration]:
    hints = get_type_hints(group)
    title = " ".join((group.__doc__ or "").split("\n\n")[0].split()).rstrip(".")
    for f in _fields(group):
        hint = hints[f.name]
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _walk(hint, (*path, f.name))
        elif "option" not in f.metadata:
            raise TypeError(f"{group.__name__}.{f.name} is neither an option() nor a group")
        else:
            value_type, repeatable = _value_type(hint, f"{group.__name__}.{f.name}")
            yield Declaration(f.name, path, title, value_type, repeatable, f.default, f.metadata["option"])


def _value_type(hint: Any, where: str) -> tuple[type, bool]:
    if get_origin(hint) is tuple and get_args(hint) == (str, ...):
        return str, True
    if get_origin(hint) in (Union, UnionType):
        inner = [a for a in get_args(hint) if a is not NoneType]
        hint = inner[0] if len(inner) == 1 else hint
    if hint not in SCALARS:
        raise TypeError(f"{where}: options are bool, int, float, str (or None) or tuple[str, ...], not {hint}")
    return hint, False
