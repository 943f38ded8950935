"""Compiles CUDA sources to machine code by NVRTC, which comes with CUDA builds of torch, through ctypes."""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from timeloom.kernels import cache as kept
from timeloom.kernels.cuda.ahead import AHEAD

Headers = Sequence[tuple[str, str]]


class CompileError(RuntimeError):
    """NVRTC is missing or rejected a source; the message says which."""


@cache
def unavailable() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        _library()
    except CompileError as error:
        return str(error)
    return None


@cache
def version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def compile_source(source: str, architecture: str, headers: Headers = ()) -> bytes:
    """Machine code (a cubin) for an architecture such as `sm_90`; kept between runs. `headers`: names and texts."""
    key, build = _build_of(source, architecture, headers)
    made = AHEAD.take(key)
    return build() if made is None else made


def compile_ahead(source: str, architecture: str, headers: Headers = ()) -> None:
    """Do the same in the background, for a later `compile_source`."""
    AHEAD.begin(*_build_of(source, architecture, headers))


def _build_of(source: str, architecture: str, headers: Headers) -> tuple[str, Callable[[], bytes]]:
    flags = (f"--gpu-architecture={architecture}", "--std=c++17")
    key = hashlib.sha256(repr((source, headers, flags, version())).encode()).hexdigest()[:20]
    return key, lambda: kept.fetch_bytes(f"cuda-{key}", "cubin", lambda: _compile(source, flags, headers))


def _compile(source: str, flags: Sequence[str], headers: Sequence[tuple[str, str]]) -> bytes:
    library, program, count = _library(), ctypes.c_void_p(), len(headers)
    names, texts = ((ctypes.c_char_p * count)(*(pair[i].encode() for pair in headers)) for i in (0, 1))
    created = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"timeloom.cu", count, texts, names)
    _check(created)
    try:
        given = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        if library.nvrtcCompileProgram(program, len(flags), given) != 0:
            log = _text(program, "ProgramLog").decode(errors="replace")
            first = next((line for line in log.splitlines() if "error" in line), "no error told")
            raise CompileError(f"NVRTC {'.'.join(map(str, version()))} with {' '.join(flags)}: {first}\n{log}")
        return _text(program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(_library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(getattr(_library(), f"nvrtcGet{what}")(program, text))
    return text.raw if what == "CUBIN" else text.value


def _check(status: int) -> None:
    if status != 0:
        raise CompileError(f"NVRTC failed with status {status}")


@cache
def _library() -> ctypes.CDLL:
    for path in _places():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise CompileError("no NVRTC library found: install a CUDA build of torch, which brings it along")


def _places() -> Iterator[str]:
    """Where the library may be: beside torch, in the wheels it depends on, in the system's folders."""
    for package in ("nvidia", "torch"):
        spec = find_spec(package)
        for folder in spec.submodule_search_locations or () if spec is not None else ():
            found = Path(folder).glob("**/libnvrtc.so*")
            yield from sorted(map(str, found), reverse=True)
    system = ctypes.util.find_library("nvrtc")
    if system is not None:
        yield system
