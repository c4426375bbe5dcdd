"""Ahead-of-time compilation with a program cache, compile times and peak memory."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from threading import Lock
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.layout import Format, Layout

from jkv import kernels
from jkv.cache.cache import Cache, Decoding, device_bytes
from jkv.cache.disk_pages import raise_page_errors
from jkv.cache.offload import settled
from jkv.cache.offload_memory import KIND
from jkv.models import Params
from jkv.utils import compile_cache, fork_guard
from jkv.utils.compile_cache import cache_dir

if TYPE_CHECKING:
    from jkv.core.sharding import MeshPlan

ANY = Format(Layout.AUTO)  # an argument or a result whose memory layout the compiler chooses

# Limits of the program cache. A program of a 30-layer model takes 100 to 450 MB on a CPU and 1,000 to 4,000 memory
# maps of 0.1 to 0.2 MB. Linux allows a process 65,530 maps; beyond that XLA crashes. A prompt length and a cache need
# two programs.
LIMIT, HELD, MAPS = 256, 16_000, 30_000  # programs; maps of all of them; maps of the process
LOCK = Lock()  # guards PROGRAMS and BEGUN
PROGRAMS: dict[Any, Compiled] = {}  # in order of use, the most recent last
BESIDE = ThreadPoolExecutor(1, "compile")  # one at a time, because a thread that waits for a program needs a core too
BEGUN: dict[Any, Future[Compiled]] = {}  # programs that are being compiled


def program(*, arguments: tuple[Any, ...], results: Any, **options: Any) -> Callable[[Any], Any]:
    """Decorate a function with `jax.jit`; `compiled` also leaves the layouts of ANY arguments to the compiler.

    Kernels want the tokens of a tier on the last axis. With fixed layouts a tier would be transposed, and held twice,
    whenever a program starts and ends.

    The decorated function has two more attributes: `function.over(given, returned)` jits it for shardings of arguments
    and results on a mesh, and `function.placed(args, static)` returns the arrays and the static arguments in the order
    that both want.

    Args:
        arguments: for each array argument, ANY or None.
        results: for each result, ANY or None.
        options: options of `jax.jit`.

    Raises:
        TypeError: a static argument does not follow the array arguments.
    """

    def jitted(function: Any, given: tuple[Any, ...], returned: Any) -> Any:
        return jax.jit(function, in_shardings=given, out_shardings=returned, **options)

    def anywhere(kind: Any, where: Any) -> Any:
        return jax.tree.map(_anyhow, where) if kind is ANY else where

    def over(function: Any, given: tuple[Any, ...], returned: Any) -> Any:
        given = tuple(map(anywhere, arguments, given))
        # All results are ANY: if some layouts are free, the compiler may change others too without telling JAX.
        return jitted(function, given, anywhere(ANY, returned))

    def decorate(function: Any) -> Any:
        function = _giving(function)
        out: Any = jax.jit(function, **options)
        out.free, out.over = jitted(function, arguments, results), partial(over, function)
        out.placed = _placed(function, len(arguments), options.get("static_argnames", ()))
        return out

    return decorate


def _placed(function: Any, arrays: int, static: Collection[str]) -> Callable[..., tuple[tuple[Any, ...], ...]]:
    """Return a function that orders arguments by the signature and fills in defaults."""
    own = signature(function)
    names = list(own.parameters)
    if {*names[arrays : arrays + len(static)]} != {*static}:
        raise TypeError(f"{function.__name__}({', '.join(names)}): {', '.join(static)} must follow the {arrays} arrays")

    def placed(args: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
        bound = own.bind(*args, **given)
        bound.apply_defaults()
        values = [bound.arguments[name] for name in names[: arrays + len(static)]]
        return tuple(values[:arrays]), tuple(values[arrays:])

    return placed


def _giving(function: Any) -> Any:
    """Wrap a function so that its results declare which of their arrays are in host memory."""

    @wraps(function)
    def run(*args: Any, **static: Any) -> Any:
        return settled(function(*args, **static))

    return run


def _anyhow(where: Any) -> Any:
    """Return a sharding with a layout of the compiler's choice; in host memory the default one, which can be sliced."""
    return where if where.memory_kind == KIND else Format(Layout.AUTO, where)


Run = Callable[..., Any]  # runs a program: run(program, *arguments, **static)


