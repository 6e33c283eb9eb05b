"""How much of a long campaign or a large grid the normal suite runs. The rest is marked ``soak``.

A campaign of random cases runs a few of them in the normal suite. A grid runs its diagonal there: every value
of every axis, but not every combination. ``make soak`` runs the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

SOAK = pytest.mark.soak


def portion(few: Any, many: Any) -> list[Any]:
    """Return a parameter's two values: ``few`` for the normal suite, ``many`` for the soak.

    Example::

        @pytest.mark.parametrize("cases", portion(20, 1000))
    """
    return [few, _for_the_soak(many)]


def chosen(values: Iterable[Any], *normal: Any) -> list[Any]:
    """Return all ``values`` as parameters, those that are not ``normal`` for the soak."""
    found = list(values)
    unknown = [value for value in normal if value not in found]
    assert not unknown, f"{unknown} are none of {found}"
    return [value if value in normal else _for_the_soak(value) for value in found]


def _for_the_soak(value: Any) -> Any:
    """Return a parameter. A tuple is the values of several arguments, as everywhere in pytest."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=SOAK)


def diagonal(**axes: Iterable[Any]) -> tuple[str, list[Any]]:
    """Return the arguments of ``parametrize`` for a grid. Cases off the diagonal are for the soak.

    Case ``i`` of the diagonal has value ``i`` of each axis, and a shorter axis begins again at its end.

    Example::

        @pytest.mark.parametrize(*diagonal(dtype=["float16", "bfloat16"], tokens=[1, 7, 33]))
    """
    values = [list(axis) for axis in axes.values()]
    longest = max(len(axis) for axis in values)
    normal = [tuple(case % len(axis) for axis in values) for case in range(longest)]
    cases = []
    for indices in product(*(range(len(axis)) for axis in values)):
        case = [axis[index] for axis, index in zip(values, indices, strict=True)]
        cases.append(pytest.param(*case, marks=() if indices in normal else SOAK))
    return ",".join(axes), cases
