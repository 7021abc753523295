"""`option(...)`: one declaration per option, on a dataclass field. Never: knowledge of any option."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any


@dataclass(frozen=True)
class OptionInfo:
    """What CLI, YAML and docs need to know beyond the field's name, type and default.

    `metavar` names the unit or form ("TOKENS", "SIZE", "PATH"); `choices` lists the values allowed;
    `low`/`high` bound numbers inclusively; `common` options show in the short help;
    `kind` "size" accepts bytes with a suffix ("24GiB", "512M"); `secret` values are never printed.
    """

    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    kind: str = ""
    common: bool = False
    secret: bool = False


def option(default: Any = MISSING, *, help: str, **info: Any) -> Any:  # noqa: A002 - the word users know
    """A dataclass field that is also a CLI flag, a YAML key and a row of docs/options.md."""
    return field(default=default, metadata={"option": OptionInfo(help, **info)})
