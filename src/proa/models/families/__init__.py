"""Architecture -> family function. Never: maths.

A family is a function from a strict config reader to (spec, names); each module here lists its own in
`ARCHITECTURES`, so that a new family is one new file.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

from proa.errors import ConfigError
from proa.models.config_reader import Reader
from proa.models.names import Declared, NameTable
from proa.models.quantisation import quantisation
from proa.models.spec import Model

Family = Callable[[Reader], tuple[Model, NameTable]]


@cache
def registry() -> dict[str, Family]:
    """Architecture -> family, gathered from the `ARCHITECTURES` table of every module in this package."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__):
        table: dict[str, Family] = importlib.import_module(f"{__name__}.{module.name}").ARCHITECTURES
        if twice := found.keys() & table.keys():
            raise ValueError(f"{module.name}.py declares {sorted(twice)}, which another family has already")
        found |= table
    return found


def declare(config: Mapping[str, Any], ignore_keys: Collection[str] = (), where: str = "config.json") -> Declared:
    """Read a config in Hugging Face's form into the model's shapes and tensor names. `where` names it in errors.

    Raises ConfigError if the architecture, a key or a value is not implemented, here or in the quantisation config.
    """
    architecture = _architecture(config, where)
    quantisation(config, ignore_keys, where)
    spec, names = registry()[architecture](Reader(config, where, ignore_keys))
    return Declared(spec, names)


def _architecture(config: Mapping[str, Any], where: str) -> str:
    listed = config.get("architectures")
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], str):
        raise ConfigError(
            f"{where}: 'architectures' must be a list with one name, but it is {listed!r}.",
            f"Proa knows {', '.join(registry())}; name one with --override-config 'architectures=[\"NAME\"]'.",
        )
    name = listed[0]
    if name not in registry():
        close = difflib.get_close_matches(name, registry(), n=1, cutoff=0.8)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"{where}: the architecture {name!r} is not implemented.{hint}",
            f"Proa knows {', '.join(registry())}.",
        )
    return name
