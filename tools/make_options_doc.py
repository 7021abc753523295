"""Write docs/options.md from the declarations. `--check` only says whether the file is current.

python tools/make_options_doc.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill

from proa.cli.bench_hybrid import HybridCommand
from proa.cli.bench_kernels import KernelsCommand
from proa.cli.bench_latency import LatencyCommand
from proa.cli.bench_load import LoadCommand
from proa.cli.bench_prefill import PrefillCommand
from proa.cli.bench_restart import RestartCommand
from proa.cli.bench_serve import ServeBenchCommand
from proa.cli.chat import ChatOptions
from proa.cli.check import CheckCommand
from proa.cli.doctor import DoctorOptions
from proa.cli.launch import LaunchOptions
from proa.cli.models import ModelsOptions
from proa.cli.plan import PlanCommand
from proa.cli.serve import ServeCommand
from proa.cli.warm import WarmCommand
from proa.config.env import PREFIX, SWITCHES
from proa.config.field import Declaration, declarations
from proa.config.value import to_text

FILE = Path(__file__).resolve().parents[1] / "docs" / "options.md"

INTRODUCTION = """\
# Options

Written by `tools/make_options_doc.py` from the declarations in `src/proa`; change those, not this file.

Every option is declared once. An option `max_running` is

- the flag `--max-running` (an on/off option: `--strict`, `--no-strict`),
- the key `max_running` in a YAML file given with `--config`, at the left margin or under its group's name,
- the keyword `max_running` of `LLM("demo", max_running=8)`, if it belongs to the engine.

Flags take precedence over the file, and the file over defaults; a list given by flags replaces the file's list. A
misspelt name, a wrong type or a value out of range is an error, which names what is allowed. Sizes are bytes: `24GiB`,
`512M` and `1.5G` are powers of 1024, `24GB` is a power of 1000. Numbers of tokens may be written `32k` or `64K` (32768,
65536) and `1M`. The table that `proa serve` prints has, for each setting, the requested value, the chosen value and the
reason.

