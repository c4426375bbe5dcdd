"""Hopper kernel (Pallas Mosaic GPU): codes go from memory to registers, are unpacked there and feed the tensor cores.

Logits are K @ q.T and outputs V.T @ P.T: the codes are always the left operand, which may lie in registers, so the few
query rows are padded to 8 instead of 64. Keys are read as they are stored, values slot-minor. XLA then stores a cache
carried through a loop slot-minor, and the transposition in front of the kernel costs nothing in the loop.

One program handles one head, some of its query rows and one part of its slots. Letters: n slots per tile, r query rows.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jkv.arrays.bitpacking import bits_of
from jkv.arrays.online_softmax import Partial
from jkv.kernels.decode_attention import gpu_operands as sides
from jkv.kernels.decode_attention import lengths, query_bounds, query_results, query_rows, unclear
from jkv.kernels.decode_attention.gpu_layout import plane, table_words
from jkv.kernels.decode_attention.gpu_operands import Form
from jkv.kernels.decode_attention.gpu_tile import Ops, Ref, columns, f32, i32, operand, plgpu, rows
from jkv.protocols import KernelCodes

FEW = 16 * 1024  # tiles of fewer bytes have 4 stages, others 2; both powers of two, because stages are counted modulo
PROCESSORS = 132  # multiprocessors of an H100 or H200 SXM, used if no GPU is present
SHARED = 227 * 1024  # bytes of shared memory per multiprocessor; each program takes 1024 more than it asks for
FILLING = 2  # startup time of a program, in tiles
UNSEEN = -1e30  # running maximum before any logit; finite, so that differences are not NaN


def supports(k: KernelCodes, v: KernelCodes, dim: int, queries: int, unit: int = 0) -> str | None:
    """Explain why the kernel does not support these codes; None if it does.

    Args:
        dim: Head dimension.
        queries: Query rows per kv head (G * T); any number is supported.
        unit: Slots per page, 0 without pages; see `tile_of`.
    """
    slots, tile = k.codes.shape[2], tile_of(v, unit)
    if dim not in (64, 128, 256):
        return f"head_dim={dim}; 64, 128 and 256 are"
    if slots % tile:
        return f"a capacity of {slots} slots; multiples of {tile} are"
    for name, x in (("keys", k), ("values", v)):
        if (reason := unsupported(x, dim, tile)) is not None:
            return f"{name} with {reason}"
    if v.step is not None and v.step.shape[2] != slots:
        return "values with steps shared by slots; steps of each slot are"
    return None


def tile_of(v: KernelCodes, unit: int = 0) -> int:
    """Return the number of slots per tile.

    It is larger if a slot of the values has 16 bytes, because each part of a folded tile has 64 slots, and smaller for
    256 channels, because a program's shared memory is limited.

    Args:
        unit: Slots per page, or 0. A smaller page is read with the whole tile around it, so tiles then have 64 slots,
            the fewest that the tensor cores take, unless they are folded.
    """
    dim = v.codes.shape[-1] * 8 // (v.bits or 8)
    width = dim * plane(v.bits) // 8 if v.bits else dim
    if width == 16:
        return 256
    return 64 if dim == 256 or (0 < unit < 128 and width >= 64) else 128


def unsupported(x: KernelCodes, dim: int, tile: int) -> str | None:
    if x.kept is not None:
        return f"{x.codes.shape[-1]} of {dim} channels; all are"
    if x.step is None:
        good = x.codes.dtype in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn)
        return None if good else f"{x.codes.dtype} floats; bfloat16, float16 and float8_e4m3fn are"
    if (why := unclear(x)) is not None:
        return why
    if x.bits not in (2, 3, 4, 8):
        return f"{x.bits} bits; 2, 3, 4 and 8 are"
    if x.bits == 3 and dim == 64:
        return "3 bits of 64 channels, 24 bytes, and copies go by 16; of 128 and 256 are"
    if x.table is not None and x.bits == 8:
        return "a table of 256 entries; of 4, 8 and 16 are"
    exponents = x.step.dtype == jnp.uint8
    for name, y in (("steps", None if exponents else x.step), ("lows", x.low)):
        if y is not None and y.dtype not in (jnp.bfloat16, jnp.float16):
            return f"{y.dtype} {name}; bfloat16 and float16 are"
    slots, steps, groups = x.codes.shape[2], *x.step.shape[2:]
    if steps == slots:
        most = 8 if x.bits == 2 and dim == 256 else 4  # registers limit wider codes
        good = groups in (1, 2, 4, 8) and groups <= most and dim // groups >= 16
        return None if good else f"{groups} channel groups; powers of 2 up to {most} are"
    grain = slots // steps
    if x.low is None:
        return f"{'exponents' if exponents else 'steps of a table'} shared by {grain} slots; those of each slot are"
    if groups != dim:
        return f"steps shared by {grain} slots and {dim // groups} channels; by one of both are"
    whole = grain >= 32 and (tile % grain == 0 or grain % tile == 0)
    return None if whole else f"groups of {grain} slots; 32, 64 and multiples of {tile} are"


def attention(
    q: Array,
    k: KernelCodes,
    v: KernelCodes,
    pos: Array,
    first: Array,
    last: Array,
    scale: float,
    ends: Array | None = None,
    *,
    tiles: Array | None = None,
    unit: int = 0,
    plain: bool = False,
    interpret: Any = None,
) -> Partial:
    """Compute attention, as the package describes.

    Args:
        unit: Slots of the pages in `tiles`; 0 without pages.
        plain: Whether to keep subnormal numbers away from the tensor cores.
        interpret: Parameters of the Pallas interpreter; None to compile for the GPU.

    Raises:
        ValueError: `supports` names the reason.
    """
    if (reason := supports(k, v, q.shape[-1], q.shape[2] * q.shape[3], unit)) is not None:
        raise ValueError(f"the gpu kernel of decode attention does not take {reason}")
    b, h, g, t, d = q.shape
    n = tile_of(v, unit)
    kf, vf = Form.both(k, v, d, n)
    rows = query_rows(q, most_rows(kf, vf)).astype(f32)
    chunks, r = rows.shape[1:3]
    bounds = query_bounds(first, last, g, chunks, r)
    flat = jax.tree.map(lambda x: x.reshape(b * h, *x.shape[2:]), (as_bytes(k), as_bytes(v)))
    ends = (lengths(pos) if ends is None else ends).reshape(-1)
    ops = Ops(interpret is not None, plain)
    once = [bounds, *sides.queries(kf, rows, scale, ops.unit(kf.bits, kf.table))]
    scales = [sides.scale_operands(form, x) for form, x in zip((kf, vf), flat, strict=True)]
    codes = [*sides.key_operands(kf, flat[0], rows, scale), *sides.value_operands(vf, flat[1])]
    places = [ends] if tiles is None else [ends, tiles.reshape(b * h, -1)]
    tables = [[] if x.table is None else [table_words(x.table)] for x in flat]
    call = kernel(kf, vf, (b, h, chunks), pos.shape, t, r, scale, ops, interpret)
    acc, m, l, low = call(places, tables, once, pos.reshape(-1, pos.shape[2]), scales, codes)  # noqa: E741
    part = join(sides.gather(vf, acc, low if vf.lows else None, ops.unit(vf.bits, vf.table)), m, l)
    return jax.tree.map(lambda x: query_results(x, q.shape), part)


def as_bytes(x: KernelCodes) -> KernelCodes:
    return replace(x, codes=bits_of(x.codes)) if x.codes.dtype == jnp.float8_e4m3fn else x


def most_rows(k: Form, v: Form) -> int:
    """Return how many query rows fit one program's registers. Further rows go to more programs, which hit L2."""
    light = k.groups == v.groups == k.grain == 1 and len(k.planes) == len(v.planes) == 1
    return 16 if light and v.tile == 128 else 8


