"""Compositions by text: they round-trip, any two that may go together do, and what cannot be is refused by name."""

import inspect
import re
import runpy
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.attention.evidence import QUERIES
from jkv.cache.cache import Counts, Observation
from jkv.cache.empty import empty_layer
from jkv.core.decode_loop import prefill_own
from jkv.core.deferred_prefill import compress, probe, statistics
from jkv.core.flush import flush
from jkv.generation import receipt
from jkv.methods import METHODS, pairs, parse
from jkv.methods.compatibility import check
from jkv.methods.config import resolve
from jkv.methods.kvpress_names import PRESSES, kvpress_error
from jkv.prompts.allocation import CacheShape
from jkv.prompts.tokenization import reaching
from jkv.protocols import LayerSize, Sizes
from support import rig

MODEL, L = rig.MODEL, rig.L
PAIRS = pairs(MODEL)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_says_what_it_is(name):
    method = METHODS[name]
    assert method.summary and method.exactness and method.paper and method.axes
    assert bool(method.claim) == (method.paper != "-" or name == "arkv")  # a paper without a number
    assert method.parts or {*method.axes} <= {"pooled", "append", "steps", "layers", "predicted_sinks"}
    assert all(method.parts.values())


@pytest.mark.parametrize("name", sorted(rig.CASES))
def test_full_is_neutral_in_compositions(name):
    """What it fills are defaults: `snapkv(budget=512) | full` evicts as `snapkv(budget=512)` does."""
    text = rig.CASES[name][0].tight
    plain, *both = (replace(parse(x), name="", exactness="") for x in (text, f"{text} | full", f"full | {text}"))
    for other in both:
        assert jax.tree.structure(other) == jax.tree.structure(plain)
        jax.tree.map(np.testing.assert_array_equal, other, plain)


@pytest.mark.parametrize(
    "text",
    [
        "full",
        "snapkv(budget=512, window=16) | int4",
        "quest(pages=8) | int8",
        "h2o(keep=0.25, recent=8) | kivi(bits=4)",
    ],
)
def test_text_round_trips(text):
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


def test_methods_accept_schedule_and_kernels():
    config = parse("int8(chunk=512, kernels='xla', recent=7)")
    assert (config.chunk, config.kernels, config.recent) == (512, "xla", 7)
    with pytest.raises(ValueError, match="one of auto, xla, tpu, gpu"):
        check(parse("int8(kernels='xpu')"), MODEL)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snapvk(budget=512)", "did you mean 'snapkv'"),
        ("nothing_like_it_at_all", "see `jkv methods`"),
        ("snapkv(buget=512)", "did you mean 'budget'"),
        ("snapkv(512)", "name\\(argument=value\\)"),
        ("snapkv(budget=", "cannot read"),
        ("", "'full' keeps every token"),
        ("int8 | ", "a method is missing"),
        ("none", "did you mean 'full'"),
        ("int2", r"did you mean 'kivi\(bits=2\)'"),
        ("h2o(budget=40, sinks=2), int4", r"joined by \|, as in 'h2o\(budget=40, sinks=2\) \| int4'"),
        ("int4 + h2o(budget=40)", r"joined by \|, as in 'int4 \| h2o\(budget=40\)'"),
        ("snapkv(compression_ratio=0.75)", r"write keep=0.25 \(keep = 1 - compression_ratio\)"),
        ("SnapKVPress(compression_ratio=0.75)", r"kvpress: write snapkv\(keep=0.25\)"),
        ("AdaKVPress(ExpectedAttentionPress(0.75))", r"write expected_attention\(keep=0.25\) \| pooled"),
        ("snapkv", "snapkv: give exactly one of"),
        ("snapkv(budget=9, keep=0.5)", "exactly one of"),
        ("snapkv(budget=9, budget=8)", "gives an argument twice"),
        ("snapkv(budget=True)", "budget=True: a number of tokens"),
        ("snapkv(keep=True)", "keep=True: the fraction of tokens"),
        ("snapkv(budget=print(1))", "plain numbers"),
        ("snapkv(budget='9')", "budget='9'"),
        ("snapkv(budget=512) | h2o(budget=512)", "snapkv and h2o both fill the axis 'score'"),
        ("int8 | int4", "int8 and int4 both fill the axis 'codec'"),
        ("rpc | append", "rpc and append both fill the axis 'append'"),
        ("a2sf(budget=64, decay=1)", "below 1"),
        ("lazyeviction(budget=64, window=64)", "must exceed its window of 64 tokens"),
        ("kvcrush(budget=64, share=2)", "from 0 to 1"),
        ("treekv(budget=64, share=0)", "above 0"),
        ("kvmerger(budget=64, alone=2)", "from 0 to 1"),
        ("windowkv(budget=64, task='x')", "'qa' looks for a place"),
        ("rpc(share=1)", "below 1"),
        ("critic(attention=0, entropy=0, gradient=0)", "one above 0"),
        ("critic(keep=0)", "above 0"),
        ("__import__('os').system('id')", "cannot read"),
    ],
)
def test_invalid_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_names_are_read_in_any_case():
    assert str(parse("SnapKV(budget=512) | INT4")) == "snapkv(budget=512) | int4"


