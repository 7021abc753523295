"""Every Triton kernel compiles for every architecture, without a GPU.

Run: python tools/check_kernels.py [--all] [--record] [module...]

Each module of proa.ops.triton that has `variants()` names what its launchers use; each variant is compiled for sm_75
to sm_120, and the shared memory of a block compared with what that architecture gives. Compiled kernels are kept in
~/.triton/cache/checked.

Compiling all of them takes two cores eight minutes. tools/kernels_passed.txt therefore lists the fingerprints of
variants that passed: a hash of Triton's version, the compile options and the kernel's IR (TTIR) for each architecture.
A listed variant is not compiled again, except for SPOT_CHECKS chosen at random. --all compiles every variant; --record
writes the list if nothing failed.

For sm_90 the code of some kernels is read, too: kernel_code.py.

Where the optimised LLVM code for an architecture is that of an older one, the rest of the compiler has passed it:
PTX of an older architecture is PTX of every newer one.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import pkgutil
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
KIB = 1024
SHARED_BYTES = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB a block may ask for
PACKAGE = "proa.ops.triton"
RECORD = Path(__file__).parent / "kernels_passed.txt"
SPOT_CHECKS = 6


def attributes(variant) -> dict[tuple[int], list[list[object]]]:
    return {(variant.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned}


class Passed:
    """LLVM code of one kernel that was assembled for some architecture. The oldest comes first."""

    def __init__(self) -> None:
        self._codes: set[str] = set()

    def skip(self, *asked) -> tuple[str, str]:
        """A hook of Triton's (backend, stages, options, language, capability): changes the stages of a compilation that
        follow LLVM's. Since 3.7 it is also asked, with nothing, what to add to the key and the hash of what is kept."""
        if not asked:
            return "", ""
        stages = asked[1]
        to_ptx, to_cubin = stages["ptx"], stages["cubin"]
        llvm: list[str] = []

        def ptx(code: str, metadata) -> str:
            metadata["name"] = ""  # what is not assembled has none
            llvm.append(code)
            return "" if code in self._codes else to_ptx(code, metadata)

        def cubin(code: str, metadata) -> bytes:
            made = to_cubin(code, metadata) if code else b""
            self._codes.update(llvm)
            return made

        stages["ptx"], stages["cubin"] = ptx, cubin
        return "", ""


class Lowered(Exception):
    """Stops a compilation once the kernel's IR is made. Its argument is the IR's text, without source positions."""


def stop_at_ir(*asked) -> tuple[str, str]:
    """See Passed.skip. The key differs from that of a whole compilation, whose result may be in the cache."""
    if not asked:
        return "ir", "ir"

    def stop(module, metadata) -> None:
        raise Lowered(module.str_nodebug())

    asked[1]["ttgir"] = stop
    return "ir", "ir"


def fingerprint(variant) -> str:
    """Hash of everything that the check of a variant depends on; empty if the kernel cannot be lowered."""
    import triton

    rules = Path(__file__).with_name("kernel_code.py").read_text()
    found = [triton.__version__, rules, str(variant.warps), str(variant.stages), str(variant.shared_kib)]
    for capability in architectures(variant):
        try:
            compiled(variant, capability, stop_at_ir)
        except Lowered as lowered:
            found += [str(capability), str(SHARED_BYTES[capability]), *lowered.args]
        except Exception:  # noqa: BLE001 - the check itself reports it
            return ""
        else:
            return ""  # Triton 3.6 has no key for the hook: the result came from the cache
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:24]


def architectures(variant) -> list[int]:
    """The architectures that a variant is meant for."""
    return [
        capability
        for capability, limit in SHARED_BYTES.items()
        if variant.least <= capability <= (variant.newest or capability) and limit >= variant.shared_kib
    ]


def not_assembled(*asked) -> tuple[str, str]:
    """See Passed.skip. Keeps PTX, which has no machine code then; the key differs as in stop_at_ir."""
    if asked:
        asked[1]["cubin"] = lambda code, metadata: b""
    return "code", "code"


def compiled(variant, capability: int, hook):
    """For one architecture. hook: of Triton's, such as Passed.skip. Raises whatever the compiler does."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {
        name: "constexpr" if name in variant.constants else variant.types[name] for name in variant.kernel.arg_names
    }
    source = ASTSource(variant.kernel, signature, dict(variant.constants), attributes(variant))
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    knobs.runtime.add_stages_inspection_hook = hook
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def code_problem(module: str, variant) -> str:
    """What is wrong with the variant's code for sm_90; "" if nothing, or if kernel_code.py asks nothing of it."""
    from triton import knobs

    from kernel_code import check_of

    if (of_code := check_of(module, variant)) is None:
        return ""
    with knobs.cache.scope():  # apart from those whose PTX was left out
        knobs.cache.dir = str(Path(knobs.cache.dir, "code"))
        return of_code(variant, compiled(variant, 90, not_assembled).asm)


