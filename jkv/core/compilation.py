"""Ahead-of-time compilation, so that a receipt can tell compile seconds and peak memory."""

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
from jkv.cache.disk_pages import told
from jkv.cache.offload import settled
from jkv.cache.offload_memory import KIND
from jkv.models import Params
from jkv.utils import compile_cache, fork_guard
from jkv.utils.compile_cache import cache_dir

if TYPE_CHECKING:
    from jkv.core.sharding import MeshPlan

ANY = Format(Layout.AUTO)  # an argument or a result that lies in memory as the compiler likes it best

# Programs kept. One of a 30-layer model takes 100 to 450 MB on a CPU and 1,000 to 4,000 memory maps, 0.1 to 0.2 MB a
# map, of which Linux gives a process 65,530; where they end, XLA crashes. A prompt length and a cache need two.
LIMIT, HELD, MAPS = 256, 16_000, 30_000  # programs; maps of all of them; maps of the process
LOCK = Lock()  # of the two below
PROGRAMS: dict[Any, Compiled] = {}  # the one used last comes last
BESIDE = ThreadPoolExecutor(1, "compile")  # one after the other: whoever waits for a program needs a core, too
BEGUN: dict[Any, Future[Compiled]] = {}  # those that a thread is compiling now, for all who ask for them


def program(*, arguments: tuple[Any, ...], results: Any, **options: Any) -> Callable[[Any], Any]:
    """jax.jit with the options; `compiled` also leaves the layouts of what is ANY to the compiler.

    Kernels want a tier with its tokens last. Were the layouts fixed, a tier would be moved, and held twice, whenever a
    program begins and ends. `function.over(shardings, shardings)` is the same for arguments and results on a mesh.
    `function.placed(args, static)` are the arrays and the static arguments by place, as both want them; TypeError for a
    function whose static arguments do not follow its arrays.
    """

    def jitted(function: Any, given: tuple[Any, ...], returned: Any) -> Any:
        return jax.jit(function, in_shardings=given, out_shardings=returned, **options)

    def anywhere(kind: Any, where: Any) -> Any:
        return jax.tree.map(_anyhow, where) if kind is ANY else where

    def over(function: Any, given: tuple[Any, ...], returned: Any) -> Any:
        given = tuple(map(anywhere, arguments, given))
        # all: where some layouts are free the compiler may choose those of others too, and jax would not know
        return jitted(function, given, anywhere(ANY, returned))

    def decorate(function: Any) -> Any:
        function = _giving(function)
        out: Any = jax.jit(function, **options)
        out.free, out.over = jitted(function, arguments, results), partial(over, function)
        out.placed = _placed(function, len(arguments), options.get("static_argnames", ()))
        return out

    return decorate


def _placed(function: Any, arrays: int, static: Collection[str]) -> Callable[..., tuple[tuple[Any, ...], ...]]:
    """How arguments are put where the signature has them; what is left out has its default."""
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
    """The function, whose results say what of them lies on the host: what passes through says nothing else."""

    @wraps(function)
    def run(*args: Any, **static: Any) -> Any:
        return settled(function(*args, **static))

    return run


def _anyhow(where: Any) -> Any:
    """Where, in a layout of the compiler's choice; on the host in the one that slices are made of."""
    return where if where.memory_kind == KIND else Format(Layout.AUTO, where)


Run = Callable[..., Any]  # runs a program: run(program, *arguments, **static)


def call(function: Any, *args: Any, **static: Any) -> Any:
    """How a flow runs its programs if nobody asks what they cost: under a `jax.jit` they become one."""
    return function(*args, **static)


def flow(whole: Any = None, **options: Any) -> Callable[[Any], Any]:
    """A function that runs programs, layer by layer, through its argument `run`; `.whole` is one `program` of it all.

    Layers that are alike share their programs, so they are compiled once. The whole is for a mesh, and for kernels, as
    it keeps the layout of a tier from one layer's flush to the steps and back. What happens between two programs is no
    arithmetic: a flow also goes through shapes, where `run` only compiles.
    """

    def decorate(function: Any) -> Any:
        function.whole = whole or program(**options)(function)
        function.static = options.get("static_argnames", ())
        return function

    return decorate


