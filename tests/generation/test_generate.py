"""The public functions: prompts of every kind, sampling, stops, receipts, and what they refuse."""

import mmap
import os
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache.padding import bucket
from jkv.core import compilation, decode_loop, layer_step
from jkv.generation.stop_strings import cut, hold
from jkv.prompts.tokenization import encode


@pytest.fixture(scope="module")
def params():
    return jkv.models.random(dict(jkv.models.TINY, hidden_size=64), 0, jnp.float32)


PROMPTS = [[(7 * i) % 97 for i in range(70)], [(11 * i) % 89 for i in range(41)]]
SAMPLED = dict(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2)


forward = jax.jit(jkv.models.forward)


def greedy(params, ids, n):
    """n tokens by running the whole model again for each: the truth that no cache has touched."""
    length = bucket(len(ids) + n)
    row = np.full((1, length), -1, np.int32)
    for _ in range(n):
        row[0, length - len(ids) :] = ids
        pos = jnp.asarray(np.where(row >= 0, np.cumsum(row >= 0, 1) - 1, -1))
        logits = forward(params, jnp.asarray(np.maximum(row, 0)), pos)
        ids = [*ids, int(logits[0, -1].argmax())]
    return ids[-n:]


def test_full_cache_equals_uncached_greedy(params):
    out = jkv.generate(params, None, PROMPTS[0], max_new_tokens=20, stop_ids=())
    assert out.tokens == greedy(params, PROMPTS[0], 20)


def test_rows_are_independent_of_batch(params):
    """Nor on whether other rows are drawn or greedy."""
    off = dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    rows = [{"seed": 5, **off}, {"seed": 9, **SAMPLED}]

    def tokens(which):
        settings = {k: [rows[i][k] for i in which] for k in rows[0]}
        prompts = [PROMPTS[i] for i in which]
        return jkv.generate(params, "h2o(budget=48)", prompts, max_new_tokens=24, stop_ids=(), **settings).tokens

    assert tokens([0, 1]) == tokens([0]) + tokens([1])


def test_seeds_change_samples(params):
    draws = {
        tuple(jkv.generate(params, None, PROMPTS[0], max_new_tokens=12, stop_ids=(), temperature=1.5, seed=s).tokens)
        for s in range(3)
    }
    assert len(draws) > 1


def test_stop_token_ends_only_its_row(params):
    free = jkv.generate(params, None, PROMPTS, max_new_tokens=20, stop_ids=(), temperature=1.5)
    stop = next(t for t in free.tokens[0] if t not in free.tokens[1])
    out = jkv.generate(params, None, PROMPTS, max_new_tokens=20, stop_ids=(stop,), temperature=1.5)
    assert out.tokens[0] == free.tokens[0][: free.tokens[0].index(stop) + 1]
    assert out.tokens[1] == free.tokens[1]


@pytest.mark.parametrize("draft", [None, "suffix"])
def test_ended_row_keeps_its_logits(params, draft):
    """Those of the row alone, in the result and at every look of `stop_fn`."""
    how = dict(max_new_tokens=40, temperature=1.5)
    free = jkv.generate(params, None, PROMPTS, stop_ids=(), seed=[0, 1], **how)
    stops = [free.tokens[0][4], free.tokens[1][21]]  # in the first block, and in the second
    seen = {}

    def run(which):
        def stop_fn(cache, logits, tokens):
            seen.setdefault(len(which), []).append(np.asarray(logits))
            return False

        prompts, seeds = [PROMPTS[i] for i in which], [(0, 1)[i] for i in which]
        return jkv.generate(params, None, prompts, stop_ids=stops, seed=seeds, stop_fn=stop_fn, drafter=draft, **how)

    both, alone = run([0, 1]), [run([i]) for i in range(2)]
    assert both.tokens == [x.tokens[0] for x in alone] and len(both.tokens[0]) <= 5 < 16 < len(both.tokens[1]) <= 22
    np.testing.assert_allclose(both.logits, np.concatenate([x.logits for x in alone]), atol=1e-5)
    assert seen[2] and all(np.abs(x[0] - alone[0].logits[0]).max() < 1e-5 for x in seen[2])


