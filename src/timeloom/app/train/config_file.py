"""run.toml: the settings of a run, written by every run and read by `--config`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import timeloom
from timeloom.app.errors import InputError
from timeloom.app.files import write_text
from timeloom.app.train.config import TrainConfig, preset
from timeloom.options import did_you_mean

NAME = "run.toml"
_COMMAND = "# $ "
_NOT_KEPT = ("out",)
"""A new run has a folder of its own."""


def write_config(path: Path, config: TrainConfig, commands: Sequence[str]) -> None:
    """All settings, and above them the commands that made the run: the first, and those that went on with it."""
    values = asdict(config)
    tables = {name: values.pop(name) for name in ("model", "optim")}
    lines = [f"# timeloom {timeloom.__version__}, again by: timeloom train --config {path}"]
    lines += [*(f"{_COMMAND}{command}" for command in commands), ""]
    lines += [f"{key} = {_toml(value)}" for key, value in values.items() if key not in _NOT_KEPT]
    for name, inner in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in inner.items())]
    write_text(path, "\n".join(lines) + "\n")


def commands_of(path: Path) -> list[str]:
    """The commands that made a run; none where it has no such file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [line.removeprefix(_COMMAND) for line in lines if line.startswith(_COMMAND)]


def _toml(value: Any) -> str:
    """A value as TOML writes it, which is JSON for all that settings hold."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def read_config(path: Path) -> TrainConfig:
    """The settings of a file; what it leaves out is as in its preset."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"--config {path}: no such file; every run writes a {NAME} to its folder") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"--config {path}: not a whole TOML file ({error})") from None
    start = preset(str(values.get("preset", "default")))
    try:
        changed: TrainConfig = _changed(start, values)
        return changed
    except InputError as error:
        raise InputError(f"--config {path}: {error}") from None


def _changed(start: Any, values: dict[str, Any]) -> Any:
    """A dataclass with some fields set, each of its type."""
    hints = get_type_hints(type(start), include_extras=False)
    known = [field.name for field in fields(start)]
    new = {}
    for key, value in values.items():
        if key not in known:
            raise InputError(f"no setting {key!r}{did_you_mean(key, known)}; `timeloom train --help` lists them")
        inner = getattr(start, key)
        if is_dataclass(inner):
            if not isinstance(value, dict):
                raise InputError(f"[{key}] must be a table of settings")
            new[key] = _changed(inner, value)
        else:
            new[key] = _typed(key, value, hints[key])
    return replace(start, **new)


def _typed(key: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise InputError(f"{key} = {value!r} must be one of {', '.join(map(str, get_args(kind)))}")
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or len(value) != len(get_args(kind)):
            raise InputError(f"{key} = {value!r} must be a list of {len(get_args(kind))} numbers")
        return tuple(_typed(key, part, inner) for part, inner in zip(value, get_args(kind), strict=True))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text in quotes"}
        raise InputError(f"{key} = {value!r} must be {words[kind]}")
    return value
