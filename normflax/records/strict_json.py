"""JSON that every reader accepts.

RFC 8259 has no NaN and no infinities, so they are written as the strings "NaN", "Infinity" and "-Infinity", and those
three strings are read back as floats. NumPy and device scalars of any precision (float32, bfloat16, integers) become
numbers.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from normflax.records.atomic import replacing

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: object, indent: int | None = None) -> str:
    """The text of `value`, made of mappings, sequences, strings, numbers, None and 0-d arrays.

    Raises TypeError for anything else, arrays with axes included.
    """
    return json.dumps(_encoded(value), indent=indent, allow_nan=False)


def loads(text: str) -> Any:
    """The value of a strict JSON text. Raises ValueError for a broken one, a bare NaN or Infinity included."""
    value = json.loads(text, parse_constant=_refuse)
    return _decoded(value) if any(f'"{name}"' in text for name in _NONFINITE) else value


def write(path: Path, value: object) -> None:
    """Replace the file at `path` by the text of `value`, atomically."""
    text = dumps(value, indent=2)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read(path: Path) -> Any:
    """The value in the file at `path`."""
    return loads(path.read_text(encoding="utf-8"))


def _encoded(value: Any) -> object:
    match value:
        case None | str() | bool() | int():
            return value
        case float():
            if math.isfinite(value):
                return value
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case dict():
            return {key: _encoded(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_encoded(entry) for entry in value]
    array = np.asarray(value)
    if array.ndim == 0 and array.dtype.kind in "biu":
        return array.item()
    if array.ndim == 0 and array.dtype.kind in "fV":  # V: bfloat16 and the float8 types
        return _encoded(float(array))
    raise TypeError(f"a {type(value).__name__} of shape {array.shape} is no JSON value: a record holds scalars")


def _decoded(value: Any) -> Any:
    match value:
        case str():
            return _NONFINITE.get(value, value)
        case dict():
            return {key: _decoded(entry) for key, entry in value.items()}
        case list():
            return [_decoded(entry) for entry in value]
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"bare {constant} is not JSON")