class Compiled:
    """One program: call it, or ask what it cost."""

    def __init__(self, lowered: jax.stages.Lowered, free: bool) -> None:
        before = maps()
        self.program = lowered.compile()
        trim()
        self.maps = max(maps() - before, 0)  # and those of what another thread compiled meanwhile
        self.formats = self.program.input_formats[0] if free else None
        memory = self.program.memory_analysis()
        self.temporary = int(memory.temp_size_in_bytes) if memory is not None else 0  # bytes beside in- and outputs
        self.made = self.temporary  # and what it gives that does not take an argument's place
        if memory is not None:
            self.made += int(memory.output_size_in_bytes - memory.alias_size_in_bytes)

    def __call__(self, *args: Any) -> Any:
        return self.program(*args if self.formats is None else jax.tree.map(_where, args, self.formats))


def _where(x: Any, format: Any) -> Any:
    """An argument where the program takes it, if it does; what every process has, a mesh of several takes as it is."""
    sharding = format.sharding
    if sharding is None or (x.is_fully_addressable and not sharding.is_fully_addressable):
        return x
    typed = jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)  # keys of draws: their layout is not of their shape
    return jax.device_put(x, sharding if typed else format)


def compiled(function: Any, *args: Any, over: MeshPlan | None = None, **static: Any) -> tuple[Compiled, float]:
    """The program of a jitted function for arguments of these shapes, and the seconds that compiling took just now.

    over: the mesh that it runs on, if it is not for one device.

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
    jax.block_until_ready(args)  # or else what is under way ends beside the compiler, and unseen
    start = time.perf_counter()
    begun, mine = _begin(key)
    if mine:
        _fill(key, begun, lambda: Compiled(*_lowered(function, args, static, over)))
    return begun.result(), time.perf_counter() - start


def _begin(key: Any) -> tuple[Future[Compiled], bool]:
    """The program of a key, which is to come, and whether it is for this thread to compile."""
    fork_guard.begun()
    with LOCK:
        future: Future[Compiled] = Future()
        if key in PROGRAMS:  # another thread has just finished it
            future.set_result(PROGRAMS[key])
            return future, False
        mine = BEGUN.setdefault(key, future)
        return mine, mine is future


def _fill(key: Any, begun: Future[Compiled], make: Callable[[], Compiled]) -> None:
    """Compile what has begun, for all who wait: they get the program, or what went wrong."""
    try:
        program = make()
    except BaseException as error:
        return _fail(key, begun, error)
    with LOCK:
        if BEGUN.get(key) is begun:  # or else all were dropped meanwhile
            del BEGUN[key]
            PROGRAMS[key] = program
            _let_go()
    begun.set_result(program)


def _fail(key: Any, begun: Future[Compiled], error: BaseException) -> None:
    """Whoever asks next compiles it anew."""
    with LOCK:
        if BEGUN.get(key) is begun:
            del BEGUN[key]
    begun.set_exception(error)


def _let_go() -> None:
    """Drop programs that were used longest ago, until the others have room."""
    dropped = False
    while len(PROGRAMS) > LIMIT or (len(PROGRAMS) > 2 and _crowded()):
        oldest = next(iter(PROGRAMS))
        del PROGRAMS[oldest]
        oldest[0].clear_cache()  # jax holds its programs too; what is in PROGRAMS survives this
        dropped = True
    if dropped:
        trim()


def _crowded() -> bool:
    return sum(program.maps for program in PROGRAMS.values()) > HELD or maps() > MAPS


def trim() -> None:
    """Give back to the system what a compiler has left: as much again as its program takes, in pieces of the heap."""
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)


def maps() -> int:
    """Memory maps of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/maps", "rb") as lines:
            return sum(1 for _ in lines)
    except OSError:
        return 0


def ahead(function: Any, *args: Any, **static: Any) -> Future[Compiled]:
    """Begin to compile what `compiled` will be asked for, beside what this thread does; for one device.

    It is traced here, under this thread's settings. Of all arguments but the first the shapes are enough.

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
    """Runs nothing: a program begins to compile, and what it would give is shapes. How a flow goes through shapes."""
    ahead(function, *args, **static)
    return settled(jax.eval_shape(partial(function, **static), *args))


def beside_weights(args: tuple[Any, ...]) -> int:
    """Bytes of the device of a program's arguments that are not a model."""
    return sum(device_bytes(arg) for arg in args if not isinstance(arg, Params))


