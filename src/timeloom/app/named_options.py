"""Names with options in one word, as in `shooting:chunk=256,correction=newton`."""

from __future__ import annotations

import types
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from timeloom.app.errors import InputError
from timeloom.options import did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Options = TypeVar("Options", bound=DataclassInstance)


def split_spec(text: str) -> tuple[str, dict[str, str]]:
    """The name and the options, still as text."""
    name, _, rest = text.partition(":")
    options = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"{text!r}: expected name:option=value,option=value, got {part!r}")
        options[key.strip()] = value.strip()
    return name.strip(), options


def with_options(defaults: Options, options: dict[str, str], name: str) -> Options:
    """A copy of a dataclass with some fields set from text, by the fields' types."""
    hints = get_type_hints(type(defaults))
    known = [field.name for field in fields(defaults)]
    values = {}
    for key, text in options.items():
        if key not in known:
            raise InputError(
                f"{name} has no option {key!r}; it has: {', '.join(known) or 'none'}{did_you_mean(key, known)}"
            )
        try:
            values[key] = _convert(text, hints[key])
        except ValueError:
            raise InputError(f"{name}: {key}={text!r} is not {_describe(hints[key])}") from None
    try:
        return replace(defaults, **values)
    except ValueError as error:
        raise InputError(f"{name}: {error}") from None


def _convert(text: str, kind: Any) -> Any:
    """Text as a value of a type: int, float, str, a literal, or one of several."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        for choice in get_args(kind):
            try:
                return _convert(text, choice)
            except ValueError:
                continue
        raise ValueError
    if kind is type(None):
        if text.lower() == "none":
            return None
        raise ValueError
    if origin is Literal:
        if text in get_args(kind):
            return text
        raise ValueError
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ValueError
    return kind(text)


def _describe(kind: Any) -> str:
    """A type in words."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(choice) for choice in get_args(kind))
    if origin is Literal:
        return "one of " + ", ".join(get_args(kind))
    names = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))