@pytest.mark.parametrize("press", PRESSES)
def test_a_press_of_kvpress_is_answered_by_a_composition_that_is_read(press):
    answer = kvpress_error(f"{press}(compression_ratio=0.25)")
    assert answer is not None and parse(answer.split("write ")[1].split(" (keep =")[0])
    assert kvpress_error(f"{press.lower()}(0.25)") == answer


FOLDERS: dict[str, dict[str, Any]] = {
    "attentionpredictor": {"dense_layers": 0, "predictor": rig.PREDICTOR},
    "compresskv": {"heads": rig.FINDERS},
    "razorattention": {"heads": rig.KEEPERS},
    "trimkv": {"gate": rig.GATE},
    "retrieval": {"gate": rig.GATE, "heads": rig.FINDERS},
    "makeeach": {"gate": rig.DEEP},
    "locret": {"gate": rig.ESTIMATES},
    "lococo": {"gate": rig.MIXTURES},
    "dms": {"gate": rig.SWITCH},
    "attentiongate": {"gate": rig.LOOK},
    "ksort": {"moments": rig.MOMENTS},
    "matryoshkakv": {"keys": 0.5, "moments": rig.MOMENTS},
    "palu": {"moments": rig.MOMENTS},
    "kvheads": {"moments": rig.MOMENTS},
    "cskv": {"moments": rig.MOMENTS},
    "qfilters": {"queries": rig.QUERIES},
    "triattention": {"queries": rig.QUERIES},
    "think": {"queries": rig.QUERIES},
    "kvtc": {"sensitivity": rig.SENSITIVITY},
    "kvquant": {"sensitivity": rig.SENSITIVITY},
    "kvzap": {"gate": rig.ZAP},
    "utility": {"gate": rig.WORTH},
    "fastkvzip": {"gate": rig.SINKS},
    "fasa": {"channels": rig.CHANNELS, "pairs": 3},
    "infinigen": {"channels": rig.CHANNELS, "directions": 4},
    "duoattention": {"heads": rig.DUO},
    "planned": {"plan": rig.PLAN},
    "s3attention": {"gate": rig.FEATURES},
}


