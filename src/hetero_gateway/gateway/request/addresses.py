"""The address of an object's bytes, which gives the position of a field within its text.

It imports ``ctypes``, which only long bodies need.
"""

from __future__ import annotations

import ctypes
from typing import Any


class _Buffer(ctypes.Structure):
    """``Py_buffer``, as the stable ABI has it from Python 3.11 on."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes, _release.restype = (ctypes.POINTER(_Buffer),), None


def address(data: Any) -> int:
    """The address of the first byte, valid as long as the object is neither resized nor freed."""
    found = _Buffer()
    _get(data, found, 0)
    start = int(found.buf or 0)
    _release(found)
    return start
