# SPDX-License-Identifier: Apache-2.0
"""Translate between configuration and constructors.

A configuration key is the keyword of the class that it builds: `{"kind": "adagrad", "lr": 0.05}` is
`Adagrad(lr=0.05)`. The constructors are the only definition of the keys. `build` turns a mapping
into the object, `describe` turns the object back into a mapping.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from hotbed import plugins
from hotbed.errors import ConfigError, HotbedError, MissingExtra

__all__ = [
    "build",
    "describe",
    "described",
    "did_you_mean",
    "kind_of",
    "kinds",
    "parameters",
    "parse_json",
    "public_kinds",
]


def __dir__() -> list[str]:
    return sorted(__all__)


P = ParamSpec("P")
T = TypeVar("T")

_UNIONS = (typing.Union, types.UnionType)
_SEQUENCES = (list, tuple, Sequence, Iterable)
_MAPPINGS = (dict, Mapping)
_LEAVES = (bool, int, float, str, Path, None, type(None))

# Constructor arguments of models that the job supplies; they are never keys of a model's own
# configuration.
GIVEN = ("schema", "tables")

# The modules with the public variants of a folder's abstract classes; imported when a kind of
# that folder is looked up.
_HOMES: Mapping[str, tuple[str, ...]] = {
    "connectors": ("hotbed.connectors",),
    "data": ("hotbed.data",),
    "models": ("hotbed.models", "hotbed.models.losses"),
    "embedding": (
        "hotbed.embedding.rule",
        "hotbed.embedding.policy",
        "hotbed.embedding.tier",
        "hotbed.embedding.init",
    ),
    "metrics": ("hotbed.metrics",),
    "prepare": ("hotbed.prepare",),
}

# Where the kinds of a base are listed that has other classes below it.
_LISTED = {"torch": "hotbed.models", "hotbed.training.run": "hotbed.training.callbacks"}
_CORE = "hotbed.embedding."
_NEEDS = {"Callback": "Give it a method such as on_step_end(run)."}


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


def kind_of(cls: type) -> str:
    """Return the snake-case name of a class, as written under `kind`.

    >>> class MinCount: ...
    >>> class DCNv2: ...
    >>> kind_of(MinCount), kind_of(DCNv2)
    ('min_count', 'dcnv2')
    """
    return str(plugins.short_kind(f":{cls.__name__}"))


def _written_kind(cls: type) -> str:
    """Return the kind by which a description names a class: of other packages, with the module."""
    name = None if plugins.is_ours(cls) else plugins.name_of(cls)
    return name or kind_of(cls)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the last sentence of an error message: the nearest choice, or else all choices."""
    names = sorted(choices)
    if not names:
        return "It takes no keys."
    near = _all_nearest(word, names)
    if not near:
        return f"Use one of {', '.join(names)}."
    return f"Did you mean {' or '.join(repr(name) for name in near)}?"


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that is spelled most like `word`; None if none is."""
    near = _all_nearest(word, choices)
    if not near:
        return None
    return near[-1]


def _all_nearest(word: str, choices: Iterable[str]) -> list[str]:
    """Return the choices that are spelled most like `word`: several if they are equally near."""
    close = difflib.get_close_matches(word, sorted(choices), n=5, cutoff=0.5)
    # one letter of three or more is a chance
    close = [name for name in close if min(len(name), len(word)) > 1 or len(name + word) < 4]
    # swapped letters are the most common mistake, and difflib rates them low
    swapped = [name for name in close if sorted(name) == sorted(word)]
    if swapped:
        return swapped[:1]

    def likeness(name: str) -> float:
        return difflib.SequenceMatcher(a=name, b=word).ratio()

    return sorted(name for name in close if likeness(name) >= likeness(close[0]))


def known_elsewhere_as(kind: str, choices: Mapping[str, type]) -> str | None:
    """Return the one of some kinds that other frameworks call `kind`; None if none is.

    A class lists these names in `also_known_as`, in lower case without underscores.
    """
    word = kind.lower().replace("_", "")
    for name, cls in choices.items():
        if word in getattr(cls, "also_known_as", ()):
            return name
    return None


def check_kind(spec: object, expected: Sequence[type], path: str) -> None:
    """Raise ConfigError if a spec names a kind that is not of one of the expected classes."""
    kind = spec
    if isinstance(spec, Mapping):
        kind = spec.get("kind")
    if isinstance(kind, str):
        _class_of(kind, _choices(expected), expected, path)


def _choices(expected: Sequence[type]) -> dict[str, type]:
    choices: dict[str, type] = {}
    for cls in expected:
        choices |= kinds(cls) or {kind_of(cls): cls}
    return choices


def _class_of(kind: str, choices: Mapping[str, type], expected: Sequence[type], path: str) -> type:
    """Return the class of a kind: one of `choices`, or one of another package.

    Raises:
        ConfigError: there is no such class, or it is not of one of the expected ones.
    """
    if kind in choices:
        return choices[kind]
    if plugins.names_class(kind) and all(base.__module__.startswith(_CORE) for base in expected):
        raise ConfigError(
            f"{path}.kind: must be a kind of Hotbed, whose core computes it, got {kind!r}. "
            f"{did_you_mean(kind, choices)}"
        )
    cls = plugins.find_class(kind, f"{path}.kind")
    if cls is None:
        advice = did_you_mean(kind, choices)
        name = known_elsewhere_as(kind, choices)
        if name is not None:
            advice = f"Did you mean {name!r}?"
        if ":" in kind:
            advice = "Write a class of your own as module:name, such as mypackage.nets:MaskNet."
        raise ConfigError(f"{path}.kind: unknown kind, got {kind!r}. {advice}")
    bases = " or ".join(f"{base.__module__}.{base.__qualname__}" for base in expected)
    if not issubclass(cls, tuple(expected)):
        advice = _NEEDS.get(expected[0].__name__, "Derive it from that.")
        raise ConfigError(f"{path}.kind: must be a class below {bases}, got {kind!r}. {advice}")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        raise ConfigError(f"{path}.kind: it lacks methods, got {kind!r}. Define {missing}.")
    _check_parameters(cls, path)
    return cls


def _check_parameters(cls: type, path: str) -> None:
    """Raise ConfigError if parameters of a constructor cannot be keys."""
    try:
        parameters(cls)
    except ConfigError as error:
        raise ConfigError(f"{path}.kind: {error}") from error


def kinds(expected: type) -> dict[str, type]:
    """Return by kind every public final class below `expected`; empty for a final class."""
    package, _, module = expected.__module__.partition(".")
    listed = _LISTED.get(package) or _LISTED.get(expected.__module__)
    if listed is not None:
        return public_kinds(listed)
    if package == "hotbed":
        folder = module.partition(".")[0]
        for home in _HOMES.get(folder, ()):
            _import(home)
    classes = [cls for cls in plugins.final_classes(expected) if not cls.__name__.startswith("_")]
    return {kind_of(cls): cls for cls in classes}


def public_kinds(module: str) -> dict[str, type]:
    """Return the final classes in the public list of `module`, by kind.

    Raises MissingExtra where the module needs torch and torch is not installed.
    """
    home = _import(module)
    members = [getattr(home, name) for name in home.__all__]
    classes = [cls for cls in members if inspect.isclass(cls) and not inspect.isabstract(cls)]
    final: dict[str, type] = {}
    for cls in classes:
        below = [other for other in classes if other is not cls and issubclass(other, cls)]
        if not below:  # classes of users that derive from it do not count
            final[kind_of(cls)] = cls
    return final


def build(
    spec: object, expected: Any, path: str = "job", given: Mapping[str, object] | None = None
) -> Any:
    """Build an object of `expected`, a class or a type hint, from plain values.

    Args:
        spec: a mapping of `kind` (optional where only one class fits) and the constructor's
            keywords. A bare string stands for a kind without keywords; nested values are built
            from the type hints. Objects that already fit are passed through.
        expected: the class or the type hint.
        path: dotted path of `spec`, for messages.
        given: arguments that the caller supplies to the outermost constructor.

    Raises:
        ConfigError: a key or kind is unknown, a key is missing or a type is wrong; the message
            starts with the dotted path.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Sgd:
    ...     lr: float = 0.01
    >>> build({"kind": "sgd", "lr": 0.1}, Sgd, "rule")
    Sgd(lr=0.1)
    >>> build({"rl": 0.1}, Sgd, "rule")
    Traceback (most recent call last):
    hotbed.errors.ConfigError: rule.rl: unknown key of sgd, got 'rl' with the value 0.1. Did you ...
    """
    if expected is Any or expected is object:
        return spec
    origin = typing.get_origin(expected)
    members = typing.get_args(expected)
    if origin in _UNIONS:
        return _build_union(spec, members, path, given)
    if origin is typing.Literal:
        if spec in members:
            return spec
        raise _wrong(path, f"one of {', '.join(map(repr, members))}", spec)
    container = origin or expected
    if container in _SEQUENCES:
        return _build_sequence(spec, container, members, path)
    if container in _MAPPINGS:
        return _build_mapping(spec, members, path)
    if expected in _LEAVES:
        return _build_leaf(spec, expected, path)
    if not inspect.isclass(container):
        return spec
    return _build_object(spec, [container], path, given or {})


def describe(obj: object) -> Any:
    """Return plain values (dict, list, str, number, None) from which `build` makes an equal object.

    A dataclass becomes its `kind` and the fields that differ from their defaults; an instance of
    a class under `@described` its constructor arguments, without those in `GIVEN`. Raises
    ConfigError for anything else, with its type.
    """
    if obj is None or isinstance(obj, (bool, int, float, str)):
        return obj
    if isinstance(obj, Path):
        return str(obj)
    if isinstance(obj, Mapping):
        return {str(key): describe(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple, range)):
        return [describe(value) for value in obj]
    arguments = _arguments(obj)
    if arguments is not None:
        return {"kind": _written_kind(type(obj)), **_without_defaults(type(obj), arguments)}
    raise ConfigError(
        f"{type(obj).__name__} cannot be written as configuration, got {obj!r:.80}. Pass a plain "
        "value, a frozen dataclass or an instance of a class decorated with @config.described."
    )


def described(cls: type[T]) -> type[T]:
    """Store the constructor's arguments in `self._described`, for `describe`. A class decorator.

    >>> @described
    ... class Tower:
    ...     def __init__(self, schema: str, width: int = 8) -> None: ...
    >>> describe(Tower("s", width=16))
    {'kind': 'tower', 'width': 16}
    """

    def remembering(original: Callable[P, None]) -> Callable[P, None]:
        signature = inspect.signature(original)
        own_name = next(iter(signature.parameters))

        @functools.wraps(original)
        def __init__(*args: P.args, **kwargs: P.kwargs) -> None:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
            self = arguments.pop(own_name)
            # a described base class must not overwrite the arguments of its child
            if "_described" not in vars(self):
                object.__setattr__(self, "_described", arguments)
            original(*args, **kwargs)

        return __init__

    cls.__init__ = remembering(cls.__init__)  # type: ignore[method-assign]  # keeps the arguments
    return cls


# cached: hints take a millisecond to resolve, and a server builds its tables for every version
@functools.cache
def parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    """Return the keywords that configure `cls`, with resolved type hints.

    The trailing underscore of a name such as `with_` is not part of its key. Raises ConfigError
    for a constructor with parameters that cannot be keywords.
    """
    keywords: dict[str, inspect.Parameter] = {}
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"{cls.__name__}: expected named parameters only, got {parameter}. Give each "
                "parameter of the constructor a name that can be a key."
            )
        hint = _hint(cls, parameter.name, parameter.annotation)
        keywords[parameter.name] = parameter.replace(annotation=hint)
    return keywords


# --- building -------------------------------------------------------------------------------------


def _build_object(
    spec: object, expected: Sequence[type], path: str, given: Mapping[str, object]
) -> Any:
    if isinstance(spec, tuple(expected)) and not isinstance(spec, (str, Mapping)):
        return spec
    choices = _choices(expected)
    if isinstance(spec, str):
        spec = {"kind": spec}
    names = sorted(choices)
    if not isinstance(spec, Mapping):
        raise _wrong(path, f"a mapping with kind {' | '.join(names)}", spec)
    keys = {str(key): value for key, value in spec.items()}
    kind = keys.pop("kind", None)
    if kind is None and len(names) == 1:
        kind = names[0]
    if kind is None:
        raise ConfigError(
            f"{path}.kind: missing key, got {_short(spec)}. Use one of {', '.join(names)}."
        )
    return _construct(_class_of(str(kind), choices, expected, path), keys, path, given)


def _construct(
    cls: type, keys: Mapping[str, object], path: str, given: Mapping[str, object]
) -> Any:
    keywords = parameters(cls)
    arguments = {name: value for name, value in given.items() if name in keywords}
    own_names = [name for name in keywords if name not in given]
    by_key = {name.rstrip("_"): name for name in own_names}
    for key, value in keys.items():
        name = key if key in own_names else by_key.get(key)
        if name is None:
            raise ConfigError(
                f"{path}.{key}: unknown key of {kind_of(cls)}, got {key!r} with the "
                f"value {_short(value)}. "
                f"{did_you_mean(key, by_key)}"
            )
        arguments[name] = build(value, keywords[name].annotation, f"{path}.{key}")
    for key, name in by_key.items():
        if name not in arguments and keywords[name].default is inspect.Parameter.empty:
            raise ConfigError(
                f"{path}.{key}: missing key of {kind_of(cls)}, "
                f"got {', '.join(keys) or 'no keys'}. Add it."
            )
    try:
        built = cls(**arguments)
        if not plugins.is_ours(cls) and not dataclasses.is_dataclass(
            cls
        ):  # what `described` would do
            object.__setattr__(built, "_described", arguments)
        return built
    except ConfigError as error:
        raise ConfigError(_located(str(error), cls, keywords, path)) from error
    except HotbedError:
        raise
    except Exception as error:  # a class of another package raises what it likes
        if plugins.is_ours(cls) and not isinstance(error, (TypeError, ValueError)):
            raise
        raise ConfigError(
            f"{path}: {kind_of(cls)} cannot be built from its keys, got {type(error).__name__}: "
            f"{error}. See its documentation."
        ) from error


def _build_union(
    spec: object, members: Sequence[Any], path: str, given: Mapping[str, object] | None
) -> Any:
    if spec is None and type(None) in members:
        return None
    members = [member for member in members if member is not type(None)]
    if len(members) == 1:
        return build(spec, members[0], path, given)
    classes = [member for member in members if inspect.isclass(member) and not _is_plain(member)]
    if classes and _names_object(spec, classes, members):
        return _build_object(spec, classes, path, given or {})
    errors: list[ConfigError] = []
    # float last, so that an int stays an int where both are allowed
    for member in sorted(members, key=lambda member: member is float):
        try:
            return build(spec, member, path, given)
        except ConfigError as error:
            errors.append(error)
    deepest = max(errors, key=_path_length)
    if _path_length(deepest) > len(path):
        raise deepest
    raise _wrong(path, " | ".join(_name(member) for member in members), spec)


def _path_length(error: ConfigError) -> int:
    """Return the length of the dotted path that a message starts with."""
    return len(str(error).partition(":")[0])


def _names_object(spec: object, classes: Sequence[type], members: Sequence[Any]) -> bool:
    """Return whether `spec` is, or describes by its kind, an object of one of the classes."""
    if isinstance(spec, tuple(classes)):
        return True
    if isinstance(spec, str):
        return not {str, Path} & set(members)
    return isinstance(spec, Mapping) and "kind" in spec


def _build_sequence(spec: object, container: Any, hints: Sequence[Any], path: str) -> Any:
    if not isinstance(spec, (list, tuple)):
        raise _wrong(path, "a list", spec)
    has_one_hint_each = container is tuple and hints and hints[-1] is not Ellipsis
    if not has_one_hint_each:
        item_hint = hints[0] if hints else Any
        hints = [item_hint] * len(spec)
    if len(spec) != len(hints):
        raise _wrong(path, f"a list of {len(hints)}", spec)
    items = []
    for number, hint in enumerate(hints):
        items.append(build(spec[number], hint, f"{path}.{number}"))
    if container is list:
        return items
    return tuple(items)


def _build_mapping(spec: object, hints: Sequence[Any], path: str) -> dict[Any, Any]:
    if not isinstance(spec, Mapping):
        raise _wrong(path, "a mapping", spec)
    key_hint, value_hint = hints or (Any, Any)
    built: dict[Any, Any] = {}
    for key, value in spec.items():
        inner = f"{path}.{key}"
        built[build(key, key_hint, inner)] = build(value, value_hint, inner)
    return built


def _build_leaf(spec: object, expected: Any, path: str) -> Any:
    if isinstance(spec, (int, float)) and not isinstance(spec, bool):
        if expected is float:
            return float(spec)
        if expected is int and float(spec).is_integer():
            return int(spec)  # a count may be written as 1e6
    if expected is Path and isinstance(spec, (str, Path)):
        return Path(spec)
    if spec is None and expected in (None, type(None)):
        return None
    if expected in (bool, str) and isinstance(spec, expected):
        return spec
    raise _wrong(path, _name(expected), spec)


# --- classes and messages -------------------------------------------------------------------------


def _import(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise MissingExtra(
                f"{name}: PyTorch is not installed. Run pip install hotbed[train]."
            ) from error
        raise


def _located(message: str, cls: type, keywords: Iterable[str], path: str) -> str:
    """Return a constructor's message with its path in the configuration.

    `Ttl.days: ...` becomes `job.tables.evict.days: ...`.
    """
    name, colon, rest = message.partition(":")
    owner, dot, key = name.partition(".")
    if colon and owner in keywords:
        return f"{path}.{message}"
    first = re.split(r"[.\[]", key)[0]
    if colon and dot and owner in (cls.__name__, kind_of(cls)) and first in keywords:
        return f"{path}.{key}:{rest}"
    return f"{path}: {message}"


def _is_plain(member: Any) -> bool:
    plain = (bool, int, float, str, Path, list, tuple, dict)
    return member in plain or typing.get_origin(member) is not None


def _arguments(obj: object) -> Mapping[str, object] | None:
    """Return the constructor's arguments of an object that can be described, else None."""
    if hasattr(obj, "_described"):
        described_arguments: Mapping[str, object] = obj._described
        return {
            name: described_arguments[name] for name in described_arguments if name not in GIVEN
        }
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {field.name: getattr(obj, field.name) for field in _init_fields(type(obj))}
    return None