@pytest.mark.parametrize("name", sorted(set(METHODS) - rig.AROUND))
def test_every_method_reads_a_prompt_longer_than_a_tile_of_queries_at_its_defaults(name):
    """Traced, one piece of a prompt after another: what a score asks of many queries is never one tile of them."""
    given = ["budget=512"] if "budget" in METHODS[name].arguments else []
    given += [f"{argument}={folder!r}" for argument, folder in FOLDERS.get(name, {}).items()]
    config = parse(f"{name}({', '.join(given)})").bound(rig.PARAMS)
    length, model = 10 * QUERIES, replace(reaching(MODEL, 20 * QUERIES), context=20 * QUERIES)
    params = replace(rig.PARAMS, config=model)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    once = partial(prefill_own, fresh=True)
    shape = CacheShape(config, model, 1, length + 40, 40, jnp.float32)
    if not config.prefill.traits.defers:
        cache, _ = jax.eval_shape(once, params, shape.empty(), ids)
    else:
        full = CacheShape(config.uncompressed(length), model, 1, length, 0, jnp.float32).empty()
        full, _ = jax.eval_shape(once, params, full, ids)
        by = config.prefill.probe
        for part in by.texts(params, [[5] * 300], lambda *_: [[7] * 40]) if by else ():
            given = (jax.ShapeDtypeStruct((1, n), jnp.int32) for n in (len(part.ids[0]), 2))
            full = jax.eval_shape(probe, params, full, *given, by)
        if config.budget.statistic:
            jax.eval_shape(partial(statistics, ranks=config.budget.statistic == "ranks"), full)
            shape = replace(shape, sizes=Sizes(layers=(LayerSize(tokens=512, first=(0, 0)),) * L))
        cache = jax.eval_shape(compress, shape.empty(), full)
    if config.splits:
        cache, _ = jax.eval_shape(prefill_own, params, cache, ids)
    assert jax.tree.structure(cache) == jax.tree.structure(shape.empty())


def test_a_config_can_chunk_where_check_accepts_chunks():
    for case in rig.ALL:
        config, model = case.config.bound(case.params), case.params.config
        check(config, model)
        refused = pytest.raises(ValueError, match="chunk=64|in one piece")
        with nullcontext() if config.can_chunk else refused:
            check(config, model, 64)


@pytest.mark.slow  # some 150 prompts are traced
@pytest.mark.parametrize("name", sorted(METHODS))
def test_minimum_integer_arguments_prefill_or_are_refused(name):
    parameters = inspect.signature(METHODS[name].make).parameters.values()
    for argument in (p for p in parameters if p.annotation in ("int", "int | None", "Positive")):
        given = ({"budget": 64} if METHODS[name].sized else {}) | FOLDERS.get(name, {})
        given[argument.name] = int(argument.annotation == "Positive")
        try:
            text = f"{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})"
            config = parse(f"quest | {text}" if name in rig.AROUND else text).bound(rig.PARAMS)
            check(config, MODEL)
            plan = resolve(config, MODEL, 400, 100)
        except ValueError as refused:
            assert re.search(f"({argument.name}|block|bits|mantissa)'?[=:] ?[01]|the 1 of", str(refused)), refused
            continue
        held = config.uncompressed(300) if config.prefill.traits.defers else config
        cache = CacheShape(held, MODEL, 1, 400, 100, jnp.float32).empty()
        ids = jax.ShapeDtypeStruct((1, 300), jnp.int32)
        after, _ = jax.eval_shape(partial(prefill_own, fresh=True), rig.PARAMS, cache, ids)
        assert jax.tree.structure(after) == jax.tree.structure(cache) and len(plan) == L


@pytest.mark.slow  # some 700 flushes are traced
@pytest.mark.parametrize("name", dict.fromkeys(a for a, _ in PAIRS))
def test_flush_of_compatible_pairs_preserves_layer_structure(name):
    given = ["budget=2048"] if "budget" in METHODS[name].arguments else []
    given += [f"{argument}={folder!r}" for argument, folder in FOLDERS.get(name, {}).items()]
    admitted = [b for (a, b), why in PAIRS.items() if a == name and not why]
    for other in admitted:
        trained = ", ".join(f"{argument}={x!r}" for argument, x in FOLDERS.get(other, {}).items())
        plan = resolve(parse(f"{name}({', '.join(given)}) | {other}({trained})"), MODEL, 4096, 40)[1]
        layer = jax.eval_shape(lambda plan=plan: empty_layer(plan, 1, MODEL, jnp.float32))

        def flushed(layer, counts, plan=plan):
            n, queries = plan.needs.queries, layer.queries
            kept = queries.newest(n) if n else None
            new = queries.newest(plan.block) if plan.needs.new else None
            asked = Observation(kept=kept, new=new)
            return flush(layer, layer.recent, asked, counts, plan, MODEL.attending(1), lower=layer)

        number = jax.ShapeDtypeStruct((1,), jnp.int32)
        after = jax.eval_shape(flushed, layer, Counts(seen=number, prompt=number, later=number))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), layer)