def join(acc: Array, m: Array, l: Array) -> Partial:  # noqa: E741
    """Merge the splits of acc f32[N,chunks,splits,r,D], m (base 2) and l f32[N,chunks,splits,r] into one Partial."""
    top = m.max(2)
    share = jnp.exp2(m - top[:, :, None])
    total = (l * share).sum(2)
    return Partial(acc=(acc * share[..., None]).sum(2), m=jnp.where(total > 0, top * math.log(2), -jnp.inf), l=total)


@functools.cache
def processors() -> int:
    """Return the number of multiprocessors of the device, or of the GPU that programs are compiled for."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else PROCESSORS


def resident(k: Form, v: Form, r: int) -> int:
    """Return how many programs fit a multiprocessor, by shared memory and the registers of compiled programs."""
    plain = k.grain == k.groups == v.groups == 1 and not any(x.table or len(x.planes) > 1 for x in (k, v))
    light = r == 8 and plain and v.tile <= 128 and v.width < 256
    own = 2 * v.groups * r * v.tile + 4 * r * k.dim + (2 * k.units * r * k.dim if k.grain > 1 else 0)
    return max(1, min(3 if light else 2, SHARED // (stages(k, v) * tile_bytes(k, v, r) + own + 1024)))


def tile_bytes(k: Form, v: Form, r: int) -> int:
    """Return the shared memory per tile in bytes; steps and lows of slots are read directly into registers."""
    codes = sum(x.tile * sum(x.planes) * (1 if x.coded else 2) for x in (k, v))
    return codes + (k.units * (2 * k.dim + 4 * r) if k.grain > 1 else 0) + (0 if v.coded else 4 * v.tile)


def stages(k: Form, v: Form) -> int:
    """Return the number of tiles in flight, so that a multiprocessor always has 40 kB or more of loads outstanding."""
    return 2 if tile_bytes(k, v, 8) >= FEW else 4


def parts(programs: int, at_once: int, tiles: int) -> int:
    """Return the number of splits of each program's tiles that finishes first (the smallest one if several do).

    All programs take equally long and so run in waves; a partial last wave costs as much as a full one.

    Args:
        programs: Number of programs without splits.
        at_once: Number of programs that run concurrently.
        tiles: Number of tiles per program without splits.

    >>> parts(8, 396, 1024), parts(8, 132, 1024), parts(64, 396, 1024), parts(512, 396, 64), parts(8, 396, 8)
    (49, 16, 6, 3, 8)
    """

    def time(n: int) -> int:
        return -(-programs * n // at_once) * (-(-tiles // n) + FILLING)

    return min(range(1, tiles + 1), key=time)


def kernel(
    k: Form,
    v: Form,
    batch: tuple[int, int, int],
    pos: tuple[int, ...],
    t: int,
    r: int,
    scale: float,
    ops: Ops,
    interpret: Any,
) -> Any:
    """Build the kernel call of `program` over heads, splits and chunks of query rows; pos: the shape [B,Hs,C]."""
    b, h, chunks = batch
    splits = parts(b * h * chunks, processors() * resident(k, v, r), pos[2] // v.tile)
    lead = (b * h, chunks, splits)
    query, scratch = sides.query_memory(k, r)
    p_s = plgpu.SMEM((v.groups * v.fold * r, v.tile // v.fold), v.dtype, transforms=operand(v.tile // v.fold, v.dtype))
    height = max(v.width, 64)
    shapes = ((v.blocks, height, r), (r,), (r,), (v.groups, r))
    return plgpu.kernel(
        functools.partial(program, k, v, ops, h, pos[1], splits, t, scale),
        out_type=tuple(jax.ShapeDtypeStruct((*lead, *shape), f32) for shape in shapes),
        grid=(b * h, splits, chunks),
        grid_names=("head", "split", "chunk"),
        scratch_types=dict(
            once=[plgpu.SMEM((2, r), i32), *query],
            scratch=scratch,
            p_s=p_s,
            arrived=plgpu.Barrier(num_arrivals=1 + len(query)),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        interpret=interpret,
    )


def program(
    k: Form, v: Form, ops: Ops, heads: int, pos_heads: int, splits: int, new: int, scale: float,
    where_g: list[Ref], tables_g: list[list[Ref]], once_g: list[Ref], pos_g: Ref,
    scales_g: list[list[Ref]], codes_g: list[Ref], *out_g: Ref,
    once: list[Ref], scratch: list[Ref], p_s: Ref, arrived: Ref,
) -> None:  # fmt: skip
    """Attend one chunk of query rows to one split of a head's slots.

    Args:
        where_g: The ends i32[B*Hs] of the slots and, if tiles are listed, the list i32[B*H,U].
        tables_g: The `table_words` of keys and of values.
    """
    head, split, chunk = (lax.axis_index(name) for name in ("head", "split", "chunk"))
    ends_g, *places_g = where_g
    row = lax.div(head, heads)
    of_pos = head if pos_heads == heads else row
    # Load bounds and queries into shared memory, once per program.
    for source, target in zip([once_g[0].at[row], *(x.at[head] for x in once_g[1:])], once, strict=True):
        plgpu.copy_gmem_to_smem(source.at[chunk], target, arrived)
    plgpu.barrier_wait(arrived)
    r, every = once[0].shape[1], pos_g.shape[1] // v.tile
    # This split's share of the tiles with live slots.
    tiles = lax.div(ends_g[of_pos] + (v.tile - 1), v.tile)
    start, stop = (lax.div(tiles * (split + i), splits) for i in range(2))

    def bound(i: int, like: tuple[int, ...]) -> Array:
        """Return the first or last position that queries see; a scalar if there is one token."""
        return once[0][i, 0] if new == 1 else columns(ops.column(once[0].at[i]), like)

    def place(i: Array) -> Array:
        return places_g[0][head, start + i] if places_g else start + i

    def read(i: Array) -> tuple[Array, list[list[Array]]]:
        """Read positions, steps and lows of tile i directly into registers, because they are few bytes."""
        i = jnp.minimum(i, every - 1 - start)
        pos, at = ops.read(pos_g.at[of_pos, pl.ds((start + i) * v.tile, v.tile)], v.span), place(i) * v.tile
        some = [[x.at[head] for x in refs] for refs in scales_g]
        return pos, [sides.read_scales(ops, form, refs, at) for form, refs in zip((k, v), some, strict=True)]

    tables = [[ref[head, i] for ref in refs for i in range(ref.shape[1])] for refs in tables_g]
    of_keys, of_values = sides.key_blocks(k, r, head, chunk, place), sides.value_blocks(v, head, place)
    alive = [] if v.coded else [pl.BlockSpec((None, v.tile), lambda i: (of_pos, start + i))]

    ahead = v.tile <= 128  # prefetch those of the next tile, if registers are left

    def body(index: Any, *more: Any) -> Any:
        *sides_s, (held, m, l, low, acc) = more  # noqa: E741
        pos, scales = held if ahead else read(index[0])
        keys_s, values_s = sides_s[: len(of_keys)], sides_s[len(of_keys) :]
        pos = ops.as_row(pos, v.span)
        # Masked logits.
        s = sides.logits(ops, k, scale, keys_s, sides.scales_of(ops, k, scales[0]), tables[0], once[1:], scratch)
        at = rows(pos, s.shape)
        s = jnp.where((at >= bound(0, s.shape)) & (at <= bound(1, s.shape)), s, -jnp.inf)
        # Online softmax, with the steps of the values folded into the maximum.
        v_scales = sides.scales_of(ops, v, scales[1])
        top = jnp.maximum(m, sides.weighty(v, s, v_scales).max(0))
        fade = jnp.exp2(m - top)
        p = jnp.exp2(s - columns(top, s.shape))
        lows = sides.weigh(ops, v, p, pos, v_scales, p_s)
        mixed = sides.mix(ops, v, values_s, tables[1], p_s, r)
        # Prefetch the next tile's positions and steps.
        after = read(index[0] + 1) if ahead else ()
        plgpu.commit_smem()  # the loads of the codes must finish before a copy overwrites them

        def add(old: Array, new: Array) -> Array:
            return old * columns(fade, old.shape) + new

        return after, top, add(l, sides.folded_sum(p)), list(map(add, low, lows)), list(map(add, acc, mixed))

    # Run the pipeline over all tiles.
    none = ops.full((64, r), 0)
    lows = [none] * v.lows
    init = (
        read(jnp.int32(0)) if ahead else (),
        ops.full((r,), UNSEEN),
        none,
        lows,
        [ops.full((max(v.width, 64), r), 0)] * v.blocks,
    )
    loop = plgpu.emit_pipeline(
        body,
        grid=(stop - start,),
        in_specs=[*of_keys, *of_values, *alive],
        max_concurrent_steps=stages(k, v),
        init_carry=init,
    )
    _, m, l, low, acc = loop(*codes_g, *[pos_g] * len(alive))  # noqa: E741
    # Write this split's partial result.
    acc_g, m_g, l_g, low_g = (x.at[head, chunk, split] for x in out_g)
    m_g[...], l_g[...] = m, l.sum(0)
    for i, x in enumerate(low):
        low_g.at[i][...] = x.sum(0)
    for i, x in enumerate(acc):
        acc_g.at[i][...] = x
