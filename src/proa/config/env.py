"""Reads PROA_* environment variables, the debug switches; no other module reads them. Never: settings that decide how
or where a model runs; those are options.

huggingface_hub reads HF_TOKEN, HF_ENDPOINT and HF_HOME itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proa.config.bytecode import bytecode_environ
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
        None, help="cache folder, whose contents Proa can rebuild; default: ~/.cache/proa", metavar="PATH"
    )
    isa: str = option(
        "",
        help="instruction set of the CPU kernels: scalar, avx2, avx512, avx512-bf16 or amx, if the CPU supports it; "
        "default: the best one",
    )
    log: str = option(
        "info",
        help="least severe level that is logged; debug also shows Python tracebacks",
        choices=("debug", "info", "warning", "error"),
    )
    ram_probe: int | None = option(
        None,
        help="bytes to read when RAM bandwidth is measured at start; default: four times the last-level cache (less "
        "might be read from the cache), at most an eighth of the free RAM; less than 256MiB takes less time",
        metavar="SIZE",
        kind="size",
        low=4 << 20,
    )


SWITCHES = declarations(_Switches)


@dataclass(frozen=True)
class Environment:
    """The values of the switches, defaults filled in. `cache_path` may start with "~"."""

    cache_path: Path
    isa: str
    log: str
    ram_probe_bytes: int | None

    @property
    def cache(self) -> Path:
        """Absolute path of the cache folder, which may not exist yet. Raises UsageError if it needs a home folder and
        the user has none."""
        try:
            return self.cache_path.expanduser().absolute()
        except RuntimeError as error:  # HOME is unset and the user id has no passwd entry, as in some containers
            raise UsageError(
                f"The cache folder is {self.cache_path}, but this user has no home folder.",
                "Set PROA_CACHE to a writable folder.",
            ) from error

    @property
    def debug(self) -> bool:
        return self.log == "debug"


def read_env(environ: Mapping[str, str] | None = None) -> Environment:
    """Read the switches of this process. Raises UsageError for an unknown PROA_ variable or an invalid value."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {name: switch.default for name, switch in SWITCHES.items()}
    for variable in sorted(v for v in environ if v.startswith(PREFIX)):
        name = variable.removeprefix(PREFIX).lower()
        if name not in SWITCHES:
            known = [PREFIX + n.upper() for n in SWITCHES]
            raise UsageError(
                f"The environment variable {variable} is set, but Proa has no such switch.",
                f"{did_you_mean(variable, known)} Unset it; the switches are {', '.join(known)}.".strip(),
            )
        values[name] = from_text(SWITCHES[name], environ[variable], variable)
    cache = values["cache"] or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "proa"
    return Environment(Path(cache), values["isa"], values["log"], values["ram_probe"])


def cuda_environ() -> dict[str, str]:
    """Return the environment variables with which CUDA selects and numbers GPUs, if set."""
    return {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER") if name in os.environ}


# Environment variables for OpenMP, oneDNN and torch in the engine process; the user's own values take precedence.
_LIBRARY_DEFAULTS = {
    "OMP_WAIT_POLICY": "passive",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
}


def child_environ(**switches: str) -> dict[str, str]:
    """Return the environment for a child process: this process's own, with `switches` replaced and library defaults.
    Nothing in it depends on a plan, because an engine's process begins before there is one.

    OpenMP threads must sleep while waiting: spinning threads starve each other when other programs use the cores.
    oneDNN's caches keep a compiled kernel of about 340 KB per shape, 1024 by default, too much to plan memory for
    (docs/decisions/010). In Proa's cache folder are Triton's cache of compiled GPU kernels, by Proa's version, and
    bytecode that Python would keep nowhere.
    """
    kernels, bytecode = _caches()
    return {
        **_LIBRARY_DEFAULTS,
        **kernels,
        **os.environ,
        **bytecode,
        **{PREFIX + name.upper(): value for name, value in switches.items()},
    }


def _caches() -> tuple[dict[str, str], dict[str, str]]:
    """Variables for the folders of compiled kernels and of bytecode."""
    try:
        cache = read_env().cache
    except UsageError:  # no home folder: leave the location, and the error message, to Triton
        return {}, {}
    return {"TRITON_CACHE_DIR": str(cache / "triton" / proa_version())}, bytecode_environ(cache)