def call(function: Any, *args: Any, **static: Any) -> Any:
    """Run a program directly, without measuring it; under `jax.jit` a flow then becomes one program."""
    return function(*args, **static)


def flow(whole: Any = None, **options: Any) -> Callable[[Any], Any]:
    """Decorate a function that runs programs layer by layer through its argument `run`.

    Equal layers share their programs, which are compiled once. `function.whole` is the same as one `program`, for
    meshes and for kernels, because it keeps a tier's layout from one layer's flush to the steps and back. Between two
    programs a flow must not compute, because it is also run on shapes, where `run` only compiles.

    Args:
        whole: the single program, or None to make it from the function.
        options: arguments of `program`.
    """

    def decorate(function: Any) -> Any:
        function.whole = whole or program(**options)(function)
        function.static = options.get("static_argnames", ())
        return function

    return decorate


class Compiled:
    """One compiled program; call it to run it.

    Attributes:
        program: the executable.
        maps: memory maps that compiling added, including those of compilations in other threads.
        formats: formats of the arguments, or None if their layouts are fixed.
        temporary: bytes of temporary memory.
        made: bytes of temporary memory and of results that do not alias arguments.
    """

    def __init__(self, lowered: jax.stages.Lowered, free: bool) -> None:
        before = maps()
        self.program = lowered.compile()
        trim()
        self.maps = max(maps() - before, 0)
        self.formats = self.program.input_formats[0] if free else None
        memory = self.program.memory_analysis()
        self.temporary = int(memory.temp_size_in_bytes) if memory is not None else 0
        self.made = self.temporary
        if memory is not None:
            self.made += int(memory.output_size_in_bytes - memory.alias_size_in_bytes)

    def __call__(self, *args: Any) -> Any:
        return self.program(*args if self.formats is None else jax.tree.map(_where, args, self.formats))


def _where(x: Any, format: Any) -> Any:
    """Move an argument to the format that the program takes; an array that all processes have stays where it is."""
    sharding = format.sharding
    if sharding is None or (x.is_fully_addressable and not sharding.is_fully_addressable):
        return x
    typed = jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)  # PRNG keys, whose layout does not match their shape
    return jax.device_put(x, sharding if typed else format)


def compiled(function: Any, *args: Any, over: MeshPlan | None = None, **static: Any) -> tuple[Compiled, float]:
    """Return the program of a jitted function for arguments of these shapes, compiling it if necessary.

    Args:
        function: the jitted function or `program`.
        args: its array arguments; shapes are enough.
        over: the mesh that it runs on, or None for one device.
        static: its static arguments.

    Returns:
        The program, and the seconds spent compiling in this call.

    >>> double = jax.jit(lambda x: 2 * x)
    >>> program, seconds = compiled(double, jax.numpy.ones(3))
    >>> program(jax.numpy.ones(3)).tolist(), seconds > 0, compiled(double, jax.numpy.ones(3))[1]
    ([2.0, 2.0, 2.0], True, 0.0)
    """
    fork_guard.check()
    key = _key(function, args, static, over)
    with LOCK:
        program = PROGRAMS.pop(key, None)
        if program is not None:
            PROGRAMS[key] = program
            return program, 0.0
    jax.block_until_ready(args)  # so that running work is not timed as compiling
    start = time.perf_counter()
    begun, mine = _begin(key)
    if mine:
        _fill(key, begun, lambda: Compiled(*_lowered(function, args, static, over)))
    return begun.result(), time.perf_counter() - start


def compiling() -> bool:
    """Return whether some thread is compiling a program."""
    with LOCK:
        return bool(BEGUN)


def _begin(key: Any) -> tuple[Future[Compiled], bool]:
    """Return the future for `key`, and whether this thread must compile it."""
    fork_guard.mark_started()
    with LOCK:
        future: Future[Compiled] = Future()
        if key in PROGRAMS:  # another thread has just finished it
            future.set_result(PROGRAMS[key])
            return future, False
        mine = BEGUN.setdefault(key, future)
        return mine, mine is future


