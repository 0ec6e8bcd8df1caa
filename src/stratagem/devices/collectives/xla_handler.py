"""XLA's binary interface for custom calls, as far as a handler written in Python needs it.

XLA calls a function of C with pointers to buffers, which `ctypes` can make from one of Python. So
the buffers are used in place, and a program with such a call has no pointers in it and can be
cached, unlike one with a host callback of JAX. A call returns at once and is completed later, from
any thread. In between it occupies no thread of XLA, where another sum could be needed first.

Source: XLA, xla/ffi/api/c_api.h, version 0.3.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_MAJOR, _MINOR = 0, 3
_METADATA = 1  # type of the extension with which XLA asks for the version of a handler
_UNAVAILABLE = 14
_DTYPES = {
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "uint8",
    7: "uint16",
    8: "uint32",
    9: "uint64",
    11: "float32",
    12: "float64",
    15: "complex64",
    18: "complex128",
}
# Types of arrays that a handler can be given.
DTYPES = frozenset(_DTYPES.values())


class _Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
    )


class _Version(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("version", _Version),
        ("traits", ctypes.c_uint32),
    )


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)))


# Functions of the interface, in its order, up to the last one used here.
_FUNCTIONS = (
    "error_create",
    "error_get_message",
    "error_destroy",
    "handler_register",
    "stream_get",
    "type_register",
    "execution_context_get",
    "state_set",
    "state_get",
    "device_memory_allocate",
    "device_memory_free",
    "thread_pool_schedule",
    "thread_pool_num_threads",
    "future_create",
    "future_set_available",
    "future_set_error",
)
_Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class _Api(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("version", _Version),
        ("internal_api", ctypes.c_void_p),
        *((name, _Function) for name in _FUNCTIONS),
    )


class _BufferView(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class _Buffers(ctypes.Structure):  # arguments or results
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(ctypes.POINTER(_BufferView))),
    )


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
    )


class _CallFrame(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(_Extension)),
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
        ("future", ctypes.c_void_p),
    )


class _FutureArguments(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("future", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
    )


class _ErrorArguments(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    )


class PendingCall:
    """A call of a handler that is not complete; its buffers are valid until then."""

    arguments: list[np.ndarray[Any, Any]]
    results: list[np.ndarray[Any, Any]]

    def __init__(self, frame: Any) -> None:
        self._api = frame.api.contents
        created = _FutureArguments(_FutureArguments.error.offset)
        self._api.future_create(ctypes.addressof(created))
        self._future = frame.future = created.future

    def read(self, frame: Any) -> None:
        """Reads where the arrays are. Raises KeyError for a dtype that is not of `DTYPES`."""
        self.arguments, self.results = _arrays(frame.arguments), _arrays(frame.results)

    def complete(self) -> None:
        """Marks the results as written. The program may continue within this call.

        Call it in a thread that has called `flush_denormals`.
        """
        arguments = _FutureArguments(_FutureArguments.error.offset, None, self._future)
        self._api.future_set_available(ctypes.addressof(arguments))

    def fail(self, message: str) -> None:
        """Ends the program with an error that begins with UNAVAILABLE."""
        text = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, message.encode(), _UNAVAILABLE)
        error = self._api.error_create(ctypes.addressof(text))
        arguments = _FutureArguments(ctypes.sizeof(_FutureArguments), None, self._future, error)
        self._api.future_set_error(ctypes.addressof(arguments))


def _arrays(buffers: Any) -> list[np.ndarray[Any, Any]]:
    return [_array(buffers.buffers[place].contents) for place in range(buffers.size)]


def _array(buffer: Any) -> np.ndarray[Any, Any]:
    """Returns a flat view of a buffer."""
    dtype = np.dtype(_DTYPES[buffer.dtype])
    count = math.prod(buffer.dims[axis] for axis in range(buffer.rank))
    memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(buffer.data)
    return np.frombuffer(memory, dtype)


_kept: list[Any] = []  # XLA calls a handler for as long as the process runs


def register_handler(name: str, start: Callable[[PendingCall], None]) -> None:
    """Registers the handler of custom calls of a name on CPU; `start` must not block."""

    def handle(address: int) -> int | None:
        frame = _CallFrame.from_address(address)
        if frame.extension_start and frame.extension_start.contents.type == _METADATA:
            extension = ctypes.cast(
                frame.extension_start, ctypes.POINTER(_MetadataExtension)
            ).contents
            extension.metadata.contents.version = _Version(
                ctypes.sizeof(_Version), None, _MAJOR, _MINOR
            )
            extension.metadata.contents.traits = 0
            return None
        call = PendingCall(frame)
        try:
            call.read(frame)
            start(call)
        except Exception as error:  # noqa: BLE001 - ctypes would drop it
            call.fail(repr(error))
        return None

    handler = _Function(handle)
    _kept.append(handler)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")


@functools.cache
def handlers_work() -> bool:
    """Returns True if this version of XLA calls a handler as expected."""

    def start(call: PendingCall) -> None:
        np.add(call.arguments[0], 1, out=call.results[0])
        call.complete()

    shape = jax.ShapeDtypeStruct((2,), np.int32)
    try:
        register_handler("stratagem_trial", start)
        result = jax.jit(jax.ffi.ffi_call("stratagem_trial", shape))(np.array([1, 2], np.int32))
        return np.asarray(result).tolist() == [2, 3]
    except Exception:  # noqa: BLE001 - of any kind, in a version that is not known yet
        return False
