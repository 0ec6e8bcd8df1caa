"""Sums in shared memory as part of a compiled program.

A program starts them one after the other, since each has the outcome of the one before among its
arguments. XLA runs independent calls in any order, and two processes could otherwise add different
arrays. A sum outside such an order, as in a loop of the user's, is of another algorithm.

From below: the threads compute as XLA's do; a custom call of XLA's is a Python function; replicas
add in one memory; `connect_memory` agrees on it; `in_order` puts the calls into a traced step.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import logging
import math
import mmap
import os
import platform
import queue
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, gensym

from stratagem.devices.all_reduce import SHARED_SUM
from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.group.current import current_group
from stratagem.group.member import Group

# Arithmetic of XLA's threads in other threads: denormal numbers are zero.
#
# A program that continues in another thread would keep them, and have other bits than in a process
# where it continued in one of XLA's.
#
# Source: glibc, fenv.h; XLA, tsl/platform/denormal.cc.

# In C's `fenv_t` on Linux: the place of the control word in units of 32 bits, and its bits.
_CONTROLS = {
    "x86_64": (7, 0x8040),  # MXCSR: results are flushed, and so are arguments
    "aarch64": (0, 1 << 24),  # FPCR: both
}
_Environment = ctypes.c_uint32 * 16  # larger than either


def flush_denormals() -> None:
    """Makes this thread compute as XLA's do, from now on; changes nothing but on Linux."""
    control = _CONTROLS.get(platform.machine()) if sys.platform == "linux" else None
    if control is None:
        return
    place, bits = control
    library, environment = ctypes.CDLL(None), _Environment()
    library.fegetenv(environment)
    environment[place] |= bits
    library.fesetenv(environment)


# XLA's binary interface for custom calls, as far as a handler written in Python needs it.
#
# XLA calls a function of C with pointers to buffers, which `ctypes` can make from one of Python. So
# the buffers are used in place, and a program with such a call has no pointers in it and can be
# cached, unlike one with a host callback of JAX. A call returns at once and is completed later,
# from any thread. In between it occupies no thread of XLA, where another sum could be needed first.
#
# Source: XLA, xla/ffi/api/c_api.h, version 0.3.

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


# Sums of arrays between replicas of one machine, in memory that their processes share.
#
# Each replica adds one shard of the array and copies the sums of the others. Blocks pass through a
# small area, which stays in the cache: in one round a replica writes its part of the shards of
# block k that others add, adds its own shard of block k - 1, and reads the sums of block k - 2.
#
# Every element is added by one replica, in replica order, so the result is bitwise equal on all.
#
# The memory is anonymous, so that nothing is left behind when processes are killed, and a small
# /dev/shm does not limit it. One process creates it, and the others open it through its /proc
# entry, which needs the same user.

if sys.platform != "win32":
    import fcntl


_WORD_BYTES = 32
# The head: the word, a number that is not 0 once a replica has failed, and from `_LINES_BEGIN` two
# lines of a cache per replica: the rounds that it has completed, and the array that it adds.
_HEAD_BYTES, _LINE_BYTES = 2**14, 64
_FAILED, _LINES_BEGIN = 64, 1024
_MOST_REPLICAS = (_HEAD_BYTES - _LINES_BEGIN) // (2 * _LINE_BYTES)
_BANKS = 2
# Bytes of a block, and least bytes of its shards.
_BLOCK_BYTES, _LEAST_SHARD_BYTES = 2**21, 2**13
# Linux on x86-64.
_FUTEX, _WAIT, _WAKE, _EVERYONE = 202, 0, 1, 2**31 - 1
_CHECK_S = 0.1
_TURN_S = 1e-4
_LOST = "another process was lost during a sum in shared memory"
_NAME = "stratagem"