def caches(args: tuple[Any, ...]) -> int:
    """Bytes of the device of the caches among arguments, and of what decodes with them."""
    return sum(device_bytes(arg) for arg in args if isinstance(arg, Cache | Decoding))


@dataclass
class Cost:
    """Seconds spent compiling and running, the programs compiled, and bytes: those that programs hold beside arguments
    and results, and all but weights at the worst moment. over: the mesh that programs run on, if any. runs: False where
    they are only compiled, for arguments that are shapes."""

    compiling: float = 0.0
    running: float = 0.0
    programs: int = 0
    over: MeshPlan | None = None
    peak: int = 0
    temporary: int = 0
    runs: bool = True

    def run(self, flow: Any, *args: Any, **static: Any) -> Any:
        """What a flow gives, once it is there."""
        start, before = time.perf_counter(), self.compiling
        with told():
            out = jax.block_until_ready(self.begin(flow, *args, **static))
        self.running += time.perf_counter() - start - (self.compiling - before)
        return out

    def begin(self, flow: Any, *args: Any, **static: Any) -> Any:
        """What a flow will give."""
        if self._whole(args):
            return self._one(flow.whole, args, {name: static[name] for name in flow.static if name in static}, 0)
        held = caches(args)
        one = lambda function, *args, **static: self._one(function, args, static, held)  # noqa: E731
        return flow(*args, **static, run=one)

    def ahead(self, flow: Any, *args: Any, **static: Any) -> None:
        """Begin to compile what `begin` will run; not for a mesh, which waits."""
        if self.over is not None:
            return
        if self._whole(args):
            ahead(flow.whole, *args, **{name: static[name] for name in flow.static if name in static})
        else:
            flow(*args, **static, run=shaped)

    def _whole(self, args: tuple[Any, ...]) -> bool:
        return self.over is not None or kernels.native() != "xla" or _spread(args)

    def _one(self, function: Any, args: tuple[Any, ...], static: dict[str, Any], held: int) -> Any:
        """held: bytes of the whole cache, of which a program may be given a layer."""
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
    """Whether arguments lie on several devices."""
    first = jax.tree.leaves(args)[0]
    return isinstance(first, jax.Array) and len(first.sharding.device_set) > 1


def _key(function: Any, args: tuple[Any, ...], static: dict[str, Any], over: MeshPlan | None) -> Any:
    leaves, tree = jax.tree.flatten(args)
    return function, tree, tuple((x.shape, x.dtype) for x in leaves), over, tuple(static.items())


def _lowered(
    function: Any, args: tuple[Any, ...], static: dict[str, Any], over: MeshPlan | None
) -> tuple[jax.stages.Lowered, bool]:
    """The program before it is compiled, and whether the compiler chooses how its arguments lie."""
    free = over is not None or (hasattr(function, "free") and kernels.native() != "xla")
    if free:  # an array that lies somewhere has a layout, and would have to keep it
        args = settled(jax.eval_shape(lambda *x: x, *args))
    if over is not None:
        return over.lower(function, args, static), free
    if not free:
        return function.lower(*args, **static), free
    arrays, fixed = function.placed(args, static)
    return function.free.lower(*arrays, *fixed), free


def forget() -> None:
    """Drop all programs, such as those of a cache that will not be used again; the disk keeps them.

    All of this process: jax's own too, which grow with every shape, and those of other libraries.
    """
    with LOCK:
        PROGRAMS.clear()
        BEGUN.clear()
    jax.clear_caches()
    trim()


def use_disk_cache() -> None:
    """Keep compiled programs on disk between runs, where the user has not chosen a folder.

    Raises ValueError where JKV_PROGRAMS_GIB, the most that is kept of them, is no number.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        folder = cache_dir() / "programs"
        if jax.config.values["jax_enable_compilation_cache"]:
            compile_cache.tidy(folder, compile_cache.limit())
        jax.config.update("jax_compilation_cache_dir", str(folder))


def peak_bytes(program: Compiled) -> int:
    """Bytes that a program holds at its worst, by the compiler: arguments, results of their own, temporaries."""
    m = program.program.memory_analysis()
    if m is None:
        return 0
    results = m.output_size_in_bytes - m.alias_size_in_bytes
    return int(m.argument_size_in_bytes + results + m.temp_size_in_bytes)