def _fill(key: Any, begun: Future[Compiled], make: Callable[[], Compiled]) -> None:
    """Compile a program and hand it, or the error, to all threads that wait for it."""
    try:
        program = make()
    except BaseException as error:
        return _fail(key, begun, error)
    with LOCK:
        if BEGUN.get(key) is begun:  # unless `forget` dropped it meanwhile
            del BEGUN[key]
            PROGRAMS[key] = program
            _let_go()
    begun.set_result(program)


def _fail(key: Any, begun: Future[Compiled], error: BaseException) -> None:
    """Drop the failed compilation so that the next caller retries it."""
    with LOCK:
        if BEGUN.get(key) is begun:
            del BEGUN[key]
    begun.set_exception(error)


def _let_go() -> None:
    """Drop the least recently used programs until the limits are met."""
    dropped = False
    while len(PROGRAMS) > LIMIT or (len(PROGRAMS) > 2 and _crowded()):
        oldest = next(iter(PROGRAMS))
        del PROGRAMS[oldest]
        oldest[0].clear_cache()  # JAX's own cache of it; programs in PROGRAMS survive this
        dropped = True
    if dropped:
        trim()


def _crowded() -> bool:
    """Return whether the programs, or this process, have too many memory maps."""
    return sum(program.maps for program in PROGRAMS.values()) > HELD or maps() > MAPS


def trim() -> None:
    """Return freed heap memory to the system; a compilation leaves as much as its program takes."""
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)


def maps() -> int:
    """Return the number of memory maps of this process, 0 if the system does not report it."""
    try:
        with open("/proc/self/maps", "rb") as lines:
            return sum(1 for _ in lines)
    except OSError:
        return 0


def ahead(function: Any, *args: Any, **static: Any) -> Future[Compiled]:
    """Start compiling, in the background, what `compiled` will be called with; for one device.

    Tracing happens in this thread, under its settings.

    Args:
        function: the jitted function or `program`.
        args: its array arguments; of all but the first, shapes are enough.
        static: its static arguments.

    Returns:
        The future of the program.

    >>> double = jax.jit(lambda x: 2 * x)
    >>> begun = ahead(double, jax.numpy.ones(5))
    >>> compiled(double, jax.numpy.ones(5))[0](jax.numpy.ones(5)).sum().item(), begun.done()
    (10.0, True)
    """
    fork_guard.check()
    args = settled((args[0], *jax.eval_shape(lambda *x: x, *args[1:])))
    key = _key(function, args, static, None)
    begun, mine = _begin(key)
    if mine:
        try:
            lowered = _lowered(function, args, static, None)
        except BaseException as error:
            _fail(key, begun, error)
            raise
        BESIDE.submit(_fill, key, begun, lambda: Compiled(*lowered))
    return begun


def shaped(function: Any, *args: Any, **static: Any) -> Any:
    """Start compiling a program and return the shapes of its results; the `run` of a flow that only compiles."""
    ahead(function, *args, **static)
    return settled(jax.eval_shape(partial(function, **static), *args))


def beside_weights(args: tuple[Any, ...]) -> int:
    """Return the bytes on the device of a program's arguments other than model weights."""
    return sum(device_bytes(arg) for arg in args if not isinstance(arg, Params))


def caches(args: tuple[Any, ...]) -> int:
    """Return the bytes on the device of the caches and decode states among arguments."""
    return sum(device_bytes(arg) for arg in args if isinstance(arg, Cache | Decoding))