class _Interval(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_supported() -> bool:
    """Returns True if this system can share memory.

    On x86-64 all cores see writes in one order; elsewhere Python has no means to enforce that.
    """
    return (
        sys.platform == "linux"
        and platform.machine() == "x86_64"
        and platform.libc_ver()[0] == "glibc"
        and hasattr(fcntl, "F_SEAL_SHRINK")
        and sys.maxsize > 2**32
    )


class SharedArea:
    """Memory for the sums of some replicas, one at a time.

    `offer` is of the process that created it; None creates it. Raises OSError if it cannot be
    opened from this process; ValueError if it is not what the offer says, or for many replicas.
    """

    def __init__(self, num_replicas: int, offer: dict[str, Any] | None = None) -> None:
        if num_replicas > _MOST_REPLICAS:
            raise ValueError(f"{num_replicas} replicas are more than {_MOST_REPLICAS}")
        self.num_replicas = num_replicas
        self.shard_bytes = max(_BLOCK_BYTES // num_replicas & -_LINE_BYTES, _LEAST_SHARD_BYTES)
        size = _HEAD_BYTES + _BANKS * num_replicas**2 * self.shard_bytes
        word = secrets.token_hex(_WORD_BYTES // 2) if offer is None else str(offer["word"])
        file = _create(size) if offer is None else _open(offer)
        try:
            self._map = mmap.mmap(file, size)
        except BaseException:
            os.close(file)
            raise
        if offer is None:
            self._map[:_WORD_BYTES] = word.encode()
            weakref.finalize(self, os.close, file)
            self.offer = {"pid": os.getpid(), "file": file, "word": word}
        else:
            os.close(file)
            if self._map[:_WORD_BYTES] != word.encode():
                raise ValueError("the memory has another identifier than its description")
            self.offer = offer
        self._numbers = np.frombuffer(self._map, np.uint32, _HEAD_BYTES // 4)
        self._address = self._numbers.ctypes.data
        shape = (_BANKS, num_replicas, num_replicas, self.shard_bytes)
        self.shards = np.frombuffer(self._map, np.uint8, offset=_HEAD_BYTES).reshape(shape)
        self._system = ctypes.CDLL(None).syscall
        self._interval = _Interval(0, int(_CHECK_S * 1e9))

    @property
    def has_failed(self) -> bool:
        """True once a replica has failed: the others would wait for it."""
        return bool(self._numbers[_FAILED // 4])

    def fail(self) -> None:
        """Ends this and all later sums of all replicas."""
        self._numbers[_FAILED // 4] = 1

    def describe(self, rank: int, array: np.ndarray[Any, Any]) -> None:
        """Writes what a replica adds."""
        place = self._line(rank) + _LINE_BYTES // 4
        self._numbers[place : place + 3] = (array.size % 2**32, array.size >> 32, array.dtype.num)

    def check(self, rank: int) -> None:
        """Raises RuntimeError if other replicas add arrays of another size or dtype."""
        described = [
            self._numbers[place : place + 3].tolist()
            for place in (self._line(r) + _LINE_BYTES // 4 for r in range(self.num_replicas))
        ]
        if described.count(described[rank]) < self.num_replicas:
            raise RuntimeError(f"the replicas add different arrays (size, dtype): {described}")

    def finish_round(self, rank: int, number: int, is_lost: Callable[[], bool]) -> None:
        """Waits until all replicas have finished a round. Raises RuntimeError if one was lost."""
        own = self._line(rank)
        self._numbers[own] = number
        self._call(own, _WAKE, _EVERYONE, None)
        for other in range(self.num_replicas):
            line = self._line(other)
            while 0 < (number - (seen := int(self._numbers[line]))) % 2**32 < 2**31:
                if self._call(line, _WAIT, seen, self._interval) and (self.has_failed or is_lost()):
                    raise RuntimeError(_LOST)

    def _call(self, place: int, operation: int, value: int, limit: _Interval | None) -> int:
        return self._system(
            ctypes.c_long(_FUTEX),
            ctypes.c_void_p(self._address + 4 * place),
            ctypes.c_int(operation),
            ctypes.c_uint32(value),
            None if limit is None else ctypes.byref(limit),
            None,
            ctypes.c_uint32(0),
        )

    def _line(self, rank: int) -> int:
        return (_LINES_BEGIN + 2 * rank * _LINE_BYTES) // 4


def _create(size: int) -> int:
    file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(file, 0o600)
        # Without memory for all of it, the first access to the rest would kill a process.
        os.posix_fallocate(file, 0, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(file)
        raise
    return file


def _open(offer: dict[str, Any]) -> int:
    entry = f"/proc/{offer['pid']:d}/fd/{offer['file']:d}"
    # In a container of its own, the entry may be of another process.
    if not os.readlink(entry).startswith(f"/memfd:{_NAME}"):
        raise ValueError(f"{entry} is not the memory of its description")
    file = os.open(entry, os.O_RDWR | os.O_CLOEXEC)
    # Reading memory that shrank would kill this process.
    try:
        if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("the memory is not sealed: it could shrink")
    except BaseException:
        os.close(file)
        raise
    return file


class _Turns:
    """The turns of Python's threads, which are short while sums are under way.

    A sum needs Python a few times. Each time, it waits for the turn of a thread that computes to
    end, after 5 ms by default.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_sums = 0
        self._usual_s = 0.0

    def shorten(self) -> None:
        with self._lock:
            if self._num_sums == 0:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(_TURN_S)
            self._num_sums += 1

    def restore(self) -> None:
        with self._lock:
            self._num_sums -= 1
            if self._num_sums == 0:
                sys.setswitchinterval(self._usual_s)


_turns = _Turns()


class SumServer:
    """Adds for one replica. The sums of a program come one after the other."""

    def __init__(self, area: SharedArea, rank: int, is_lost: Callable[[], bool]) -> None:
        self._area, self._rank, self._is_lost = area, rank, is_lost
        self._num_rounds = 0
        self._calls: queue.SimpleQueue[PendingCall | None] = queue.SimpleQueue()
        # A program may continue in the thread that completes a sum, while another adds the next.
        name = f"stratagem sums of replica {rank}"
        self._threads = [
            threading.Thread(target=self._serve, name=name, daemon=True) for _ in range(2)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, call: PendingCall) -> None:
        """Starts the sum of a call's first argument, without waiting for it."""
        _turns.shorten()
        self._calls.put(call)

    def close(self) -> None:
        """Ends the threads after the sums that were started."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        flush_denormals()
        while (call := self._calls.get()) is not None:
            try:
                self._add(call.arguments[0], call.results[0])
            except Exception as error:  # noqa: BLE001 - it ends the program instead
                self._area.fail()
                _turns.restore()
                call.fail(str(error))
            else:
                _turns.restore()
                call.complete()  # the next sum may start within
            del call  # its arrays may be freed

    def _add(self, addend: np.ndarray[Any, Any], total: np.ndarray[Any, Any]) -> None:
        area, rank, dtype = self._area, self._rank, addend.dtype
        if area.has_failed:  # the others may be in another round
            raise RuntimeError(_LOST)
        shards = area.shards.view(dtype)
        length = area.num_replicas * shards.shape[-1]
        num_blocks = -(-addend.size // length)
        area.describe(rank, addend)
        for number in range(num_blocks + 2):
            if number < num_blocks:
                bank, part = shards[number % _BANKS], slice(number * length, (number + 1) * length)
                self._write(bank, addend[part])
            if 0 <= number - 1 < num_blocks:
                bank, part = (
                    shards[(number - 1) % _BANKS],
                    slice((number - 1) * length, number * length),
                )
                self._add_own(bank, addend[part], total[part])
            if number >= 2:
                bank, part = (
                    shards[number % _BANKS],
                    slice((number - 2) * length, (number - 1) * length),
                )
                self._read(bank, total[part])
            if number <= num_blocks:
                self._num_rounds = (self._num_rounds + 1) % 2**32
                area.finish_round(rank, self._num_rounds, self._is_lost)
            if number == 0:
                area.check(rank)

    def _write(self, bank: np.ndarray[Any, Any], block: np.ndarray[Any, Any]) -> None:
        for other, part in self._others(block):
            np.copyto(bank[self._rank, other, : part.size], part)

    def _add_own(
        self, bank: np.ndarray[Any, Any], block: np.ndarray[Any, Any], total: np.ndarray[Any, Any]
    ) -> None:
        place = self._shard(block.size, self._rank)
        own = block[place]
        result = bank[self._rank, self._rank, : own.size]
        parts = [
            own if rank == self._rank else bank[rank, self._rank, : own.size]
            for rank in range(self._area.num_replicas)
        ]
        np.add(parts[0], parts[1], out=result)
        for part in parts[2:]:
            np.add(result, part, out=result)
        np.copyto(total[place], result)

    def _read(self, bank: np.ndarray[Any, Any], total: np.ndarray[Any, Any]) -> None:
        for other, part in self._others(total):
            np.copyto(part, bank[other, other, : part.size])

    def _others(self, block: np.ndarray[Any, Any]) -> list[tuple[int, np.ndarray[Any, Any]]]:
        ranks = range(self._area.num_replicas)
        return [
            (rank, block[self._shard(block.size, rank)]) for rank in ranks if rank != self._rank
        ]

    def _shard(self, size: int, rank: int) -> slice:
        length = -(-size // self._area.num_replicas)
        return slice(rank * length, (rank + 1) * length)


_logger = logging.getLogger(__name__)
_TARGET = "stratagem_shared_sum"


@dataclasses.dataclass
class _Membership:
    """The memory of this process, connected once: ids of the devices of all replicas."""

    is_decided: bool = False
    devices: tuple[int, ...] = ()


_membership = _Membership()
_servers: dict[int, SumServer] = {}


def connect_memory(topology: Topology) -> None:
    """Connects the processes of a machine if they can share memory; all must call it.

    Only the first topology of a process shares memory.
    """
    group = current_group()
    if group is None or not topology.spans_processes or topology.platform != "cpu":
        return
    if not _membership.is_decided:
        _membership.is_decided = True
        is_plain = topology.groups is None and topology.shard_size is None
        area = _connected_area(group, topology) if is_plain else None
        if area is not None:
            serve_sums(area, _local_ranks(topology), lambda: group.verdict is not None)
            _membership.devices = _ids_of(topology)


def is_connected(topology: Topology) -> bool:
    """Returns True if the replicas of a topology share memory."""
    is_plain = topology.shard_size is None
    return is_plain and bool(_membership.devices) and _membership.devices == _ids_of(topology)


def serve_sums(area: SharedArea, ranks: Sequence[int], is_lost: Callable[[], bool]) -> None:
    """Starts to serve the sums of the replicas of this process."""
    _servers.update({rank: SumServer(area, rank, is_lost) for rank in ranks})
    _register()


@functools.cache
def _register() -> None:
    register_handler(_TARGET, _start)


def _start(call: PendingCall) -> None:
    _servers[int(call.arguments[2][0])].start(call)


def _ids_of(topology: Topology) -> tuple[int, ...]:
    return tuple(device.id for device in topology.devices or ())


def _local_ranks(topology: Topology) -> list[int]:
    own = jax.process_index()
    return [rank for rank, one in enumerate(topology.devices or ()) if one.process_index == own]


def _connected_area(group: Group, topology: Topology) -> SharedArea | None:
    """Returns the area that all processes opened, or None on all of them."""
    can_share = is_supported() and handlers_work()
    machines = group.exchange("machines that share memory", _machine() if can_share else None)
    if machines[0] is None or machines.count(machines[0]) < len(machines):
        return None
    count = topology.num_replicas
    area, error = _opened(count, None) if group.process_id == 0 else (None, "")
    [offer, *_] = group.exchange("shared memory", None if area is None else area.offer)
    if group.process_id > 0 and offer is not None:
        area, error = _opened(count, offer)
    errors = group.exchange("connections to shared memory", error)
    if any(errors):
        _logger.info("The processes of this machine do not share memory: %s.", errors)
        return None
    return area


def _machine() -> str | None:
    """Returns an identifier of this machine since it started, and of what it shows this process."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{started} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"
    except OSError:
        return None


def _opened(num_replicas: int, offer: dict[str, Any] | None) -> tuple[SharedArea | None, str]:
    """Returns the area, or None and the reason."""
    try:
        return SharedArea(num_replicas, offer), ""
    except (OSError, ValueError) as error:  # such as where memory is short
        return None, str(error)


def no_sums() -> jax.Array:
    """Returns the outcome of no sums, with which an order begins."""
    return jnp.uint32(0)


def ordered_sum(
    array: jax.Array, order: jax.Array, axis_name: str | tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of a local array over replicas, and the outcome for the sum after it."""
    call = jax.ffi.ffi_call(
        _TARGET,
        (jax.ShapeDtypeStruct(array.shape, array.dtype), jax.ShapeDtypeStruct((), np.uint32)),
        # A total in place of the addend would be copied first where the addend is used again, or
        # is an argument of the program.
        input_output_aliases={1: 1},
    )
    total, order = call(array, order, jax.lax.axis_index(axis_name))
    return total, order


def in_order(closed: ClosedJaxpr) -> ClosedJaxpr | None:
    """Replaces the sums of a step by sums in shared memory; None if there are none.

    The result has the outcome of the sums before among its inputs and that of its own among its
    outputs, at the end of both. Sums inside of its equations, such as loops, stay the compiler's.
    """
    jaxpr = closed.jaxpr
    if not any(map(is_shared_sum, jaxpr.eqns)):
        return None
    new_variable: Any = gensym()
    number = ShapedArray((), np.dtype(np.uint32))
    first = order = new_variable(number)
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        if not is_shared_sum(eqn):
            eqns.append(eqn)
            continue
        addend = eqn.invars[0].aval
        [call] = _traced_sum(tuple(addend.shape), np.dtype(addend.dtype)).jaxpr.eqns
        after = new_variable(number)
        eqns.append(call.replace(invars=[eqn.invars[0], order], outvars=[eqn.outvars[0], after]))
        order = after
    ordered = jaxpr.replace(
        eqns=eqns, invars=[*jaxpr.invars, first], outvars=[*jaxpr.outvars, order]
    )
    return ClosedJaxpr(ordered, closed.consts)


def _traced_sum(shape: tuple[int, ...], dtype: np.dtype[Any]) -> ClosedJaxpr:
    # The number of replicas is not part of the trace.
    program = jax.jit(ordered_sum, static_argnums=2)
    trace = jax.make_jaxpr(program, static_argnums=2, axis_env=[(REPLICA_AXIS, 1)])
    return trace(jax.ShapeDtypeStruct(shape, dtype), no_sums(), REPLICA_AXIS)


def is_shared_sum(eqn: JaxprEqn) -> bool:
    """Returns True for a sum of one array; a derivative, which is a sum too, may add several."""
    return eqn.params.get("name") == SHARED_SUM and len(eqn.invars) == len(eqn.outvars) == 1