CODECS = {"int8": "int8", "int4": "int4(group=0)", "kivi": rig.KIVI_TEXT, "mustafar": "mustafar(recent=8)"}
CODED = [
    f"{rig.CASES[a][0].tight.split(' | ')[0]} | {CODECS[b]}" for (a, b), why in PAIRS.items() if not why and b in CODECS
]


# The codecs take turns, so that each meets a part of the methods: all together would take a quarter of an hour.
@pytest.mark.slow
@pytest.mark.parametrize("text", CODED[:: len(CODECS) + 1], ids=lambda text: text.replace(rig.FOLDER.name, "tiny"))
def test_compatible_pairs_generate(text):
    out = jkv.generate(rig.PARAMS, text, list(range(3, 93)), max_new_tokens=40, compare=True)  # two flushes
    assert out.receipt.config == text and len(out.tokens) == 40
    assert out.receipt.bytes_kept == out.receipt.bytes_predicted
    assert 0 < out.receipt.kl < 2  # of a model whose logits are far from even


@pytest.mark.slow
def test_receipts_name_kernels_of_every_composition():
    for case in [*rig.ALL, *rig.OTHERS]:
        cache = rig.empty(case.tight, params=case.params)
        assert receipt.kernels_of(cache) == "xla" and receipt.kernels_off(cache) == "", case
        assert all(bits >= 0 for bits in receipt.tier_bits(cache)), case


@pytest.mark.parametrize(
    "text, why",
    [
        ("quest(page=0)", "quest: page=0: a whole number, 1 or more"),
        ("quest(pages=2.5)", "quest: pages=2.5: a whole number, 1 or more"),
        ("svdq(heads=-1)", "svdq: heads=-1: a whole number, 0 or more"),
        ("svdq(bits=4)", r"svdq: bits=4: several, as \(4, 4\)"),
        ("random(budget=32, seed='a')", "random: seed='a': a whole number, 0 or more"),
        ("random(budget=32, seed=4294967296)", "random: seed=4294967296: a whole number below 2"),
        ("h2o(keep='a')", "keep='a': the fraction of tokens"),
        ("h2o(budget=99999999999)", "budget=99999999999: a number of tokens, 1 or more and below 2"),
        ("h2o(budget=32, newest='half')", "h2o: newest='half': a number"),
    ],
)
def test_invalid_argument_values_are_refused(text, why):
    with pytest.raises(ValueError, match=why):
        check(parse(text), MODEL)


def test_incompatible_pairs_state_reason():
    refused = {pair: why for pair, why in PAIRS.items() if why}
    reading = {
        "quest",
        "attentionpredictor",
        "alisa",
        "tokenselect",
        "fasa",
        "infinigen",
        "loopserve",
        "lrqk",
        "icecache",
        "triforce",
    }
    assert {b for a, b in refused if a == "lacache"} == reading | {"nsnquant"}
    assert "every tier of this method has its own codecs" in refused["zipvl", "int8"]
    assert "relative positions move keys" in refused["streaming", "quest"]
    assert "kivi" not in {b for a, b in refused if a == "snapkv"}
    nature = re.compile("compete for one pool|both fill the axis 'select'")  # it has no heads of its own; one selects
    assert len([why for why in refused.values() if not nature.search(why)]) < len(PAIRS) / 10
    check(parse("streaming(budget=256, relative=False) | quest"), MODEL)  # the way out


def test_methods_page_matches_catalogue():
    page = Path(__file__).parent.parent / "docs" / "methods.md"
    made = runpy.run_path(str(page.with_suffix(".py")))
    assert page.read_text() == made["table"]() + made["refused"](), "run: make docs"


TABLES = runpy.run_path(str(Path(__file__).parent.parent / "docs" / "tables.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES["TABLES"])
def test_tables_match_results(name: str):
    root = Path(__file__).parent.parent
    assert TABLES["filled"](name) == (root / name).read_text(), "run: make docs"
    assert (root / "README.md").read_text().count("\n") <= 130
