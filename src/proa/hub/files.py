"""Chooses, by file name, which files of a repository make up the model: one weight format, no duplicates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from proa.errors import ModelNotFound, UsageError, WeightsError
from proa.hub.repository import HubFile, Repository
from proa.obs.units import format_bytes

Format = Literal["safetensors", "bin", "gguf"]

_SMALL = frozenset(
    (
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
        "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tekken.json", "tiktoken.model",
        "chat_template.jinja", "chat_template.json", "model.safetensors.index.json", "pytorch_model.bin.index.json",
        "hf_quant_config.json",
    )
)  # fmt: skip

# Those of them that a plan needs: the config and the index, without the tokenizer.
HEADER_FILES = frozenset(
    ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json", "hf_quant_config.json")
)


def is_small(path: str) -> bool:
    """Whether a model needs this file beside its weights: config, tokenizer, chat templates, index."""
    return path in _SMALL or re.fullmatch(r"additional_chat_templates/[^/]+\.jinja", path) is not None


# Names of weight files in a repository without an index; the negative lookahead excludes duplicates and other tensors.
_PATTERNS: dict[Format, re.Pattern[str]] = {
    "safetensors": re.compile(r"(?!consolidated|adapter|optimizer)[^/]+\.safetensors"),
    "bin": re.compile(r"pytorch_model[^/]*\.bin"),
}
_SINGLE: dict[Format, str] = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_LABEL = re.compile(r"[-._](?P<label>(UD-)?(I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|F16|FP16|F32))$", re.IGNORECASE)


@dataclass(frozen=True)
class GgufGroup:
    """The files of one GGUF model: one file, or the parts of a split model in order. label: the quantisation in the
    file name, "" if there is none."""

    stem: str
    paths: tuple[str, ...]
    num_parts: int

    @property
    def label(self) -> str:
        match = _LABEL.search(self.stem)
        return match["label"].upper() if match else ""

    @property
    def first(self) -> str:
        return self.paths[0]

    @property
    def is_complete(self) -> bool:
        return len(self.paths) == self.num_parts


def gguf_groups(paths: Iterable[str]) -> list[GgufGroup]:
    """Group GGUF files by model; vision projectors (mmproj) are skipped."""
    groups: dict[str, list[str]] = {}
    num_parts: dict[str, int] = {}
    for path in sorted(paths):
        stem = path.removesuffix(".gguf")
        if stem == path or path.rpartition("/")[2].startswith("mmproj"):
            continue
        part = _PART.fullmatch(stem)
        stem = part["stem"] if part else stem
        groups.setdefault(stem, []).append(path)
        num_parts[stem] = int(part["count"]) if part else 1
    return [GgufGroup(stem, tuple(found), num_parts[stem]) for stem, found in groups.items()]


def named_group(groups: list[GgufGroup], wanted: str) -> GgufGroup | None:
    """Return the model whose file name or quantisation is `wanted`; None if there is none, or more than one."""
    by_file = [g for g in groups if wanted in g.paths]
    by_label = [g for g in groups if g.label == wanted.upper()]
    found = by_file or by_label
    return found[0] if len(found) == 1 else None


def sole_gguf(paths: Collection[str]) -> GgufGroup | None:
    """Return a repository's only model, if it is GGUF and complete; None if another one is first or must be chosen."""
    if any(pattern.fullmatch(path) for pattern in _PATTERNS.values() for path in paths):
        return None
    groups = gguf_groups(paths)
    return groups[0] if len(groups) == 1 and groups[0].is_complete else None


def choose_format(repository: Repository) -> Format:
    """Choose safetensors before PyTorch's .bin before GGUF; always GGUF if the reference names a file. Raises
    ModelNotFound."""
    paths = {file.path for file in repository.files}
    if repository.reference.file:
        return "gguf"
    for format_, pattern in _PATTERNS.items():
        if any(pattern.fullmatch(path) for path in paths):
            if "config.json" not in paths:
                raise ModelNotFound(
                    f"{repository.reference} has weights but no config.json.",
                    "Use a repository with the complete model.",
                )
            return format_
    if gguf_groups(paths):
        return "gguf"
    kinds = sorted({path.rpartition(".")[2] for path in paths if "." in path})
    raise ModelNotFound(
        f"{repository.reference} has no weights that Proa reads (safetensors, pytorch_model*.bin or GGUF); "
        f"its files end with {', '.join(kinds) or 'nothing'}.",
        "Look for another repository of the same model.",
    )


def choose_gguf(repository: Repository) -> tuple[HubFile, ...]:
    """Return the files of the requested GGUF model. Raises UsageError, which lists the choices, if it is ambiguous;
    ModelNotFound, WeightsError."""
    groups = gguf_groups(file.path for file in repository.files)
    wanted = repository.reference.file
    group = named_group(groups, wanted) if wanted else (groups[0] if len(groups) == 1 else None)
    files = {file.path: file for file in repository.files}
    if group and group.is_complete:
        return tuple(files[path] for path in group.paths)
    repo = repository.reference.repo
    if not groups:
        raise ModelNotFound(f"{repo} has no GGUF files, so :{wanted} matches no file.", f"Give {repo} without it.")
    if group:
        raise WeightsError(
            f"{repo}: {group.stem} has only {len(group.paths)} of its {group.num_parts} parts.", "Choose another file."
        )
    labels = [g.label for g in groups]
    listed = [
        f"{repo}:{g.label if g.label and labels.count(g.label) == 1 else g.first} "
        f"({format_bytes(sum(files[path].size_bytes for path in g.paths))})"
        for g in groups
    ]
    said = f"no single GGUF model called {wanted}" if wanted else f"{len(groups)} GGUF models"
    raise UsageError(f"{repo} has {said}.", f"Choose one: {', '.join(listed)}.")


def choose_weights(repository: Repository, format_: Format, read: Callable[[HubFile], bytes]) -> tuple[HubFile, ...]:
    """Return the weight files of a safetensors or .bin model: those in the index, else the single file, else all that
    are named like shards. `read`: returns a file's content. Raises WeightsError."""
    files = {file.path: file for file in repository.files}
    single = _SINGLE[format_]
    index = files.get(f"{single}.index.json")
    if index:
        names = shard_names(read(index), index.path)
        if missing := [name for name in names if name not in files]:
            raise WeightsError(
                f"{repository.reference}: {index.path} lists {missing[0]}, which is not in the repository.",
                "The repository is incomplete; use another revision.",
            )
        return tuple(files[name] for name in names)
    if single in files:
        return (files[single],)
    return tuple(file for file in repository.files if _PATTERNS[format_].fullmatch(file.path))


def has_all_parts(paths: Collection[str]) -> bool:
    """Return True if the safetensors files, or else the .bin files, are all numbered parts of one model. Whether files
    without numbers are complete is not known without an index."""
    for pattern in _PATTERNS.values():
        if weights := [path for path in paths if pattern.fullmatch(path)]:
            parts = [_PART.fullmatch(path.rpartition(".")[0]) for path in weights]
            return all(part is not None and int(part["count"]) == len(weights) for part in parts)
    return False


def shard_names(index: bytes, name: str) -> list[str]:
    """Return the weight files that a *.index.json lists. Raises WeightsError if it is malformed."""
    try:
        return sorted(set(json.loads(index)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"{name} is not a valid index ({type(error).__name__}: {error}). The repository or the download is "
            "damaged.",
            "Use another revision, or delete the file and download it again.",
        ) from error