def test_stop_fn_ends_rows_between_blocks(params):
    asked, options = [], dict(max_new_tokens=20, stop_ids=())

    def stop_fn(cache, logits, tokens):
        asked.append((cache.seen.tolist(), np.asarray(logits).argmax(-1).tolist(), [len(t) for t in tokens]))
        return [len(tokens[0]) >= 16, False]

    free = jkv.generate(params, None, PROMPTS, **options).tokens
    out = jkv.generate(params, None, PROMPTS, stop_fn=stop_fn, **options)
    assert out.tokens == [free[0][:16], free[1]] and out.cache.seen.tolist() == [70 + 16, 41 + 20]
    assert asked[0] == ([70 + 16, 41 + 16], [t[16] for t in free], [16, 16]) and asked[1][2] == [16, 20]


def test_chunked_prefill_equals_one_pass(params):
    whole, want = jkv.prefill(params, "full", PROMPTS, reserve=64)
    parts, got = jkv.prefill(params, "full", PROMPTS, reserve=64, chunk=16)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert (parts.seen == whole.seen).all()


@pytest.mark.parametrize("tokens, room", [(100, 256), (500, 12), (512, 0)])
def test_default_reserve_is_bounded_by_context(params, tokens, room):
    cache, logits = jkv.prefill(params, None, [1] * tokens)
    assert cache.new == room and np.isfinite(np.asarray(logits)).all()


def test_relative_positions_reserve_past_context(params):
    assert jkv.prefill(params, "streaming(budget=40)", [1] * 500)[0].new == 256


def test_prompt_longer_than_context_is_refused(params):
    with pytest.raises(ValueError, match="513 in all; the model's context is 512"):
        jkv.prefill(params, None, [1] * 513)


def test_generate_leaves_cache_unchanged(params):
    cache, _ = jkv.prefill(params, "h2o(budget=48)", [PROMPTS[0]], reserve=128)
    first = jkv.generate(params, cache, [[3, 1, 4]], max_new_tokens=12, stop_ids=())
    again = jkv.generate(params, cache, [[3, 1, 4]], max_new_tokens=12, stop_ids=())
    assert first.tokens == again.tokens
    assert int(cache.seen[0]) == 70


class Letters:
    """A tokenizer: token t is the letter a + t % 26."""

    eos_ids, template = (), None

    def decode(self, ids, stop=()):
        return "".join(map(self.push, ids))

    def stream(self, stop=()):
        return self

    def push(self, token):
        return chr(97 + token % 26)

    def finish(self):
        return ""


@pytest.fixture
def calls(monkeypatch):
    """How many tokens each call of the decode loop was asked for in all."""
    asked = []

    begin = compilation.Cost.begin

    def counted(cost, flow, *args, **static):
        if flow is decode_loop.run_block:
            asked.append(int(args[-1]))
        return begin(cost, flow, *args, **static)

    monkeypatch.setattr(compilation.Cost, "begin", counted)
    return asked


@pytest.mark.parametrize("penalty", [1.0, 1.3], ids=["greedy", "penalized"])
def test_first_greedy_stream_token_precedes_decode_loop(params, calls, penalty):
    params = replace(params, tokenizer=Letters())
    options: dict = dict(max_new_tokens=20, stop_ids=(), repetition_penalty=penalty)
    want = jkv.generate(params, "h2o(budget=48)", PROMPTS[0], **options).text
    calls.clear()
    stream = jkv.stream(params, "h2o(budget=48)", PROMPTS[0], **options)
    first = next(stream)
    assert (first == want[0] and not calls) if penalty == 1 else calls
    assert first + "".join(stream) == want
    stop = want[:2]
    assert "".join(jkv.stream(params, "h2o(budget=48)", PROMPTS[0], stop=stop, **options)) == ""


@pytest.mark.parametrize("size", [1, 4, 60])
def test_first_completed_stop_string_ends_text_at_any_piece_size(size: int):
    text, stop = "0123456789" * 6, ("6789", "34567890123", "9")
    said, held = "", ""
    for i in range(0, len(text), size):
        held, ready = hold(held + text[i : i + size], stop)
        said += ready
        if any(s in held for s in stop):
            break
    assert said + cut(held, stop) == "012345"