def _init_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """Return the fields that are arguments of a dataclass's constructor."""
    return [field for field in dataclasses.fields(cls) if field.init]


def _without_defaults(cls: type, arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return the described arguments by key, without those that equal their defaults."""
    defaults: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        defaults[name] = parameter.default
    if dataclasses.is_dataclass(cls):
        for field in _init_fields(cls):
            if field.default_factory is not dataclasses.MISSING:
                defaults[field.name] = field.default_factory()
    keys: dict[str, Any] = {}
    for name, value in arguments.items():
        default = defaults[name]
        if type(default) is type(value) and default == value:
            continue
        keys[name.rstrip("_")] = describe(value)
    return keys


def _hint(cls: type, name: str, annotation: Any) -> Any:
    """Resolve one annotation in the module that holds it.

    A name that only a type checker imports resolves to Any.
    """
    if annotation is inspect.Parameter.empty:
        return Any
    owner = _owner_of(cls, name)
    holder = types.SimpleNamespace(__annotations__={name: annotation})
    module = sys.modules[owner.__module__]
    try:
        return typing.get_type_hints(holder, vars(module), dict(vars(owner)))[name]
    except (NameError, AttributeError):
        return Any


def _owner_of(cls: type, name: str) -> type:
    """Return the class that annotates the parameter `name` of the constructor of `cls`."""
    for owner in cls.__mro__:
        if name in inspect.get_annotations(owner):
            return owner
    return next(owner for owner in cls.__mro__ if "__init__" in vars(owner))


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(repr(member) for member in typing.get_args(hint))
    if typing.get_origin(hint) in _SEQUENCES:
        return "a list"
    if inspect.isclass(hint) and typing.get_origin(hint) is None:
        return hint.__name__
    return str(hint).replace("typing.", "")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _wrong(path: str, expected: str, spec: object) -> ConfigError:
    return ConfigError(
        f"{path}: wrong value, got {_short(spec)} ({type(spec).__name__}). Give {expected}."
    )
