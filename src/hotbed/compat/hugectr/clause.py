# SPDX-License-Identifier: Apache-2.0
"""What all clauses share: frozen values that are checked as soon as they are made."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar, cast, dataclass_transform

from hotbed.compat.hugectr.knobs import KNOBS, NO_EFFECT
from hotbed.config import build, did_you_mean
from hotbed.errors import ConfigError

T = TypeVar("T")
Form = Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]
"""Turns positional and named arguments into the named fields of a clause."""

_REQUIRED = object()


def required() -> Any:
    """Return the default of a field that has to be given."""
    return _REQUIRED


@dataclass_transform(frozen_default=True)
def clause(name: str, form: Form | None = None) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass whose constructor takes arguments as HugeCTR does.

    * Required arguments may stand behind optional ones, as in HugeCTR's signatures.
    * An unknown argument or a value of a wrong type is a ConfigError at once.
    * Lists become tuples, numbers of NumPy plain numbers.
    * An argument without effect is logged once.

    Args:
        name: of the clause, in messages.
        form: turns the arguments of other releases into those of the class.
    """

    def decorate(cls: type[T]) -> type[T]:
        dataclass: Any = dataclasses.dataclass(frozen=True)(cls)
        fields = {field.name: field for field in dataclasses.fields(dataclass)}
        generated = dataclass.__init__

        @functools.wraps(generated)
        def __init__(self: Any, *args: Any, **keywords: Any) -> None:
            if form is not None:
                keywords = form(args, keywords)
            else:
                keywords = by_order(name, list(fields), args, keywords)
            for key, argument in keywords.items():
                knob = f"{name}.{key}"
                if knob in NO_EFFECT:
                    KNOBS.log_no_effect(knob, when=_differs(fields.get(key), argument))
            values = {}
            for key, argument in keywords.items():
                if key in fields:
                    values[key] = argument
                elif f"{name}.{key}" not in NO_EFFECT:
                    advice = did_you_mean(key, fields)
                    raise ConfigError(
                        f"{name}.{key}: unknown argument, got {argument!r:.80}. {advice}"
                    )
            hints = _hints(dataclass)
            for key, field in fields.items():
                if key in values:
                    values[key] = checked(f"{name}.{key}", values[key], hints[key])
                elif field.default is _REQUIRED:
                    got = ", ".join(values) or "no arguments"
                    raise ConfigError(f"{name}.{key}: missing argument, got {got}. Add it.")
            generated(self, **values)

        dataclass.__init__ = __init__
        return cast(type[T], dataclass)

    return decorate


def _differs(field: dataclasses.Field[Any] | None, argument: Any) -> bool:
    """Return whether an argument differs from its default; of a needed switch, that is off."""
    if field is None:
        return True
    if field.default is _REQUIRED:
        return argument is not False
    return bool(argument != field.default)


def by_order(
    name: str, order: list[str], args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Return named arguments for positional and named ones.

    Args:
        name: of the clause, in messages.
        order: names of the positional arguments.
        args: positional arguments.
        keywords: named arguments.

    Raises:
        ConfigError: there are too many positional arguments, or one is also named.
    """
    if len(args) > len(order):
        raise ConfigError(
            f"{name}: expected at most {len(order)} arguments, got {len(args)}. Remove the rest."
        )
    positional = dict(zip(order, args, strict=False))
    for key in positional:
        if key in keywords:
            raise ConfigError(
                f"{name}.{key}: an argument that comes twice, got {keywords[key]!r:.80}. "
                "Remove one."
            )
    return {**positional, **keywords}


def checked(where: str, value: Any, hint: Any) -> Any:
    """Return a value as its type hint asks for.

    Raises:
        ConfigError: the value has another type.
    """
    wanted = [part for part in (typing.get_args(hint) or [hint]) if isinstance(part, type)]
    enums = [part for part in wanted if issubclass(part, Enum)]
    has_items = typing.get_origin(hint) in (tuple, dict)
    if enums and not has_items and not isinstance(value, tuple(wanted)):
        expected = " | ".join(part.__name__ for part in wanted)
        names = ", ".join(enums[0].__members__)
        raise ConfigError(f"{where}: expected {expected}, got {value!r:.80}. Use one of {names}.")
    _check_keys(where, value, hint)
    return build(_plain(value), hint, where)


def _check_keys(where: str, value: Any, hint: Any) -> None:
    """Raise ConfigError if a mapping whose keys are of an enum has others."""
    for part in (hint, *typing.get_args(hint)):
        keys = typing.get_args(part)[:1]
        if typing.get_origin(part) is not Mapping or not isinstance(value, Mapping):
            continue
        if not isinstance(keys[0], type) or not issubclass(keys[0], Enum):
            continue
        name = keys[0].__name__
        for key in value:
            if not isinstance(key, keys[0]):
                member = key if key in keys[0].__members__ else next(iter(keys[0].__members__))
                raise ConfigError(
                    f"{where}: expected keys of {name}, got {key!r:.80}. Write "
                    f"{{hugectr.{name}.{member}: {value[key]!r:.80}}}."
                )


def _plain(value: Any) -> Any:
    """Return tuples for lists and arrays, and numbers of Python for those of NumPy."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in value)
    return value


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)