@pytest.mark.parametrize("end", ["length", "stop text", "stop token"])
def test_stream_equals_generate(params, calls, end):
    params = replace(params, tokenizer=Letters())
    options: dict = dict(max_new_tokens=60, stop_ids=(), temperature=1.5)
    free = jkv.generate(params, "h2o(budget=48)", PROMPTS[0], **options)
    if end == "stop text":
        options["stop"] = (free.text[20:23],)
    if end == "stop token":
        options["stop_ids"] = (free.tokens[20],)
    want = jkv.generate(params, "h2o(budget=48)", PROMPTS[0], **options)
    calls.clear()
    pieces, stream, blocks = [], jkv.stream(params, "h2o(budget=48)", PROMPTS[0], **options), []
    try:
        while True:
            pieces.append(next(stream))
            blocks.append(len(calls))
    except StopIteration as over:
        got = over.value
    assert "".join(pieces) == got.text == want.text and got.tokens == want.tokens
    assert (want.tokens == free.tokens) == (end == "length")
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), got.cache, want.cache)))
    times = dict(
        prefill_s=0, decode_s=0, first_token_s=0, prefill_tokens_per_s=0, decode_tokens_per_s=0, compile_s=0, reading=""
    )  # which says how much memory is free
    assert replace(got.receipt, **times) == replace(want.receipt, **times)
    # a block ahead of the reader, where no text can end a row
    assert calls[:2] == [16, 32] and blocks[0] == (1 if end == "stop text" else 2)


def test_receipt_matches_cache(params):
    out = jkv.generate(params, "snapkv(budget=40, window=8)", PROMPTS[0], max_new_tokens=16, stop_ids=(), compare=True)
    report = out.receipt
    assert report.decode_tokens_per_s is None and "decode - tokens/s" in str(report)  # 16 are too few to tell
    again = jkv.generate(params, "snapkv(budget=40, window=8)", PROMPTS[0], max_new_tokens=64, stop_ids=()).receipt
    again = jkv.generate(params, "snapkv(budget=40, window=8)", PROMPTS[0], max_new_tokens=64, stop_ids=()).receipt
    assert again.compile_s == 0 and 0 < again.first_token_s < report.first_token_s
    assert again.prefill_tokens_per_s == pytest.approx(again.tokens_prompt / again.prefill_s)
    assert again.decode_tokens_per_s >= again.tokens_new / again.decode_s > 0
    assert report.bytes_kept == out.cache.nbytes == report.bytes_predicted
    assert max(map(max, report.tokens_kept)) <= 40 + 16
    assert report.kl is not None and report.kl > 0
    full = jkv.generate(params, "full", PROMPTS[0], max_new_tokens=16, stop_ids=(), compare=True)
    exact = full.receipt
    assert report.bytes_full == exact.bytes_full == full.cache.nbytes
    assert exact.kl == pytest.approx(0, abs=1e-6) and exact.divergence == -1


