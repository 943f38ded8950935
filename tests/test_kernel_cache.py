"""The cache of compiled kernels: what is loaded is the user's own and whole, whatever the machine is like."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from timeloom.kernels import cache
from timeloom.kernels.cpu import build

TEXT = b"what was built"
OTHER_USER = 12345


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of TIMELOOM_CACHE; the others are in tmp_path too."""
    monkeypatch.setenv("TIMELOOM_CACHE", str(tmp_path / "first"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path / "first" / "timeloom"


def write(path: Path) -> None:
    path.write_bytes(TEXT)


def fetch(name: str = "cpu-1", builder: Callable[[Path], None] = write) -> Path:
    path = cache.fetch(name, "so", builder, lambda path: path)
    assert path.read_bytes() == TEXT
    return path


def never(path: Path) -> None:
    raise AssertionError(f"{path} is built anew")


def test_a_second_call_builds_nothing(first: Path) -> None:
    path = fetch()
    assert path.parent == first
    assert fetch(builder=never) == path
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert [found.name for found in first.iterdir()] == [path.name]


def test_the_folder_is_the_owners_alone_under_any_umask(first: Path) -> None:
    before = os.umask(0)
    try:
        fetch()
    finally:
        os.umask(before)
    assert stat.S_IMODE(first.stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", [TEXT[:5], b"", TEXT + b"?", b"X" + TEXT[1:]])
def test_a_half_written_file_is_built_anew(first: Path, damage: bytes) -> None:
    path = fetch()
    path.write_bytes(damage)
    assert fetch() == path


def test_a_build_that_dies_leaves_nothing_that_is_loaded(first: Path) -> None:
    def die(path: Path) -> None:
        path.write_bytes(TEXT[:3])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(builder=die)
    assert list(first.iterdir()) == []
    fetch()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702])
def test_a_folder_that_others_may_write_to_is_passed_over(first: Path, mode: int) -> None:
    planted = fetch()
    first.chmod(mode)
    assert fetch().parent != first
    planted.write_bytes(b"planted")
    assert fetch(builder=never).parent != first


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_file_that_others_may_write_to_is_not_loaded(first: Path, mode: int) -> None:
    fetch().chmod(mode)
    built: list[Path] = []
    fetch(builder=lambda path: (built.append(path), write(path))[1])
    assert len(built) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("what", ["folder", "file", "above"])
def test_what_another_user_owns_is_not_loaded(first: Path, what: str) -> None:
    path = fetch()
    os.chown({"folder": first, "file": path, "above": first.parent}[what], OTHER_USER, OTHER_USER)
    built: list[Path] = []
    again = fetch(builder=lambda path: (built.append(path), write(path))[1])
    assert len(built) == 1
    assert (again.parent == first) == (what == "file")


@pytest.mark.skipif(os.getuid() == 0, reason="root's files are anyone's to trust")
def test_what_another_user_owns_is_unsafe(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch()
    assert cache.why_unsafe(path) is None
    monkeypatch.setattr(cache, "_user", lambda: os.getuid() + 1)
    assert "belongs to another user" in str(cache.why_unsafe(path))


def test_a_link_is_not_loaded(first: Path, tmp_path: Path) -> None:
    path = fetch()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert not fetch().is_symlink()


def test_a_folder_in_one_that_all_may_write_to_needs_its_sticky_bit(first: Path, tmp_path: Path) -> None:
    first.parent.mkdir()
    first.parent.chmod(0o777)
    assert fetch().parent != first
    first.parent.chmod(0o1777)
    assert fetch("cpu-2").parent == first


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_full_or_read_only_folder_is_passed_over(first: Path, code: int) -> None:
    def full(path: Path) -> None:
        if path.parent == first:
            path.write_bytes(TEXT[:5])
            raise OSError(code, os.strerror(code))
        write(path)

    assert fetch(builder=full).parent == first.parents[1] / "second" / "timeloom"
    assert list(first.iterdir()) == []


def test_a_read_only_home_leaves_the_temporary_folder(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        if folder.parent != tmp_path / "tmp":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        folder.mkdir(mode=0o700, exist_ok=True)

    monkeypatch.setattr(cache, "_make", refuse)
    assert fetch().parent == tmp_path / "tmp" / f"timeloom-{os.getuid()}"


def test_a_file_in_a_read_only_folder_is_loaded(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch()
    os.utime(path, (0, 0))

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    assert fetch(builder=never) == path


def test_a_folder_whose_files_may_not_run_is_passed_over(first: Path) -> None:
    def load(path: Path) -> Path:
        if path.parent == first:
            raise OSError("failed to map segment from shared object")
        return path

    for _ in range(2):
        assert cache.fetch("cpu-1", "so", write, load).parent != first


def test_no_folder_at_all_is_told_with_every_reason(first: Path) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(cache.CacheError, match="TIMELOOM_CACHE") as told:
        fetch(builder=full)
    assert str(told.value).count("No space left on device") == 4


def test_bytes_that_cannot_be_kept_are_returned_all_the_same(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def make() -> bytes:
        calls.append(1)
        return TEXT

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", refuse)
        assert cache.fetch_bytes("gru-1", "cubin", make) == TEXT
    assert len(calls) == 1
    assert [cache.fetch_bytes("gru-1", "cubin", make) for _ in range(2)] == [TEXT, TEXT]
    assert len(calls) == 2


def test_old_files_are_pruned_and_others_left(first: Path) -> None:
    old, recent = fetch("cpu-old"), fetch("cpu-recent")
    foreign, dead, busy = first / "notes.txt", first / "building-1.so", first / "building-2.so"
    before_digests = first / f"cpu-{'a' * 20}.so"
    for path in (foreign, dead, busy, before_digests):
        path.write_bytes(TEXT)
    long_ago = time.time() - cache.LONGEST_UNUSED - 60
    for path in (old, foreign, dead, before_digests):
        os.utime(path, (long_ago, long_ago))
    new = fetch("cpu-new")
    assert set(first.iterdir()) == {recent, new, foreign, busy}


def test_a_file_in_use_is_not_old(first: Path) -> None:
    path = fetch("cpu-used")
    long_ago = time.time() - cache.LONGEST_UNUSED - 60
    os.utime(path, (long_ago, long_ago))
    fetch("cpu-used", never)
    fetch("cpu-new")
    assert path.exists()


def test_too_many_bytes_cost_the_files_unused_for_longest(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LARGEST", 3 * len(TEXT))
    paths = [fetch(f"cpu-{index}") for index in range(3)]
    for days, path in zip((3, 5, 2), paths, strict=True):
        used = time.time() - days * 86400
        os.utime(path, (used, used))
    fetch("cpu-new")
    assert [path.exists() for path in paths] == [True, False, True]


PROCESS = """
import sys, time
from pathlib import Path
from timeloom.kernels import cache

def write(path):
    for byte in b"what was built":
        with path.open("ab") as file:
            file.write(bytes([byte]))
        time.sleep(0.01)

for _ in range(3):
    path = cache.fetch(sys.argv[1], "so", write, lambda path: path)
    assert path.read_bytes() == b"what was built", path.read_bytes()
"""


def test_processes_that_build_at_once_do_not_meet(first: Path) -> None:
    environment = dict(os.environ, TMPDIR=str(first.parents[1]))
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS, "cpu-1"], env=environment) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    assert len(list(first.iterdir())) == 1


@pytest.mark.skipif(build.unavailable() is not None, reason=f"no C kernels: {build.unavailable()}")
def test_the_c_kernels_come_from_the_cache(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Path] = []

    def compile_small(compiler: list[str], path: Path) -> None:
        compiled.append(path)
        source = path.with_suffix(".c")
        source.write_text("float timeloom_jump(void) { return 7; }")
        subprocess.run([*compiler, "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
        source.unlink()

    monkeypatch.setattr(build, "_build", compile_small)
    for _ in range(2):
        loaded = build._load.__wrapped__()
        assert isinstance(loaded, ctypes.CDLL)
        assert loaded.timeloom_jump() == 7
    assert len(compiled) == 1
    (path,) = first.glob("cpu-*.so")
    half = path.read_bytes()[:100]
    path.unlink()  # the loaded one stays mapped
    path.write_bytes(half)
    build._load.__wrapped__()
    assert len(compiled) == 2


@pytest.mark.parametrize(
    ("said", "kind"),
    [("ld: final link failed: No space left on device", OSError), ("error: expected ';'", build.KernelBuildError)],
)
def test_a_full_disk_is_told_from_a_wrong_source(tmp_path: Path, said: str, kind: type[Exception]) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
    compiler.chmod(0o700)
    with pytest.raises(kind, match=said.split(":")[0]):
        build._build([str(compiler)], tmp_path / "out.so")


def test_a_compiler_that_is_no_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", 'gcc "-O2')
    monkeypatch.setattr(build.packaged, "library", lambda: None)
    build._toolchain.cache_clear()
    with pytest.warns(RuntimeWarning, match="no compiled kernels on this CPU .*CC is no command"):
        assert "No closing quotation" in str(build._load.__wrapped__())
