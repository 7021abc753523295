"""Loading of the native library, its signatures and its errors."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proa import native
from proa.errors import NativeError, NumericsError, ResourceError
from proa.native.library import ABI_VERSION, PATH, Library, Signatures, error_of, finalizer, library

HEADER = "".join(p.read_text() for p in sorted((Path(__file__).parents[2] / "csrc" / "include" / "proa").glob("*.h")))

# Type in csrc/include/proa/native.h -> ctypes types for it. A handle or an array is a void pointer, or typed.
SCALARS = {
    "int": ctypes.c_int,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "uint8_t": ctypes.c_uint8,
}
UNCHECKED = {  # they do not return an error code
    *("proa_abi_version", "proa_last_error"),
    *("proa_doorbell_call_ring", "proa_doorbell_call_wait"),
}
FOR_TESTS = {"proa_get_format_kernels"}  # bound by tests/ops/test_native_weights.py


def declared() -> dict[str, list[str]]:
    """Function -> its parameters, as written in native.h."""
    code = re.sub(r"//[^\n]*", "", HEADER)
    found = re.findall(r"PROA_API\s+[\w\s*]*?\b(proa_\w+)\s*\(([^)]*)\)\s*;", code)
    return {
        name: [p.strip() for p in parameters.split(",") if p.strip() not in ("", "void")] for name, parameters in found
    }


def tables() -> Iterator[tuple[str, Signatures]]:
    """The table of each module that has one."""
    for path in sorted(PATH.parent.glob("*.py")):
        module = importlib.import_module(f"proa.native.{path.stem}")
        for name, value in vars(module).items():
            if name.endswith("SIGNATURES"):
                yield path.name, value


def fits(parameter: str, kind: type) -> bool:
    """True if a ctypes type can be passed for a C parameter."""
    if "*" in parameter:
        return kind in (ctypes.c_void_p, ctypes.c_char_p) or issubclass(kind, ctypes._Pointer | ctypes.Array)
    return kind is SCALARS[parameter.removeprefix("const ").split()[0]]


def compiled(folder: Path, source: str) -> Path:
    """A shared library of some C."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    path = folder / "libfake.so"
    (folder / "fake.c").write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, folder / "fake.c"], check=True)
    return path


def fake(folder: Path, version: int = ABI_VERSION) -> Library:
    """A library whose only function returns the code that it is passed."""
    source = f"""
        int proa_abi_version(void) {{ return {version}; }}
        const char* proa_last_error(void) {{ return "Rows must be positive, not -1."; }}
        int proa_return(int code) {{ return code; }}
    """
    return Library(compiled(folder, source))


def test_the_library_is_that_of_this_checkout_and_loaded_once() -> None:
    assert library() is library()
    assert library().path == PATH
    assert PATH.parent == Path(native.__file__).parent
    with ThreadPoolExecutor(1) as fresh:  # an error is its thread's own
        assert fresh.submit(library().bind({}).proa_last_error).result() == b""


def test_header_and_python_agree_on_version_and_codes() -> None:
    constants = dict(re.findall(r"#define (PROA_\w+) (\d+)", HEADER))
    assert int(constants["PROA_ABI_VERSION"]) == ABI_VERSION
    kinds = {name: type(error_of(int(constants[name]), "")) for name in constants if name.startswith("PROA_ERROR_")}
    assert kinds == {
        "PROA_ERROR_ARGUMENT": ValueError,
        "PROA_ERROR_MEMORY": ResourceError,
        "PROA_ERROR_SYSTEM": NativeError,
        "PROA_ERROR_WORKER": NativeError,
        "PROA_ERROR_NUMERICS": NumericsError,
    }
    assert constants["PROA_OK"] == "0"


def test_every_function_of_the_header_exists_in_the_library() -> None:
    dll = ctypes.CDLL(str(PATH))
    missing = [name for name in declared() if name not in UNCHECKED and not _has(dll, name)]
    assert len(declared()) >= 2
    assert missing == []


def _has(dll: ctypes.CDLL, name: str) -> bool:
    try:
        return bool(dll[name])
    except AttributeError:
        return False


def test_signatures_are_those_of_the_header() -> None:
    header = declared()
    for module, signatures in tables():
        library().bind(signatures)
        for name, kinds in signatures.items():
            assert name in header, f"{module}: {name} is not in native.h"
            assert len(kinds) == len(header[name]), f"{module}: {name} takes {header[name]}"
            for parameter, kind in zip(header[name], kinds, strict=True):
                assert fits(parameter, kind), f"{module}: {name}: {kind} for {parameter!r}"


def test_every_function_of_the_header_has_one_table() -> None:
    named = [name for _, signatures in tables() for name in signatures]
    assert sorted(named) == sorted(declared().keys() - UNCHECKED - FOR_TESTS)


@pytest.mark.parametrize(("code", "kind"), [(1, ValueError), (2, ResourceError), (3, NativeError), (4, NativeError)])
def test_codes_become_exceptions_with_the_library_s_words(code: int, kind: type[Exception], tmp_path: Path) -> None:
    functions = fake(tmp_path).bind({"proa_return": (ctypes.c_int,)})
    assert functions.proa_return(0) == 0
    with pytest.raises(kind, match=r"Rows must be positive, not -1\."):
        functions.proa_return(code)


def test_a_code_of_the_future_is_an_error(tmp_path: Path) -> None:
    functions = fake(tmp_path).bind({"proa_return": (ctypes.c_int,)})
    with pytest.raises(NativeError, match="unknown code 77: Rows must"):
        functions.proa_return(77)


def test_arguments_of_the_wrong_type_never_reach_the_library(tmp_path: Path) -> None:
    functions = fake(tmp_path).bind({"proa_return": (ctypes.c_int,)})
    with pytest.raises(ctypes.ArgumentError):
        functions.proa_return("0")
    with pytest.raises(TypeError):
        functions.proa_return()


def test_a_missing_library_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match=r"there is no .*nowhere\.so\. .*make native"):
        Library(tmp_path / "nowhere.so")


def test_a_library_of_another_version_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match=f"ABI version {ABI_VERSION + 1}; .* needs {ABI_VERSION}.*make native"):
        fake(tmp_path, ABI_VERSION + 1)


def test_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"no library")
    with pytest.raises(NativeError, match="cannot be loaded"):
        Library(tmp_path / "broken.so")
    with pytest.raises(NativeError, match="cannot be loaded"):
        Library(compiled(tmp_path, "int other(void) { return 0; }"))


def test_a_function_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match="no function proa_later"):
        fake(tmp_path).bind({"proa_later": ()})


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12's, of a process with threads
def test_a_forked_process_destroys_no_handle() -> None:
    """Its parent's threads and pinned memory do not exist there: a process that compiled kernels crashed on a GPU."""

    class Owner:
        pass

    calls, owner = list[int](), Owner()
    finalizer(owner, lambda handle: calls.append(os.getpid()), ctypes.c_void_p(1), None)
    if not (child := os.fork()):
        del owner
        gc.collect()
        os._exit(len(calls))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del owner
    assert calls == [os.getpid()]