def test_compare_beyond_full_cache_context_is_refused(params):
    """With as much room as the context leaves, or refused before anything is read."""
    text, context = "streaming(budget=40)", params.config.context
    ask = dict(max_new_tokens=8, stop_ids=(), compare=True)
    assert jkv.generate(params, text, [3, 5] * (context // 2 - 4), **ask).receipt.kl > 0
    with pytest.raises(
        ValueError, match=f"compare: the full cache would take 2 tokens more than .* context of {context}"
    ):
        jkv.generate(params, text, [3, 5] * (context // 2 - 3), **ask)


@pytest.mark.parametrize("tokens", [9, 300])
def test_receipt_ratio_is_to_full_cache_of_same_reserve(params, tokens):
    """So the full cache is never smaller than itself, and what is larger is called so."""
    options: dict = dict(max_new_tokens=4, stop_ids=())
    for text in ("full", "int8", "snapkv(budget=48)"):
        report = jkv.generate(params, text, [3] * tokens, **options).receipt
        full = jkv.prefill(params, "full", [3] * tokens, reserve=64)[0].nbytes
        half = jkv.models.random(params.config, 0, jnp.bfloat16)
        assert report.bytes_full == full and report.dtype == "float32"
        assert report.bytes_bfloat16 == jkv.prefill(half, "full", [3] * tokens, reserve=64)[0].nbytes < full
        assert text != "full" or report.ratio == 1
        word = "smaller" if report.ratio >= 1 else "larger"
        half_word = "smaller" if report.ratio_bfloat16 >= 1 else "larger"
        line = next(x for x in str(report).splitlines() if x.startswith("bytes"))
        assert f"float32: {max(report.ratio, 1 / report.ratio):.1f}x {word}, " in line
        assert line.endswith(f"x {half_word} than in bfloat16")
        assert report.bytes_peak_decode >= report.bytes_kept and report.bytes_peak_prefill >= report.bytes_kept
        assert f"{report.bytes_peak_prefill:,} bytes while the prompt is read" in str(report)


@pytest.mark.slow
def test_prefill_peak_grows_with_prompt_and_falls_with_chunk(params):
    peak = lambda n, **o: jkv.generate(params, "knorm(budget=48)", [3] * n, max_new_tokens=4, **o).receipt  # noqa: E731
    short, whole, chunks = peak(64), peak(448), peak(448, chunk=64)
    assert chunks.bytes_peak_prefill < whole.bytes_peak_prefill > 2 * short.bytes_peak_prefill


def test_bytes_budget_is_a_ceiling(params):
    cache, _ = jkv.prefill(params, "knorm(bytes='60kB')", [PROMPTS[0] * 4], reserve=32)
    larger, _ = jkv.prefill(params, "knorm(bytes='80kB')", [PROMPTS[0] * 4], reserve=32)
    assert 50_000 < cache.nbytes <= 60_000 < larger.nbytes <= 80_000


def test_append_keeps_generated_tokens_beyond_budget(params):
    text = "snapkv(budget=40, window=8)"
    bounded = jkv.generate(params, text, PROMPTS[0], max_new_tokens=40, stop_ids=())
    grown = jkv.generate(params, text + " | append", PROMPTS[0], max_new_tokens=40, stop_ids=())
    assert bounded.cache.kept().max() <= 40 + 16
    assert grown.cache.kept().min() == 40 + 40


def test_streaming_decodes_past_context(params):
    out = jkv.generate(params, "streaming(budget=40)", PROMPTS[0], max_new_tokens=450, stop_ids=())
    assert 70 + len(out.tokens) == 520 > params.config.context
    longer = jkv.models.random(dict(jkv.models.TINY, hidden_size=64, max_position_embeddings=1024), 0, jnp.float32)
    want = jkv.generate(longer, "streaming(budget=40)", PROMPTS[0], max_new_tokens=450, stop_ids=())
    assert out.tokens == want.tokens
    np.testing.assert_allclose(out.logits, want.logits, atol=1e-5)


@pytest.fixture
def made(monkeypatch):
    """The names of the programs that are compiled from now on, and whether the main thread compiles them."""
    made, compiling = [], compilation.Compiled.__init__

    def init(self, lowered, free):
        name = lowered.compiler_ir().operation.attributes["sym_name"].value
        made.append((name.removeprefix("jit_"), threading.current_thread() is threading.main_thread()))
        compiling(self, lowered, free)

    monkeypatch.setattr(compilation.Compiled, "__init__", init)
    compilation.forget()
    return made


READS, DECODES = {"embedded", "attended", "flushed", "last_logits"}, {"going", "steps", "ripe", "flushed_due"}


@pytest.mark.parametrize(("spec", "beside"), [("h2o(budget=48)", READS | DECODES), ("cake(budget=48)", set())])
def test_decode_programs_compile_during_prefill(params, made, spec, beside):
    """Once, and where the cache's sizes are known before the prompt is read."""
    options: dict = dict(max_new_tokens=24, stop_ids=(), repetition_penalty=1.1)
    report = jkv.generate(params, spec, PROMPTS[0], **options).receipt
    assert {name for name, main in made if not main} == beside and {"steps", "flushed_due"} <= {
        name for name, _ in made
    }
    assert report.compile_s > 0
    before = len(made)
    again = jkv.generate(params, spec, PROMPTS[0], **options).receipt
    assert again.compile_s < 0.01 and len(made) == before


@pytest.mark.parametrize("spec", ["h2o(budget=48) | int4", "dapq(budget=48)", "full"])
def test_layers_of_one_kind_share_programs(made, spec):
    """A model of twice as many takes the programs of the first, but for its ends and for the one of steps."""
    for layers, names in ((3, {"attended", "steps", "flushed_due"}), (6, {"embedded", "last_logits", "steps"})):
        made.clear()
        params = jkv.models.random(jkv.models.TINY | dict(num_hidden_layers=layers))
        jkv.generate(params, spec, PROMPTS[0], max_new_tokens=24, stop_ids=())
        got = {name for name, _ in made}
        assert names <= got if layers == 3 else names == got


def test_prefill_programs_compile_before_decode_loop(monkeypatch):
    """The first token waits for no others."""
    begun, begin = [], compilation.ahead

    def ahead(function, *args, **static):
        begun.append(function)
        return begin(function, *args, **static)

    monkeypatch.setattr(compilation, "ahead", ahead)
    params = jkv.models.random(jkv.models.TINY)
    for spec in ("h2o(budget=48)", "dapq(budget=48)"):
        begun.clear()
        jkv.generate(params, spec, PROMPTS[0], max_new_tokens=24, stop_ids=())
        if spec.startswith("h2o"):
            assert (
                begun.index(layer_step.attended) < begun.index(decode_loop.last_logits) < begun.index(decode_loop.steps)
            )
        else:  # a prompt that stays uncompressed first has other programs
            assert layer_step.attended not in begun


def test_models_differing_in_tokenizer_share_programs(params, made):
    for first in (True, False):
        made.clear()
        out = jkv.generate(replace(params, tokenizer=Letters()), "h2o(budget=48)", PROMPTS[0], max_new_tokens=20)
        assert len(out.text) == len(out.tokens) and bool(made) == first


def test_native_kernels_use_one_program_per_phase(params, made, monkeypatch):
    """So that a tier keeps the layout that a kernel wants; with the tokens of layer by layer."""
    options: dict = dict(max_new_tokens=24, stop_ids=())
    want = jkv.generate(params, "h2o(budget=48) | int4", PROMPTS[0], **options).tokens
    made.clear()
    monkeypatch.setattr(compilation.kernels, "native", lambda: "gpu")
    assert jkv.generate(params, "h2o(budget=48) | int4", PROMPTS[0], **options).tokens == want
    assert sorted(made) == [("_run_blocks", False), ("prefill_own", False)]


def test_ahead_compilation_error_is_raised_at_use(monkeypatch):
    def init(self, lowered, free):
        raise MemoryError("no room for the program")

    monkeypatch.setattr(compilation.Compiled, "__init__", init)
    double = jax.jit(lambda x: 2 * x)
    compilation.ahead(double, np.ones(7, np.float32))
    with pytest.raises(MemoryError, match="no room"):
        compilation.compiled(double, np.ones(7, np.float32))
    monkeypatch.undo()
    assert compilation.compiled(double, np.ones(7, np.float32))[0](np.ones(7, np.float32)).sum() == 14


def test_ahead_compilation_uses_caller_jax_config():
    seen = []
    with jax.default_matmul_precision("highest"):
        compilation.ahead(jax.jit(lambda x: (seen.append(jax.config.jax_default_matmul_precision), x)[1]), np.ones(4))
    assert seen == ["highest"]


def test_least_recently_used_program_is_evicted(monkeypatch):
    def alive():
        return len(jax.devices()[0].client.live_executables())

    def run(n):
        program, seconds = compilation.compiled(double, np.ones(n, np.float32))
        return np.asarray(program(np.ones(n, np.float32))).sum() == 2 * n and seconds > 0

    double = jax.jit(lambda x: 2 * x)
    monkeypatch.setattr(compilation, "LIMIT", 2)
    monkeypatch.setattr(compilation, "PROGRAMS", {})
    monkeypatch.setattr(compilation, "BEGUN", {})  # what an earlier test began in the background is dropped
    assert run(1) and run(2)
    before = alive()
    assert not run(1) and run(3)  # 2 makes room
    assert alive() == before
    assert not run(1) and not run(3) and run(2)


def test_programs_are_evicted_before_memory_maps_run_out(monkeypatch):
    double = jax.jit(lambda x: 2 * x)
    monkeypatch.setattr(compilation, "MAPS", 24)
    monkeypatch.setattr(compilation, "PROGRAMS", {})
    monkeypatch.setattr(compilation, "BEGUN", {})  # what an earlier test began in the background is dropped
    monkeypatch.setattr(compilation, "maps", lambda: 5 * len(compilation.PROGRAMS))
    for n in range(1, 5):
        compilation.compiled(double, np.ones(n, np.float32))
    assert len(compilation.PROGRAMS) == 4
    compilation.compiled(double, np.ones(5, np.float32))  # at 25
    assert [key[2][0][0] for key in compilation.PROGRAMS] == [(2,), (3,), (4,), (5,)]
    monkeypatch.setattr(compilation, "maps", lambda: 99)
    compilation.compiled(double, np.ones(5, np.float32))  # nothing new was compiled
    assert len(compilation.PROGRAMS) == 4
    compilation.compiled(double, np.ones(7, np.float32))
    assert len(compilation.PROGRAMS) == 2  # a prompt's and a loop's always stay


def test_program_memory_is_bounded(monkeypatch):
    """Twenty programs in turn, each a map: those of a few are there, and those that are not needed are really gone."""
    live = lambda: len(jax.devices()[0].client.live_executables())  # noqa: E731
    double = jax.jit(lambda x: 2 * x)
    monkeypatch.setattr(compilation, "PROGRAMS", {})
    monkeypatch.setattr(compilation, "BEGUN", {})  # what an earlier test began in the background is dropped
    monkeypatch.setattr(compilation, "maps", live)
    monkeypatch.setattr(compilation, "MAPS", 10_000)
    monkeypatch.setattr(compilation, "HELD", 4)
    before, most = live(), 0
    for n in range(1, 21):
        program, seconds = compilation.compiled(double, np.ones(n, np.float32))
        assert program.maps == 1 and seconds
        most = max(most, live() - before)
    assert most <= 5 and len(compilation.PROGRAMS) == 4  # a new one is there before an old one goes


def test_forget_frees_all_programs():
    """Caches tried one after the other: no program of any of them stays, jax's own small ones included."""
    live = lambda: len(jax.devices()[0].client.live_executables())  # noqa: E731
    one = jkv.models.random(dict(jkv.models.TINY, num_hidden_layers=1), 0, jnp.float32)
    left = []
    for text in ("full", "int8", "streaming(budget=40)", "knorm(budget=40)", "knorm(budget=50)"):
        jkv.prefill(one, text, PROMPTS[0])
        compilation.forget()
        left.append(live())
    assert len(set(left)) == 1


def test_memory_maps_are_counted():
    if not os.path.exists("/proc/self/maps"):
        assert compilation.maps() == 0
        return
    before = compilation.maps()
    held = [mmap.mmap(-1, 4096, prot=mmap.PROT_READ | (mmap.PROT_WRITE if i % 2 else 0)) for i in range(100)]
    assert compilation.maps() > before + 50 and len(held) == 100  # neighbours that are alike are one


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ("", "without a tokenizer"),
        ([[]], "prompt 0 is empty"),
        ([[1, 100]], "the model knows 0 to 99"),
        ([-1, 2], "the model knows 0 to 99"),
    ],
)
def test_invalid_prompts_are_refused(params, prompt, message):
    with pytest.raises(ValueError, match=message):
        encode(params, prompt)


@pytest.mark.parametrize(
    ("cache", "options", "message"),
    [
        (None, dict(max_new_tokens=0), "at least one"),
        (None, dict(max_new_tokens=500), "the model's context is 512"),
        (None, dict(temperature=-1.0), "temperature=-1.0"),
        (None, dict(top_p=-0.5), "top_p=-0.5"),
        (None, dict(seed=[1, 2]), "2 numbers for 1 rows"),
        ("h2o(budget=0)", {}, "budget=0"),
        ("h2o(budget=-3)", {}, "budget=-3"),
        ("h2o(budget=10)", {}, "fewer than the 17"),
        ("h2o(budget=4096)", {}, "more than the model's context of 512"),
        ("h2o(keep=1.5)", {}, "keep=1.5"),
        ("h2o(bytes='many')", {}, "bytes='many'"),
        ("knorm(bytes='1kB')", {}, "the smallest cache here"),
        ("h2o(budget=40)", dict(chunk=16), "prefill in one piece"),
        ("full", dict(chunk=-1), "chunk=-1"),
    ],
)
def test_invalid_settings_are_refused(params, cache, options, message):
    with pytest.raises(ValueError, match=message):
        jkv.generate(params, cache, PROMPTS[0], **options)