def fingerprint_of(module: str, index: int) -> str:
    variant = list(importlib.import_module(module).variants())[index]
    strange = set(variant.kernel.arg_names) ^ {*variant.types, *variant.constants}
    return "" if strange else fingerprint(variant)


def check(module: str, index: int) -> tuple[str, list[str]]:
    """The line to print of a variant, and what is wrong with it."""
    variant = list(importlib.import_module(module).variants())[index]
    kernel = f"{module.rsplit('.', 1)[-1]}.{variant.kernel.__name__}"
    constants = " ".join(f"{k}={v}" for k, v in variant.constants.items())
    types = ",".join(sorted(set(variant.types.values())))
    name = f"{kernel} {constants} ({types}) warps={variant.warps} stages={variant.stages}"
    strange = set(variant.kernel.arg_names) ^ {*variant.types, *variant.constants}
    if strange:
        return name, [f"{name}: the variant and the kernel's arguments differ in {', '.join(sorted(strange))}"]
    most, found, passed = 0, [], Passed()
    failed: dict[str, list[str]] = {}  # by what the compiler says, the architectures
    for capability in architectures(variant):
        limit = SHARED_BYTES[capability]
        try:
            used = compiled(variant, capability, passed.skip).metadata.shared
        except Exception as error:  # noqa: BLE001 - whatever the compiler throws is the finding
            failed.setdefault(f"{type(error).__name__}: {error}", []).append(f"sm_{capability}")
            continue
        most = max(most, used)
        if used > limit * KIB:
            found.append(f"{name}: sm_{capability} has {limit} KiB of shared memory a block, not {used / KIB:.1f}")
    found += [f"{name}: does not compile for {', '.join(where)}: {error}" for error, where in failed.items()]
    if not failed and (problem := code_problem(module, variant)):
        found.append(f"{name}: sm_90: {problem}")
    to = f" to sm_{variant.newest}" if variant.newest else ""
    return f"{name}: from sm_{variant.least}{to}, at most {most / KIB:.1f} KiB shared", found


def modules_of_kernels() -> list[str]:
    package = importlib.import_module(PACKAGE)
    return [f"{PACKAGE}.{found.name}" for found in pkgutil.iter_modules(package.__path__)]


def work(modules: list[str]) -> list[tuple[str, int]]:
    loaded = [(name, importlib.import_module(name)) for name in modules]
    return [(name, i) for name, m in loaded if "variants" in vars(m) for i in range(len(list(m.variants())))]


def main(arguments: list[str]) -> int:
    asked = parse(arguments)
    if find_spec("triton") is None:
        print("kernels: there is no Triton here to compile them; run: pip install 'triton>=3.6'")
        return 1
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted functions cannot be compiled
    # Apart from what programs run: of what has passed already there is no machine code here.
    cache = os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache")
    os.environ["TRITON_CACHE_DIR"] = str(Path(cache, "checked"))
    sys.path.insert(0, str(ROOT / "src"))
    todo = work(asked.modules or modules_of_kernels())
    known = set(RECORD.read_text().split()) if RECORD.exists() and not asked.all else set()
    found: list[str] = []
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        marks = list(workers.map(fingerprint_of, *zip(*todo, strict=True))) if todo else []
        again = random.sample(range(len(todo)), min(SPOT_CHECKS, len(todo)))
        chosen = [job for i, job in enumerate(todo) if marks[i] not in known or i in again]
        for line, problems in workers.map(check, *zip(*chosen, strict=True)) if chosen else ():
            print(line, flush=True)
            found += problems
    if asked.record and not found:
        RECORD.write_text("".join(f"{mark}\n" for mark in sorted({*marks} - {""})))
    span = f"sm_{min(SHARED_BYTES)} to sm_{max(SHARED_BYTES)}"
    passed = len(todo) - len(chosen)
    print("\n".join(found) or f"kernels: {len(todo)} variants compile for {span} ({passed} had passed before)")
    if len(chosen) > SPOT_CHECKS and not (asked.modules or asked.all or asked.record or found):
        print(f"kernels: {len(chosen)} variants were compiled; add them: python tools/check_kernels.py --record")
    return bool(found)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compile every Triton kernel for every architecture, without a GPU.")
    parser.add_argument("modules", nargs="*", metavar="module")
    parser.add_argument("--all", action="store_true", help="also variants that passed before")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    asked = parser.parse_args(arguments)
    if asked.record and asked.modules:
        parser.error("--record writes the list of all modules: name none")
    return asked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
