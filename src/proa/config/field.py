"""`option(...)` and `argument(...)` declare options on dataclass fields; `declarations` reads them back.

A *group* is a frozen dataclass whose fields are options or other groups. Option names are unique over all groups of a
command, so that a name alone (flag, YAML key, Python keyword) identifies the option.
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
    """Metadata of an option, in addition to the field's name, type and default.

    `metavar`: unit or form ("TOKENS", "SIZE", "PATH"). `choices`: the allowed values. `low`, `high`: inclusive bounds.
    `common`: shown in the short help. `short`: one-letter flag. `secret`: the value is never printed. `kind`: "size"
    accepts bytes with a suffix ("24GiB", "512M"); "tokens" accepts k and M ("32k"); "word" is text that YAML and Python
    may also give as a number; "argument" is positional; "" is an ordinary flag.
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
    """One declared option. `path`: field names of the enclosing groups; `title`: docstring of the innermost group;
    `type`: the value's type without `| None`, or `str` with `repeatable` for tuple[str, ...]."""

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
        """The option's name on the command line: --max-running, or MODEL."""
        return (self.info.metavar or self.name.upper()) if self.positional else self.flag

    @property
    def required(self) -> bool:
        return self.default is MISSING


def option(default: Any = MISSING, *, help: str, **info: Any) -> Any:  # noqa: A002 - the name in argparse
    """Declare a dataclass field that is also a CLI flag, a YAML key and a row of docs/options.md."""
    return field(default=default, metadata={"option": OptionInfo(help, **info)})


def argument(default: Any = MISSING, *, help: str, metavar: str) -> Any:  # noqa: A002 - the name in argparse
    """Declare a dataclass field that is also a positional argument; it is required if it has no default."""
    return field(default=default, metadata={"option": OptionInfo(help, metavar, kind="argument")})


def declarations(group: type) -> Mapping[str, Declaration]:
    """Return all options of a group and its subgroups, by name, in order of declaration.

    Raises TypeError for an invalid group: a duplicate name, an unsupported type, a field that is not an option.
    """
    found: dict[str, Declaration] = {}
    for declared in _walk(group, ()):
        if declared.name in found:
            raise TypeError(f"option {declared.name} is declared twice in {group.__name__}")
        found[declared.name] = declared
    return found


def build(group: type[T], values: Mapping[str, Any]) -> T:
    """Make an instance of the group from values by option name; missing options keep their defaults."""
    hints = get_type_hints(group)
    arguments: dict[str, Any] = {}
    for f in _fields(group):
        if is_dataclass(hints[f.name]):
            arguments[f.name] = build(hints[f.name], values)
        elif f.name in values:
            arguments[f.name] = values[f.name]
    return group(**arguments)


def values_of(group: Any) -> dict[str, Any]:
    """Return an instance's values by option name; the inverse of build."""
    flat: dict[str, Any] = {}
    for f in _fields(type(group)):
        value = group.__dict__[f.name]
        flat |= values_of(value) if is_dataclass(value) else {f.name: value}
    return flat


def _fields(group: type) -> tuple[Field[Any], ...]:
    if not is_dataclass(group):
        raise TypeError(f"{group.__name__} is not a dataclass")
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
