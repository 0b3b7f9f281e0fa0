"""Equality of nested values that hold arrays, for which `==` alone has no answer."""

from __future__ import annotations

from typing import Any

import numpy as np


def same_value(left: object, right: object) -> bool:
    """Whether two values are equal; arrays when dtype, shape and every element are (NaN equals nothing)."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        if not (isinstance(left, np.ndarray) and isinstance(right, np.ndarray)):
            return False
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_value(item, right[key]) for key, item in left.items())
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        pairs = zip(left, right, strict=False)
        return type(left) is type(right) and len(left) == len(right) and all(same_value(*pair) for pair in pairs)
    if getattr(left, "shape", ()) != getattr(right, "shape", ()):
        return False
    equal: Any = left == right
    return equal if isinstance(equal, bool) else bool(equal.all())