```yaml
# proa serve demo --config serve.yaml
port: 8001
cache:
  context: 32768
  kv_memory: 4GiB
ignore_config_key: [some_key]
```
"""

# The page's table of defaults: (what, option, why).
DEFAULTS = (
    ("address", "host", "other hosts cannot connect; with `--host 0.0.0.0` they can: then set `--api-key`"),
    ("port", "port", "the default of most clients"),
    ("context", "context", "one conversation may use the model's full context"),
    ("requests at once", "max_running", "one person and a few agents; further requests wait in the queue"),
    ("waiting requests", "max_queued", "beyond it, clients get 429 instead of waiting indefinitely"),
    ("tokens per step", "max_batch_tokens", "running requests keep decoding during the prefill of a long prompt"),
    ("RAM", "ram", "free memory, not total memory: other programs keep theirs"),
    ("RAM left free", "ram_reserve", "for the system and for programs started later"),
    ("GPU", "gpu", "the usable GPU with most free memory; the CPU alone if there is none or the model does not fit"),
    ("VRAM", "vram", "free memory, as with RAM"),
    ("experts in VRAM", "gpu_experts", "as many as fit beside dense weights and KV, the same number in each layer"),
    ("threads", "threads", "affinity, cpuset and CPU quota are respected"),
    ("prefix cache", "prefix_cache", "agents send prompts with the same prefix repeatedly"),
    ("on SIGTERM", "drain_seconds", "seconds for running requests to finish"),
)  # fmt: skip

SAMPLING = """\
Sampling parameters come from the request, else from the checkpoint's `generation_config.json`, else they are neutral:
temperature 1, top_p 1, top_k 0 (all tokens), min_p 0, repetition_penalty 1, no other penalty. Without `max_tokens`, an
answer may fill the context.
"""


def document() -> str:
    """Build the text of docs/options.md."""
    serve = declarations(ServeCommand)
    parts = [INTRODUCTION, "## Defaults\n", _defaults(serve), SAMPLING, "## proa serve MODEL\n"]
    for title, options in _by_title(serve.values()):
        parts += [f"### {title}\n", _table(options)]
    for command, group in (
        ("plan MODEL", PlanCommand), ("chat [MODEL]", ChatOptions), ("launch AGENT [MODEL]", LaunchOptions),
        ("bench latency", LatencyCommand), ("bench serve", ServeBenchCommand),
        ("bench kernels", KernelsCommand), ("bench load", LoadCommand), ("bench hybrid", HybridCommand),
        ("bench prefill", PrefillCommand), ("bench restart", RestartCommand),
        ("check MODEL", CheckCommand), ("warm MODEL", WarmCommand), ("models", ModelsOptions),
        ("doctor", DoctorOptions),
    ):  # fmt: skip
        own = [o for o in declarations(group).values() if "engine" not in o.path]
        parts += [f"## proa {command}\n", _table(own)]
        if len(own) < len(declarations(group)):
            above = "And the engine's options above: " + _titles(declarations(group).values()) + "."
            parts.append(fill(above, 120) + "\n")
    parts += ["## Environment\n", _environment()]
    return "\n".join(parts)


def _titles(options: Iterable[Declaration]) -> str:
    return ", ".join(f"*{title}*" for title, inside in _by_title(options) if "engine" in inside[0].path)


def _by_title(options: Iterable[Declaration]) -> list[tuple[str, list[Declaration]]]:
    groups: dict[str, list[Declaration]] = {}
    for option in options:
        groups.setdefault(option.title if option.path else "The command itself", []).append(option)
    return list(groups.items())


def _defaults(options: dict[str, Declaration]) -> str:
    rows = ["| what | default | why | option |", "|---|---|---|---|"]
    for what, name, why in DEFAULTS:
        rows.append(f"| {what} | {_default(options[name])} | {why} | `{options[name].flag}` |")
    return "\n".join(rows) + "\n"


def _table(options: Sequence[Declaration]) -> str:
    rows = ["| option | takes | default | meaning |", "|---|---|---|---|"]
    for option in options:
        meaning = option.info.help.partition("; default: ")[0].removesuffix(" (repeatable)")
        rows.append(f"| {_spelling(option)} | {_takes(option)} | {_default(option)} | {_cell(meaning)} |")
    return "\n".join(rows) + "\n"


def _spelling(option: Declaration) -> str:
    short = f"`-{option.info.short}`, " if option.info.short else ""
    return f"{short}`{option.spelling}`"


def _takes(option: Declaration) -> str:
    if option.type is bool:
        return "on or off"
    if option.info.choices:
        return ", ".join(f"`{choice}`" for choice in option.info.choices)
    if option.type is str:
        many = ", repeatable" if option.repeatable else ""
        return _cell(f"{option.info.metavar or 'TEXT'}{many}")
    if option.info.kind == "size":
        return "SIZE"
    return _range(option)


def _range(option: Declaration) -> str:
    """Format an option's bounds; an upper bound above 1,000,000 is omitted, as no realistic value reaches it."""
    low, high = option.info.low, option.info.high
    if high is None or high > 1_000_000:
        return f"{low:g} or more"
    return f"{low:g} to {high:g}"


def _default(option: Declaration) -> str:
    if option.required:
        return "must be given"
    if option.default is None:
        return _cell(option.info.help.partition("; default: ")[2] or "not set")
    return f"`{to_text(option, option.default)}`" if option.default != () else "none"


def _environment() -> str:
    rows = [
        "For debugging only; a name or value that Proa does not know is an error.\n",
        "| variable | takes | meaning |",
    ]
    rows.append("|---|---|---|")
    for name, switch in SWITCHES.items():
        rows.append(f"| `{PREFIX}{name.upper()}` | {_takes(switch)} | {_cell(switch.info.help)} |")
    return "\n".join(rows) + (
        "\n\n`HF_TOKEN`, `HF_ENDPOINT`, `HF_HOME` and `HF_HUB_OFFLINE` mean what they mean to huggingface_hub.\n"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(argv: Sequence[str]) -> int:
    if argv == ["--check"]:
        is_current = FILE.exists() and FILE.read_text(encoding="utf-8") == document()
        print("current" if is_current else f"{FILE.name} is out of date: run python tools/make_options_doc.py")
        return 0 if is_current else 1
    FILE.write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
