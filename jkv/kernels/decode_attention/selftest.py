"""Self-test of the kernel on this device: `python -m jkv.kernels.decode_attention.selftest`.

It runs every format of codes at edge-case lengths, with NaN in all dead slots, and compares with float64 numpy; then
every format at 131,072 slots, where tile buffers wrap around and programs run in several waves. The bound is the
expected rounding error: six standard deviations of independent errors in the products' operands. A second run must give
the same bits.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jkv.kernels import cpu_library
from jkv.protocols import KernelCodes

SIGMAS = 6.0
SCALES: dict[str, Any] = dict.fromkeys(("gpu", "tpu", "cpu", "xla"), ml_dtypes.bfloat16)  # dtype of steps and lows
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3fn": 2.0**-11}  # e4m3 is multiplied as float16
LONG = 2**17  # slots
EXACT = 2.0**-18  # operands without rounding: error of float32 accumulation, which tensor cores truncate


@dataclass(frozen=True, kw_only=True)
class Side:
    """The format of keys or values in a test case.

    Attributes:
        bits: Bits per code; 0 for floats.
        groups: Groups of channels that share a step.
        grain: Slots that share a step.
        floats: dtype of floats.
        size: Smallest and largest log2 (approximate) of the range that the codes span.
        kept: Channels that a slot stores as floats, others being 0; 0 for all.
        table: Whether codes index a table.
        power: Whether steps are exponents.
    """

    bits: int
    groups: int = 1
    grain: int = 1
    floats: str = "bfloat16"
    size: tuple[int, int] = (0, 0)
    kept: int = 0
    table: bool = False
    power: bool = False

    def __str__(self) -> str:
        if not self.bits:
            return self.floats + f" of {self.kept} channels" * (self.kept > 0)
        name = "table" if self.table else "bfp" if self.power else "int"
        shared = f"/{self.grain} slots" if self.grain > 1 else f"/{self.groups}" * (self.groups > 1)
        low, high = self.size
        return f"{name}{self.bits}{shared}" + f" x 2**{low}..{high}" * (low != 0 or high != 0)


@dataclass(frozen=True, kw_only=True)
class Case:
    k: Side
    v: Side
    dim: int = 128
    group: int = 4  # query heads per kv head
    new: int = 1  # query tokens
    slots: int = 1024
    lengths: tuple[int, ...] = (1024, 700)  # per head: slots below this are live, except for holes
    rows: int = 1  # batch size; each row rotates the previous row's lengths by one head
    shared: bool = False  # one `pos` for all heads
    window: int = 0  # sliding window in positions; 0: all up to the query's own
    page: int = 0  # slots per page, of which each head picks some; 0: no pages

    def __str__(self) -> str:
        some = f"D={self.dim} G={self.group} T={self.new} C={self.slots} lengths={','.join(map(str, self.lengths))}"
        return (
            f"K {self.k} V {self.v} {some}"
            + " shared" * self.shared
            + f" B={self.rows}" * (self.rows > 1)
            + "".join(f" {name}={x}" for name in ("window", "page") if (x := getattr(self, name)))
        )


def forms() -> list[tuple[Side, Side]]:
    coded = [Side(bits=8), Side(bits=4), Side(bits=4, groups=4), Side(bits=2), Side(bits=2, groups=2)]
    floats = [Side(bits=0, floats=name) for name in ("bfloat16", "float16", "float8_e4m3fn")]
    some = [(x, x) for x in [*floats, *coded]]
    some += [(Side(bits=bits, grain=grain), Side(bits=bits, groups=2)) for bits, grain in ((2, 32), (4, 64), (8, 128))]
    some += [(Side(bits=4, grain=256), Side(bits=8)), (Side(bits=0), Side(bits=4)), (Side(bits=2), Side(bits=0))]
    return [*some, *others()]


def others() -> list[tuple[Side, Side]]:
    """Return the formats with 3 bits, with a table, and with exponents as steps."""
    threes = [Side(bits=3), Side(bits=3, groups=4), Side(bits=3, table=True), Side(bits=3, groups=4, power=True)]
    tables = [Side(bits=bits, table=True) for bits in (1, 2, 4)]
    powers = [Side(bits=bits, groups=groups, power=True) for bits, groups in ((2, 2), (4, 1), (4, 4), (8, 4))]
    some = [(x, x) for x in [*threes, *tables, *powers, Side(bits=4, groups=4, table=True)]]
    mixed = [(Side(bits=3, grain=32), Side(bits=3, groups=2)), (Side(bits=4, table=True), Side(bits=2, table=True))]
    return [*some, *mixed, (Side(bits=3, table=True), Side(bits=8)), (Side(bits=0), Side(bits=4, groups=4, power=True))]


def long(slots: int = LONG) -> Iterator[Case]:
    """Yield cases of every format with two rows of many slots, and of paging for one format."""
    for k, v in forms():
        yield Case(k=k, v=v, slots=slots, lengths=(slots, slots * 2 // 3), rows=2)
    yield Case(k=Side(bits=4), v=Side(bits=4), slots=slots, lengths=(slots, slots // 2), page=128, rows=2)


def cases(slots: int = 1024) -> Iterator[Case]:
    """Yield cases of every format, then all edge cases on one format."""
    ragged = (slots, slots * 2 // 3)
    for dim in (64, 128):
        for k, v in forms():
            yield Case(k=k, v=v, dim=dim, slots=slots, lengths=ragged)
    wide = [(x, x) for x in (Side(bits=0), Side(bits=8), Side(bits=4), Side(bits=2, groups=8))]
    for k, v in [*wide, (Side(bits=2, grain=32), Side(bits=2, groups=8))]:
        yield Case(k=k, v=v, dim=256, slots=slots, lengths=ragged)
    base = Case(k=Side(bits=4), v=Side(bits=4), slots=slots)
    yield replace(base, lengths=(0, slots, 1, slots - 1, 127, 128, 129))
    for group, new in ((1, 1), (8, 2), (4, 16), (7, 5)):
        yield replace(base, group=group, new=new, lengths=ragged)
    yield replace(base, k=Side(bits=2, grain=32), v=Side(bits=2, groups=4), group=5, new=4, lengths=ragged)
    yield replace(base, lengths=ragged, window=100, new=4)
    yield replace(base, lengths=(slots // 2,), shared=True)
    yield replace(base, lengths=ragged, rows=2)
    yield replace(base, lengths=(slots // 2,), shared=True, rows=2, new=2, window=200)
    yield replace(base, k=Side(bits=0), v=Side(bits=0), lengths=(0, 129))
    for size in ((15, 15), (-20, -20), (-20, 15)):  # beyond the range of float16
        yield replace(base, k=Side(bits=2, grain=32, size=size), v=Side(bits=2, groups=2, size=size), lengths=ragged)
    yield replace(base, k=Side(bits=8, size=(-20, 15)), v=Side(bits=8, size=(-20, 23)), lengths=ragged)
    for dim, counts in ((64, (20, 32)), (128, (39, 64))):
        k, v = (Side(bits=0, kept=x) for x in counts)
        yield replace(base, k=k, v=v, dim=dim, lengths=(0, *ragged))
    yield from paged(base)


def paged(base: Case) -> Iterator[Case]:
    """Yield variants of a case with pages smaller than a tile, of its size, and larger."""
    slots, floats, some = base.slots, Side(bits=0), Side(bits=0, kept=39)
    yield replace(base, page=16, lengths=(0, slots, slots * 2 // 3, 1, 129))
    yield replace(base, page=slots // 2, dim=64, new=2, window=slots // 2, lengths=(slots, slots // 2))
    yield replace(base, page=128, k=floats, v=floats, lengths=(slots,), shared=True)
    yield replace(base, page=128, lengths=(slots, slots * 2 // 3), rows=2)
    yield replace(base, page=16, k=some, v=some, group=8, lengths=(slots, slots * 2 // 3))
    yield replace(base, page=64, k=Side(bits=2, grain=32), v=Side(bits=2, groups=4), group=1, lengths=(slots, 300))


def codes(rng: Any, side: Side, dead: Any, dim: int, scales: Any) -> KernelCodes:
    """Return random codes [B,H,C,...] in numpy; slots that are dead bool[B,H,C] are filled with garbage or NaN."""
    b, h, c = dead.shape
    if not side.bits:
        normal = rng.normal(size=(b, h, c, side.kept or dim))
        floats: Any = np.where(dead[..., None], np.nan, normal).astype(side.floats)
        if not side.kept:
            return KernelCodes(codes=floats)
        kept: Any = np.packbits(rng.random((b, h, c, dim)).argsort(-1) < side.kept, -1, "little")
        kept[dead] = 255
        return KernelCodes(codes=floats, kept=kept)
    shape = (b, h, c // side.grain, dim if side.grain > 1 else side.groups)
    gone = dead.reshape(b, h, -1, side.grain).all(-1)
    packed: Any = rng.integers(0, 256, (b, h, c, dim * side.bits // 8), np.uint8)
    size = 2.0 ** rng.uniform(*side.size, shape)
    if side.power:
        exponents: Any = np.round(127 - side.bits + np.log2(size)).astype(np.uint8)
        exponents[gone] = 255
        return KernelCodes(codes=packed, step=exponents, bits=side.bits)
    span = rng.uniform(1, 4, shape) * size
    step: Any = (span / (1 if side.table else 2**side.bits - 1)).astype(scales)
    low: Any = (rng.normal(size=shape) * 0.3 * size - span / 2).astype(scales)
    step[gone] = low[gone] = np.nan
    if side.table:
        table: Any = np.sort(rng.uniform(-1, 1, (b, h, 2**side.bits))).astype(ml_dtypes.bfloat16)
        return KernelCodes(codes=packed, step=step, table=table, bits=side.bits)
    return KernelCodes(codes=packed, step=step, low=low, bits=side.bits)


def problem(case: Case, kernel: str, seed: int = 0) -> dict[str, Any]:
    """Return the kernel's arguments for a case, in numpy."""
    rng = np.random.default_rng(seed)
    b, h, c = case.rows, len(case.lengths), case.slots
    grain = max(case.k.grain, case.v.grain)
    lengths = np.stack([np.roll(case.lengths, i) for i in range(b)])
    live = np.arange(c) < lengths[..., None]
    hole = rng.random((b, h, c // grain)) < 0.1
    hole[..., -1] = False  # the last slot stays live, so that lengths are exact
    for at, length in np.ndenumerate(lengths):
        hole[(*at, max(0, length - 1) // grain)] = False
    live &= ~np.repeat(hole, grain, 2)
    place = np.stack([rng.permutation(c) for _ in range(b * h)]).reshape(b, h, c)  # shuffle positions among slots
    pos = np.where(live, place, -1).astype(np.int32)
    heads = 2 if case.shared else h
    pages = picks(rng, case, heads) if case.page else {}
    dead = unread(pos, **pages)
    dead = np.broadcast_to(dead, (b, heads, c))
    t = case.new
    last = np.sort(rng.integers(c // 2, c, (b, t)), 1).astype(np.int32)
    first = last - case.window + 1 if case.window else np.full_like(last, -3)  # dead slots are at -1
    scales = SCALES[kernel]
    return dict(
        q=rng.normal(size=(b, heads, case.group, t, case.dim)).astype(ml_dtypes.bfloat16),
        k=codes(rng, case.k, dead, case.dim, scales),
        v=codes(rng, case.v, dead, case.dim, scales),
        pos=pos,
        first=first,
        last=last,
        scale=case.dim**-0.5 * 2.0 ** -max(0, case.k.size[1]),  # with large logits a single value would dominate
        **pages,
    )


def picks(rng: Any, case: Case, heads: int) -> dict[str, Any]:
    """Return `pages` and `unit`: half of all pages per head in random order, and as many entries of -1."""
    count = case.slots // case.page
    pages = np.stack([rng.permutation(count) for _ in range(case.rows * heads)]).reshape(case.rows, heads, count)
    pages = np.where(np.arange(count) < count // 2, pages, -1).astype(np.int32)
    return dict(pages=rng.permuted(pages, axis=2), unit=case.page)


def unread(pos: np.ndarray, pages: np.ndarray | None = None, unit: int = 1) -> np.ndarray:
    """Return bool[1,H,C], the slots that must not be read: dead ones, and those of pages that were not picked."""
    if pages is None:
        return pos < 0
    return (pos < 0) | ~(np.arange(pos.shape[2])[:, None] // unit == pages[:, :, None]).any(-1)


def dense(x: Any, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Dequantize to float64[B,H,C,D]; also return the part above `low`, which the products round."""
    if x.step is None:
        floats = x.codes.astype(np.float64)
        if x.kept is not None:
            there = np.unpackbits(x.kept, -1, bitorder="little").astype(int)
            rank = np.minimum(np.cumsum(there, -1), floats.shape[-1]) - 1
            floats = np.where(there, np.take_along_axis(floats, np.maximum(rank, 0), -1), 0)
        return floats, floats
    code = unpacked(x.codes, x.bits)

    def wide(y: np.ndarray) -> np.ndarray:
        return np.repeat(np.repeat(y.astype(np.float64), code.shape[2] // y.shape[2], 2), dim // y.shape[3], 3)

    if x.table is not None:
        found = np.take_along_axis(x.table.astype(np.float64)[:, :, None], code, -1) * wide(x.step)
        return found, found
    if x.step.dtype == np.uint8:
        step = 2.0 ** (wide(x.step) - 127)
        return (code - 2 ** (x.bits - 1)) * step, code * step
    return code * wide(x.step) + wide(x.low), code * wide(x.step)


def unpacked(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unpack bytes into codes i64[...,D], field by field; of 3, 5 and 6 bits the lower two or four, then the rest."""
    if bits in (3, 5, 6):
        own = 2 if bits == 3 else 4
        low, high = np.split(codes, [codes.shape[-1] // bits * own], -1)
        return unpacked(low, own) + 2**own * unpacked(high, bits - own)
    fields = [(codes >> (bits * j)) & (2**bits - 1) for j in range(8 // bits)]
    return np.concatenate(fields, -1).astype(np.int64)


def truth(p: dict[str, Any], rounding: tuple[float, float], size: float = 1.0) -> dict[str, np.ndarray]:
    """Compute the expected result in float64, and error bounds for a kernel.

    Args:
        p: The kernel's arguments.
        rounding: Relative rounding error of the operands of K @ q and of V @ p.
        size: Scale of the values.

    Returns:
        The output [B,H,G,T,D], the log-sum-exp and visibility [B,H,G,T], and the bounds of the first two.
    """
    q, scale, dim = p["q"].astype(np.float64), p["scale"], p["q"].shape[-1]
    dead = unread(p["pos"], *(p[name] for name in ("pages", "unit") if name in p))
    pos, first, last = (
        np.where(dead, -1, p["pos"])[:, :, None],
        p["first"][:, None, :, None],
        p["last"][:, None, :, None],
    )
    dead = np.broadcast_to(dead, p["k"].codes.shape[:3])[..., None]
    (k, k_codes), (v, v_codes) = ([np.where(dead, 0, x) for x in dense(p[name], dim)] for name in ("k", "v"))
    see = (pos >= 0) & (pos >= first) & (pos <= last)
    if "until" in p:
        see = see & (p["until"][:, :, None] >= last)
    see = np.broadcast_to(see[:, :, None], (*q.shape[:4], pos.shape[-1]))
    seen = see.any(-1)
    s = np.where(see, np.einsum("bhgtd,bhsd->bhgts", q, k) * scale, -np.inf)
    top = np.where(seen, s.max(-1), 0)
    w = np.exp(s - top[..., None])
    total = np.where(seen, w.sum(-1), 1)
    w = w / total[..., None]
    out = np.einsum("bhgts,bhsd->bhgtd", w, v)

    logit = SIGMAS * rounding[0] * scale * np.sqrt(np.einsum("bhgtd,bhsd->bhgts", q**2, k**2 + k_codes**2))
    worst = np.where(see, logit, 0).max(-1)
    spread = np.sqrt(np.maximum(np.einsum("bhgts,bhsd->bhgtd", w, v**2) - out**2, 0))
    mixed = SIGMAS * rounding[1] * np.sqrt(np.einsum("bhgts,bhsd->bhgtd", w**2, v_codes**2))
    bounds = dict(out_bound=worst[..., None] * spread + mixed + 1e-5 * size, lse_bound=worst + 1e-5)
    return dict(out=out, lse=np.log(total) + top, seen=seen, **bounds)


def rounding(case: Case, kernel: str) -> tuple[float, float]:
    """Return the relative rounding error of the operands of K @ q and of V @ p."""
    if kernel in ("cpu", "xla"):  # in float32
        return EXACT, EXACT
    if kernel == "tpu":  # operands of two int8 rows with codes, bfloat16 with floats
        keys, values = (ROUNDING["float16" if x.bits else "bfloat16"] for x in (case.k, case.v))
        return keys, values
    keys = ROUNDING["float16"] if case.k.grain > 1 else EXACT  # a bfloat16 q is exact; q times a step is rounded
    return keys, ROUNDING["float16" if case.v.bits else case.v.floats]


def verdict(case: Case, p: dict[str, Any], part: Any, kernel: str) -> tuple[bool, str]:
    """Check the Partial of a case. Returns whether it is right, and the worst error with its bound."""
    return judged(truth(p, rounding(case, kernel), 2.0 ** case.v.size[1]), part)


def judged(t: dict[str, np.ndarray], part: Any) -> tuple[bool, str]:
    """Check a Partial against a result of `truth`. Returns whether it is right, and the worst error with its bound."""
    acc, m, l = (np.asarray(x, np.float64) for x in (part.acc, part.m, part.l))  # noqa: E741
    seen = t["seen"]
    silent = bool(((m == -np.inf) == ~seen).all() and (l[~seen] == 0).all() and (acc[~seen] == 0).all())
    some = np.where(seen, l, 1)
    out = np.abs(acc / some[..., None] - t["out"])
    lse = np.where(seen, np.abs(np.where(seen, m, 0) + np.log(some) - t["lse"]), 0)
    ratio = max((out / t["out_bound"]).max(), (lse / t["lse_bound"]).max())  # numpy's max propagates NaN
    good = silent and bool((out <= t["out_bound"]).all()) and bool((lse <= t["lse_bound"]).all())
    text = f"out {out.max():.1e} lse {lse.max():.1e}, {ratio:.2f} of the bound"
    return good, text + ("" if silent else "; a query that sees nothing is not m = -inf, l = 0, acc = 0")


def twice(run: Callable[[], Any]) -> tuple[Any, str]:
    """Run twice. Returns the first result, and an error message if the second one has other bits ("" if not)."""
    out = run()
    one, two = ([np.asarray(x).tobytes() for x in jax.tree.leaves(found)] for found in (out, run()))
    return out, "" if one == two else "; a second run gives other bits"


def run(
    case: Case, kernel: str, attention: Any, seed: int = 0, options: Any = None, again: bool = False
) -> tuple[bool, str]:
    """Check a kernel on a random problem.

    Args:
        options: Compiler options.
        again: Whether a second run must give the same bits.

    Returns:
        Whether the result is right, and the worst error with its bound.
    """
    p = problem(case, kernel, seed)
    static = {name: p[name] for name in ("scale", "unit") if name in p}
    arrays = jax.tree.map(jnp.asarray, {name: x for name, x in p.items() if name not in static})
    program = jax.jit(lambda a: attention(**a, **static), compiler_options=options)
    part, other = twice(lambda: program(arrays)) if again else (program(arrays), "")
    good, text = verdict(case, p, part, kernel)
    return good and not other, text + other


def module_of(case: Case, kernel: str) -> Any:
    return importlib.import_module(f"jkv.kernels.{'paged' if case.page else 'decode'}_attention.{kernel}")


def verdicts(kernel: str, every: Iterable[Case], seed: int = 0, plain: bool = False) -> Iterator[tuple[str, str]]:
    """Yield ("ok", "WRONG" or "refused", description) for each case; kernel "xla" checks the reference in float32."""
    for case in every:
        if kernel == "xla":
            oracle = module_of(case, "reference").attention
            attention, why = (lambda q, o=oracle, **kw: o(q.astype(jnp.float32), **kw)), None
        else:
            module, p = module_of(case, kernel), problem(case, kernel, seed)
            attention = (lambda m=module, **kw: m.attention(**kw, plain=True)) if plain else module.attention
            why = module.supports(p["k"], p["v"], case.dim, case.group * case.new, *([case.page] if case.page else []))
        good, text = (False, why) if why is not None else run(case, kernel, attention, seed, again=True)
        yield judgement(good, why), f"{case}: {text}"


def judgement(good: bool, why: str | None) -> str:
    return "refused" if why is not None else "ok" if good else "WRONG"


def print_verdicts(kernel: str, found: Iterable[tuple[str, str]]) -> int:
    """Print verdicts as they arrive, and return the exit code."""
    print(f"{kernel} kernel on {jax.devices()[0].device_kind}, jax {jax.__version__}")
    count = Counter[str]()
    for word, text in found:
        count[word] += 1
        print(f"{word:8} {text}", flush=True)
    print(f"{count['ok']} right, {count['WRONG']} wrong, {count['refused']} refused")
    return 1 if count["WRONG"] or not count["ok"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jkv.kernels.decode_attention.selftest", description=__doc__)
    parser.add_argument("--kernel", choices=("gpu", "tpu", "cpu"), default=jax.default_backend())
    parser.add_argument("--slots", type=int, default=1024, help="capacity, a multiple of 1024")
    parser.add_argument("--long", type=int, default=LONG, help="capacity of two rows of every form; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="gpu: no subnormal operands, to find where an error is")
    args = parser.parse_args()
    every = [*cases(args.slots), *(long(args.long) if args.long else [])]
    if args.kernel == "cpu":
        if (why := cpu_library.missing("decode_attention")) is not None:
            print(f"the cpu kernel {why}")
            return 2
        every = [case for case in every if not case.page]  # pages are gathered, and then read as a tier
    return print_verdicts(args.kernel, verdicts(args.kernel, every, args.seed, args.plain))


if __name__ == "__main__":
    sys.exit(main())
