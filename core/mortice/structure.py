"""Plain values to the fields of an attrs class, strictly: nothing is coerced that a user did not write.

cattrs alone would turn "0.5" into 0.5, 3.9 into 3 and "false" into True, and its errors carry a class path instead of
the key. Here every field is converted and validated by itself, so that one message can list all that is wrong.
"""

from __future__ import annotations

import contextlib
import math
import types
import typing
from collections import abc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import cattrs

from mortice.errors import suggest


def _number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _found(value: Any) -> str:
    if isinstance(value, str):
        hint = "; drop the quotes" if _number(value) or value in ("true", "false") else ""
        return f"found the string {value!r}{hint}"
    if isinstance(value, bool):
        return f"found {'true' if value else 'false'}"
    if isinstance(value, Mapping):
        return "found a table"
    if isinstance(value, list):
        return f"found the list {value!r}"
    return f"found {value!r}"


def _strict(kind: str, accepts: Callable[[Any], bool], convert: Callable[[Any], Any]) -> Callable[..., Any]:
    def hook(value: Any, _: Any = None) -> Any:
        if not accepts(value):
            raise ValueError(f"expected {kind}, {_found(value)}")
        return convert(value)

    return hook


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


HOOKS: dict[Any, tuple[str, Callable[..., Any]]] = {
    int: ("a whole number", _strict("a whole number", _is_int, int)),
    float: ("a finite number", _strict("a finite number", _is_number, float)),
    bool: ("true or false", _strict("true or false", lambda v: isinstance(v, bool), bool)),
    str: ("a string", _strict("a string", lambda v: isinstance(v, str), str)),
    Path: ("a path", _strict("a path in quotes", lambda v: isinstance(v, str | Path), lambda v: Path(v))),
}

converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)
for _type, (_, _hook) in HOOKS.items():
    converter.register_structure_hook(_type, _hook)


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _union(value: Any, kind: Any) -> Any:
    """The first member that takes the value as it is; int before float, so that 4 stays a whole number."""
    members = [m for m in typing.get_args(kind) if m is not type(None)]
    if value is None and len(members) < len(typing.get_args(kind)):
        return None
    for member in sorted(members, key=lambda m: m is float):
        try:
            return converter.structure(value, member)
        except (ValueError, TypeError, cattrs.BaseValidationError, cattrs.StructureHandlerNotFoundError):
            continue
    raise ValueError(f"expected {' or '.join(type_name(m) for m in members)}, {_found(value)}")


def _sequence(value: Any, kind: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected {type_name(kind)}, {_found(value)}")
    member = typing.get_args(kind)[0] if typing.get_args(kind) else Any
    items = [value_of(item, member) for item in value]
    return tuple(items) if typing.get_origin(kind) is tuple else items


def _literal(value: Any, kind: Any) -> Any:
    allowed = typing.get_args(kind)
    if not any(value == a and type(value) is type(a) for a in allowed):  # 1 is not true
        raise ValueError(f"expected {type_name(kind)}, {_found(value)}")
    return value


def _mapping(value: Any, kind: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected {type_name(kind)}, {_found(value)}")
    _, member = typing.get_args(kind) or (Any, Any)
    return {key: value_of(item, member) for key, item in value.items()}


def _table(value: Any, cls: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected {type_name(cls)}, {_found(value)}")
    instance, errors = structure(cls, value)
    errors |= {key: f"unknown key{suggest(key, fields(cls))}" for key in value if key not in fields(cls)}
    if errors:
        raise ValueError("; ".join(f"{key}: {text}" for key, text in errors.items()))
    return instance


converter.register_structure_hook_func(attrs.has, _table)
converter.register_structure_hook_func(lambda kind: typing.get_origin(kind) is typing.Literal, _literal)
converter.register_structure_hook_func(lambda kind: typing.get_origin(kind) in (dict, abc.Mapping), _mapping)
converter.register_structure_hook_func(_is_union, _union)
converter.register_structure_hook_func(lambda kind: typing.get_origin(kind) in (list, tuple), _sequence)


def value_of(value: Any, kind: Any) -> Any:
    """One value as `kind`. Raises ValueError saying what was expected and found."""
    return value if kind is Any else converter.structure(value, kind)


def type_name(kind: Any) -> str:
    """A type as a user would say it."""
    if kind is Any:
        return "any value"
    if kind in HOOKS:
        return HOOKS[kind][0]
    if _is_union(kind):
        return " or ".join(type_name(m) for m in typing.get_args(kind) if m is not type(None))
    if typing.get_origin(kind) in (list, tuple):
        member = typing.get_args(kind)[0]
        return f"a list of {type_name(member).removeprefix('a ').removeprefix('an ')}s"
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(f'"{a}"' if isinstance(a, str) else str(a) for a in typing.get_args(kind))
    if attrs.has(kind) or typing.get_origin(kind) in (dict, abc.Mapping):
        return "a table"
    return getattr(kind, "__name__", str(kind))


def fields(cls: type) -> dict[str, attrs.Attribute[Any]]:
    """The options of a class by name, with resolved types."""
    if not attrs.has(cls):
        return {}
    with contextlib.suppress(NameError):  # a name that only a type checker imports: the option keeps its text as type
        attrs.resolve_types(cls)
    return {a.name: a for a in attrs.fields(cls) if a.init and not a.name.startswith("_")}


def kind_of(attribute: attrs.Attribute[Any]) -> Any:
    return Any if attribute.type is None or isinstance(attribute.type, str) else attribute.type


def takes_path(kind: Any) -> bool:
    """Whether a type is a path, or may be one."""
    return kind is Path or (_is_union(kind) and Path in typing.get_args(kind))


def structure(cls: type, values: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """An instance of an attrs class, or None and what is wrong with each field.

    The key "" carries what is wrong with the whole.
    """
    known = fields(cls)
    errors: dict[str, str] = {}
    arguments: dict[str, Any] = {}
    for name, attribute in known.items():
        if name not in values:
            if attribute.default is attrs.NOTHING:
                errors[name] = f"is required ({attribute.metadata.get('help', type_name(kind_of(attribute)))})"
            continue
        try:
            arguments[name] = value_of(values[name], kind_of(attribute))
            if attribute.validator is not None:
                convert: Any = attribute.converter or (lambda value: value)
                converted = convert(arguments[name])
                attribute.validator(None, attribute, converted)
        except (ValueError, TypeError) as error:
            errors[name] = _message(error, attribute, values[name])
    if errors:
        return None, errors
    try:
        return cls(**arguments), {}
    except (ValueError, TypeError) as error:
        return None, {"": str(error)}


def _message(error: Exception, attribute: attrs.Attribute[Any], value: Any) -> str:
    """attrs' validators speak of the attribute: the key stands in front already."""
    text = str(error.args[0]) if error.args else str(error)
    return text.replace(f"'{attribute.name}' must be", "must be")