@dataclass
class Cost:
    """Time and memory of the programs that it runs.

    Attributes:
        compiling: seconds spent compiling.
        running: seconds spent running.
        programs: number of programs compiled.
        disturbed: whether a program was being compiled, here or in another thread, around a run.
        over: the mesh that programs run on, or None.
        peak: maximum bytes at any moment, without weights.
        temporary: maximum bytes that a program holds besides arguments and results.
        runs: False to only compile programs, for arguments that are shapes.
    """

    compiling: float = 0.0
    running: float = 0.0
    programs: int = 0
    disturbed: bool = False
    over: MeshPlan | None = None
    peak: int = 0
    temporary: int = 0
    runs: bool = True

    def run(self, flow: Any, *args: Any, **static: Any) -> Any:
        """Run `flow` and wait for its results."""
        start, before, programs, busy = time.perf_counter(), self.compiling, self.programs, compiling()
        with raise_page_errors():
            out = jax.block_until_ready(self.begin(flow, *args, **static))
        self.running += time.perf_counter() - start - (self.compiling - before)
        self.disturbed |= busy or compiling() or self.programs > programs
        return out

    def begin(self, flow: Any, *args: Any, **static: Any) -> Any:
        """Dispatch `flow` without waiting."""
        if self._whole(args):
            return self._one(flow.whole, args, {name: static[name] for name in flow.static if name in static}, 0)
        held = caches(args)
        one = lambda function, *args, **static: self._one(function, args, static, held)  # noqa: E731
        return flow(*args, **static, run=one)

    def ahead(self, flow: Any, *args: Any, **static: Any) -> None:
        """Start compiling what `begin` will run; no-op on a mesh, where compilation is not done ahead."""
        if self.over is not None:
            return
        if self._whole(args):
            ahead(flow.whole, *args, **{name: static[name] for name in flow.static if name in static})
        else:
            flow(*args, **static, run=shaped)

    def _whole(self, args: tuple[Any, ...]) -> bool:
        """Return whether to run a flow as one program: on a mesh, with kernels, or for arguments on several devices."""
        return self.over is not None or kernels.native() != "xla" or _spread(args)

    def _one(self, function: Any, args: tuple[Any, ...], static: dict[str, Any], held: int) -> Any:
        """Run one program of a flow and record its cost.

        Args:
            function: the program.
            args: its arguments.
            static: its static arguments.
            held: bytes of the whole cache, of which the program may get one layer.
        """
        program, seconds = compiled(function, *args, over=self.over, **static)
        self.compiling += seconds
        self.programs += seconds > 0
        self.temporary = max(self.temporary, program.temporary)
        if self.over is not None:
            beside = sum(self.over.bytes(arg) for arg in args if not isinstance(arg, Params))
        else:
            beside = beside_weights(args) + (0 if caches(args) else held)
        self.peak = max(self.peak, program.made + beside)
        return program(*args) if self.runs else settled(jax.eval_shape(partial(function, **static), *args))


def _spread(args: tuple[Any, ...]) -> bool:
    """Return whether arguments are on several devices."""
    first = jax.tree.leaves(args)[0]
    return isinstance(first, jax.Array) and len(first.sharding.device_set) > 1


def _key(function: Any, args: tuple[Any, ...], static: dict[str, Any], over: MeshPlan | None) -> Any:
    """Return the key of a program in PROGRAMS."""
    leaves, tree = jax.tree.flatten(args)
    return function, tree, tuple((x.shape, x.dtype) for x in leaves), over, tuple(static.items())


def _lowered(
    function: Any, args: tuple[Any, ...], static: dict[str, Any], over: MeshPlan | None
) -> tuple[jax.stages.Lowered, bool]:
    """Lower a function, and return whether the compiler chooses the layouts of its arguments."""
    free = over is not None or (hasattr(function, "free") and kernels.native() != "xla")
    if free:  # arrays have a layout that the program would have to keep; shapes do not
        args = settled(jax.eval_shape(lambda *x: x, *args))
    if over is not None:
        return over.lower(function, args, static), free
    if not free:
        return function.lower(*args, **static), free
    arrays, fixed = function.placed(args, static)
    return function.free.lower(*arrays, *fixed), free


def forget() -> None:
    """Drop all compiled programs of this process; those on disk stay.

    This includes JAX's own caches, which grow with every shape, and programs of other libraries.
    """
    with LOCK:
        PROGRAMS.clear()
        BEGUN.clear()
    jax.clear_caches()
    trim()


def use_disk_cache() -> None:
    """Keep compiled programs on disk between runs, unless the user has chosen a folder.

    Raises ValueError if JKV_PROGRAMS_GIB, the maximum size kept between processes, is not a number.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        folder = cache_dir() / "programs"
        if jax.config.values["jax_enable_compilation_cache"]:
            compile_cache.tidy(folder, compile_cache.limit())
        jax.config.update("jax_compilation_cache_dir", str(folder))


def peak_bytes(program: Compiled) -> int:
    """Return the compiler's estimate of a program's peak memory: arguments, results and temporaries."""
    m = program.program.memory_analysis()
    if m is None:
        return 0
    results = m.output_size_in_bytes - m.alias_size_in_bytes
    return int(m.argument_size_in_bytes + results + m.temp_size_in_bytes)
