"""Reads the YAML options file of `--config`. Keys may be flat or nested under their group.

port: 8001            # flat: an option's name
cache:                # or under its group's name
  context: 32768
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proa.config.field import Declaration
from proa.config.suggest import did_you_mean
from proa.config.value import from_data
from proa.errors import UsageError

if TYPE_CHECKING:
    import yaml


@dataclass(frozen=True)
class FileValue:
    """A value of the options file, and its position for error messages."""

    value: Any
    source: str  # "serve.yaml line 3"


def read_options_file(path: Path, options: Mapping[str, Declaration]) -> dict[str, FileValue]:
    """Read the file's values by option name. Raises UsageError, with file, line and key, if the file is unreadable or
    not YAML, or a key is unknown, repeated, in the wrong group, of the wrong type or out of range."""
    found: dict[str, FileValue] = {}
    for option, node in _entries(_root(path), options, path.name, ()):
        where = f"{path.name} line {node.start_mark.line + 1}"
        if option.name in found:
            raise UsageError(
                f"{where} sets {option.name} again (first: {found[option.name].source}).", "Remove one of them."
            )
        found[option.name] = FileValue(from_data(option, _data(node, where), f"{where}: {option.name}"), where)
    return found


def _root(path: Path) -> yaml.MappingNode | None:
    import yaml  # takes 30 ms to import: only if there is an options file

    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as e:
        raise UsageError(f"The options file {path} cannot be read: {e.strerror}.", "Check --config.") from e
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as e:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(e).split())}.", "Correct the file.") from e
    if root is None or root.tag == "tag:yaml.org,2002:null":  # an empty file
        return None
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path} is not a YAML mapping.", "Write one `option: value` per line, such as `port: 8001`.")
    return root


def _entries(
    node: yaml.MappingNode | None, options: Mapping[str, Declaration], file: str, group: tuple[str, ...]
) -> Iterator[tuple[Declaration, yaml.Node]]:
    """Yield every (option, value node) of a mapping and of the group mappings inside it."""
    groups = {p for o in options.values() for p in o.path}
    for key_node, value_node in node.value if node else ():
        key = str(key_node.value)
        where = f"{file} line {key_node.start_mark.line + 1}"
        if key in groups and key not in group and value_node.id == "mapping":
            yield from _entries(value_node, options, file, (*group, key))
            continue
        if key in groups and key not in options:
            raise UsageError(
                f"{where}: {key} is a group of options, not an option.",
                "Write its options indented below it.",
                param=key,
            )
        option = options.get(key)
        if option is None:
            raise UsageError(
                f"{where}: there is no option {key}.",
                f"{did_you_mean(key, [*options, *groups])} `--help-all` lists all options.".strip(),
                param=key,
            )
        if not set(group) <= set(option.path):
            raise UsageError(
                f"{where}: {key} is not an option of the group {group[-1]}.",
                f"Move it to the group {option.path[-1]}." if option.path else "Move it to the left margin.",
                param=key,
            )
        yield option, value_node


def _data(node: yaml.Node, where: str) -> Any:
    """Convert a YAML node to a plain Python value, as yaml.safe_load does."""
    import yaml  # already imported by _root

    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError) as e:
        raise UsageError(f"{where} cannot be read: {' '.join(str(e).split())}.", "Correct the value.") from e
    finally:
        loader.dispose()
