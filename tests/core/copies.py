"""Copies of a scheduler, so that one state can go on in several ways.

`copy.deepcopy` would do, at ten times the cost. What is copied: everything of the core and of the tests, and the plain
containers. What never changes is shared: numbers, configurations, what was submitted, and requests that are not bound.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from holdback.types import RequestSpec
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.profile import Curve
from scheduler_svc.core.request import Request


def clone(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of `value` and of all that belongs to it.

    Args:
        memo: copies so far, by the id of what they are copies of.
    """
    copy = _COPIERS.get(type(value))
    if copy is None:
        copy = _COPIERS[type(value)] = _copier(type(value))
    if copy is _share:
        return value
    copied = memo.get(id(value))
    if copied is None:
        copied = copy(value, memo)
    return copied


def _copier(kind: type) -> Copier:
    if issubclass(kind, tuple):
        return _copy_tuple
    if kind.__module__.startswith(("scheduler_svc.core.", "tests.core.")) and not issubclass(kind, _CONSTANT):
        return _copy_slots if "__slots__" in kind.__dict__ else _copy_object
    return _share


def _share(value: Any, memo: dict[int, Any]) -> Any:
    return value


def _copy_list(value: list[Any], memo: dict[int, Any]) -> list[Any]:
    atoms = _ATOMS
    copied = memo[id(value)] = []
    copied += [entry if type(entry) in atoms else clone(entry, memo) for entry in value]
    return copied


def _copy_dict(value: dict[Any, Any], memo: dict[int, Any]) -> dict[Any, Any]:
    copied = memo[id(value)] = value.copy()
    # Keys are of one kind, and so are values.
    if value and not {type(part) for part in next(iter(value.items()))} <= _ATOMS:
        copied.clear()
        for key, entry in value.items():
            copied[clone(key, memo)] = clone(entry, memo)
    return copied


def _copy_deque(value: deque[Any], memo: dict[int, Any]) -> deque[Any]:
    return deque([clone(entry, memo) for entry in value])


def _copy_tuple(value: tuple[Any, ...], memo: dict[int, Any]) -> tuple[Any, ...]:
    if all(type(entry) in _ATOMS for entry in value):
        return value
    entries = [clone(entry, memo) for entry in value]
    return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)


def _copy_object(value: Any, memo: dict[int, Any]) -> Any:
    copied = memo[id(value)] = object.__new__(type(value))
    attributes = copied.__dict__
    atoms = _ATOMS
    for name, entry in value.__dict__.items():
        attributes[name] = entry if type(entry) in atoms else clone(entry, memo)
    return copied


def _copy_slots(value: Any, memo: dict[int, Any]) -> Any:
    copied = memo[id(value)] = object.__new__(type(value))
    for name in value.__slots__:
        entry = getattr(value, name)
        object.__setattr__(copied, name, entry if type(entry) in _ATOMS else clone(entry, memo))
    return copied


def _copy_request(value: Request, memo: dict[int, Any]) -> Request:
    """One that is not bound changes no more: it has ended, or is only asked about."""
    return value if value.slot is None else _copy_slots(value, memo)


Copier = Callable[[Any, dict[int, Any]], Any]
_ATOMS = frozenset((int, str, bytes, bool, float, type(None), Curve, frozenset, RequestSpec))
_CONSTANT = (enum.Enum, SchedulerConfig)
_COPIERS: dict[type, Copier] = {
    list: _copy_list, dict: _copy_dict, OrderedDict: _copy_dict, deque: _copy_deque, Request: _copy_request,
    Curve: _share,
}  # fmt: skip
