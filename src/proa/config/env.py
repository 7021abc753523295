"""The only reader of the environment: at most ten debug switches, each declared once. Never: anything that
decides how or where a model runs; that is an option.

HF_TOKEN, HF_ENDPOINT and HF_HOME are huggingface_hub's own and are read by it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proa.config.field import declarations, option
from proa.config.suggest import did_you_mean
from proa.config.value import from_text
from proa.errors import UsageError
from proa.obs.version import proa_version

PREFIX = "PROA_"


@dataclass(frozen=True)
class _Switches:
    """Environment variables, for debugging only"""

    cache: str | None = option(
        None, help="folder for what Proa builds and may delete; default: ~/.cache/proa", metavar="PATH"
    )
    isa: str = option(
        "",
        help="run lesser CPU kernels than the best: scalar, avx2, avx512, avx512-bf16, amx, as far as the CPU has them",
    )
    log: str = option(
        "info",
        help="how much to log; debug also shows Python tracebacks",
        choices=("debug", "info", "warning", "error"),
    )
    ram_probe: int | None = option(
        None,
        help="how much memory to read when RAM is measured at start; default: four times the last-level cache, "
        "which less might be read from; at most an eighth of the free RAM",
        metavar="SIZE",
        kind="size",
        low=4 << 20,
    )


SWITCHES = declarations(_Switches)


@dataclass(frozen=True)
class Environment:
    """The switches, defaults filled in. `cache_path` may start with "~"."""

    cache_path: Path
    isa: str
    log: str
    ram_probe_bytes: int | None

    @property
    def cache(self) -> Path:
        """The cache folder, absolute; it may not exist yet. Raises UsageError if it needs a home and there is none."""
        try:
            return self.cache_path.expanduser().absolute()
        except RuntimeError as error:  # HOME is unset and the user id has no passwd entry, as in some containers
            raise UsageError(
                f"The cache folder is {self.cache_path}, but this user has no home folder.",
                "Set PROA_CACHE to a folder that can be written.",
            ) from error

    @property
    def debug(self) -> bool:
        return self.log == "debug"


def read_env(environ: Mapping[str, str] | None = None) -> Environment:
    """The switches of this process. Raises UsageError for an unknown PROA_ name or a wrong value."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {name: switch.default for name, switch in SWITCHES.items()}
    for variable in sorted(v for v in environ if v.startswith(PREFIX)):
        name = variable.removeprefix(PREFIX).lower()
        if name not in SWITCHES:
            known = [PREFIX + n.upper() for n in SWITCHES]
            raise UsageError(
                f"The environment variable {variable} is set, which Proa does not know.",
                f"{did_you_mean(variable, known)} Known: {', '.join(known)}.".strip(),
            )
        values[name] = from_text(SWITCHES[name], environ[variable], variable)
    cache = values["cache"] or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "proa"
    return Environment(Path(cache), values["isa"], values["log"], values["ram_probe"])


def cuda_environ(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What CUDA itself reads to choose and number GPUs, of this process's environment."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER") if name in environ}


# What the libraries under the engine read, unless the user has set it.
_LIBRARY_DEFAULTS = {
    "OMP_WAIT_POLICY": "passive",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
}


def child_environ(**switches: str) -> dict[str, str]:
    """The environment for a program that Proa starts: this process's own, with switches replaced.

    OpenMP threads must sleep while they wait: spinning ones starve each other when the cores are shared with
    anything else. oneDNN's caches hold a compiled kernel of a third of a megabyte for every shape they see, 1024 by
    default, which no memory plan could count on. See docs/decisions/010. Triton keeps compiled GPU kernels by its own
    version, source and architecture; here beside what else Proa may delete, by Proa's version.
    """
    return {
        **_LIBRARY_DEFAULTS,
        **_kernel_cache(),
        **os.environ,
        **{PREFIX + name.upper(): value for name, value in switches.items()},
    }


def _kernel_cache() -> dict[str, str]:
    try:
        return {"TRITON_CACHE_DIR": str(read_env().cache / "triton" / proa_version())}
    except UsageError:  # no home folder: Triton has its own idea of where, and of what to say
        return {}
