"""S3-Attention: features, rare features, BM25 and spans, beside plain Python and float64 numpy; folders."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.core.compilation import Cost
from jkv.io import trained_weights
from jkv.io.errors import FormatError
from jkv.io.trained_weights import trained
from jkv.methods import parse
from jkv.methods.prefill.prompt_compression import PromptCompression
from jkv.methods.prefill.s3attention import Dictionary, Featured, relevance
from jkv.methods.prefill.spans import bm25, disjoint, scaled, sums
from jkv.prompts.prefill import PrefillRunner
from support import rig
from support.rig import BUDGET, FEATURES, LENGTHS, PARAMS, PROMPT
from support.tiny import LATENT, D, H, L

ROWS = [row[row >= 0].tolist() for row in PROMPT]
RNG = np.random.default_rng(0)
RELEVANCE = jax.jit(relevance)


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def head(basis: np.ndarray, active: int = D) -> Dictionary:
    """A head whose features are the axes of a basis, as many as channels."""
    axes, zero = jnp.asarray(basis, jnp.float32), jnp.zeros((2, D))
    return Dictionary(encode=axes, decode=axes, centre=zero, bias=zero, layers=(0,), active=active)


def turned(active: int = D) -> Dictionary:
    """Of a basis that is turned at random."""
    return head(np.linalg.qr(RNG.normal(size=(D, D)))[0], active)


def seen(own: Dictionary, k: np.ndarray, q: np.ndarray) -> np.ndarray:
    """What the tokens of k are worth to those of q, all of which count."""
    return np.asarray(RELEVANCE(own, *map(jnp.float32, (k, q)), np.ones(len(k), bool), np.ones(len(q), bool)))


def test_relevance_sums_products_of_all_features():
    own, k, q = turned(), RNG.normal(size=(20, D)), RNG.normal(size=(5, D))
    z, asked = (relu(x @ np.asarray(own.encode, np.float64).T) for x in (k, q))
    rare = np.log(20 / (z > 0).sum(0))
    want = [sum(rare[f] * a[f] * b[f] for a in asked for f in range(D)) for b in z]
    np.testing.assert_allclose(seen(own, k, q), want, rtol=1e-4)


def test_only_largest_features_count():
    own, k, q = turned(3), RNG.normal(size=(20, D)), RNG.normal(size=(5, D))
    z, asked = (relu(x @ np.asarray(own.encode, np.float64).T) for x in (k, q))
    for x in (z, asked):
        np.put_along_axis(x, np.argsort(x, 1)[:, :-3], 0, 1)
    want = z @ (asked.sum(0) * np.log(20 / np.maximum((z > 0).sum(0), 1)))
    np.testing.assert_allclose(seen(own, k, q), want, rtol=1e-4)


def test_ubiquitous_features_have_no_weight():
    axes, own = np.eye(D), head(np.eye(D))
    k = np.tile(axes[0], (8, 1))  # the first feature, and no other
    assert not seen(own, k, axes[:1]).any()
    k[3] = axes[1]  # one has another instead
    np.testing.assert_allclose(seen(own, k, axes[1:2]), [math.log(8) * (i == 3) for i in range(8)], rtol=1e-6)
    assert not seen(own, k, axes[2:3]).any()


def test_masked_tokens_and_queries_have_no_influence():
    own, k, q = turned(), RNG.normal(size=(20, D)), RNG.normal(size=(5, D))
    ranked, asked = np.arange(20) % 3 > 0, np.arange(5) > 1
    got = np.asarray(RELEVANCE(own, *map(jnp.float32, (k, q)), ranked, asked))
    np.testing.assert_allclose(got[ranked], seen(own, k[ranked], q[asked]), rtol=1e-5)
    assert not got[~ranked].any()


@pytest.mark.parametrize("seed", range(6))
def test_disjoint_spans_are_optimal(seed):
    score, width, count = np.random.default_rng(seed).uniform(0, 1, 13), 3, 3

    def worth(starts: tuple[int, ...]) -> float:
        apart = all(b - a >= width for a, b in zip(starts, starts[1:], strict=False))
        return sum(score[i] for i in starts) if apart else -math.inf

    want = max(combinations(range(len(score)), count), key=worth)
    assert disjoint(score, count, width) == list(want)
    assert disjoint(np.zeros(4), 2, 3) == [0, 3]  # there is no other choice


def plainly(spans: list[list[int]], asked: list[int], k: float = 1.5) -> list[float]:
    out = []
    for span in spans:
        total = 0.0
        for word in sorted(set(asked)):
            having = sum(word in other for other in spans)
            often = span.count(word)
            total += math.log(1 + (len(spans) - having + 0.5) / (having + 0.5)) * often * (k + 1) / (often + k)
        out.append(total)
    return out


def test_bm25_equals_plain_reference():
    ids, asked = np.random.default_rng(1).integers(0, 4, 30), [3, 1, 3, 11]  # some come again in a span, one in none
    spans = [ids[i : i + 4].tolist() for i in range(27)]
    np.testing.assert_allclose(bm25(ids, asked, 4), plainly(spans, asked), rtol=1e-12)
    assert bm25(ids[:3], asked, 4).shape == (0,)


def shortened(rows: list[list[int]], text: str) -> list[list[int]]:
    config = parse(text)
    assert isinstance(config.prefill, PromptCompression)
    runner = PrefillRunner(params=PARAMS, config=config, rows=rows, reserve=0, cost=Cost())
    return config.prefill.shorten(PARAMS, rows, runner)


@pytest.mark.parametrize(("window", "span", "lexical"), [(8, 8, 0.25), (12, 5, 0.0), (6, 7, 1.0)])
def test_prompt_spans_equal_float64_selection(window, span, lexical):
    made = f"s3attention(tokens={BUDGET}, window={window}, span={span}, lexical={lexical}, gate={FEATURES!r})"
    gate = trained(FEATURES, Featured(tokens=BUDGET)).weights
    encode, centre, bias = (np.asarray(x, np.float64) for x in (gate.encode, gate.centre, gate.bias))
    taps = rig.dense_prompt(jnp.asarray(PROMPT))[1]
    for row, n in enumerate(LENGTHS):
        shares = np.zeros(n - window)
        for layer in range(L):
            at, rope = jnp.arange(n), PARAMS.config.ropes[layer]
            q, k = (jnp.asarray(x)[row, ..., -n:, :] for x in taps[layer][:2])
            q, k = (np.asarray(rope.rotate(x, at[(None,) * (x.ndim - 2)], inverse=True)) for x in (q, k))
            for head in range(H):
                z = []
                for side, x in enumerate((k[head, : n - window], q[head, :, n - window :].reshape(-1, D))):
                    y = relu((x - centre[layer, head, side]) @ encode[layer, head].T + bias[layer, head, side])
                    np.put_along_axis(y, np.argsort(y, 1)[:, :-6], 0, 1)
                    z.append(y)
                s = z[0] @ (z[1].sum(0) * np.log(len(z[0]) / np.maximum((z[0] > 0).sum(0), 1)))
                shares += s / s.sum() / (L * H)
        words = bm25(np.array(ROWS[row][:-window]), ROWS[row][-window:], span)
        score = (1 - lexical) * scaled(sums(shares, span)) + lexical * scaled(words)
        starts = disjoint(score, (BUDGET - window) // span, span)
        want = [i for start in starts for i in range(start, start + span)] + list(range(n - window, n))
        assert shortened(ROWS, made)[row] == [ROWS[row][i] for i in want]


def test_prompt_within_budget_is_read_whole():
    text = rig.CASES["s3attention"][0].text.format(b=max(LENGTHS))
    np.testing.assert_array_equal(rig.begun(text)[1], rig.begun("full")[1])
    rows = [ROWS[0], ROWS[1][:40], ROWS[1][:5]]
    short = shortened(rows, rig.CASES["s3attention"][0].tight)
    assert short[1:] == rows[1:] and len(short[0]) == BUDGET and short[0][-8:] == rows[0][-8:]


# --------------------------------------------------------------------------------------------------------- folders


def arrays() -> dict[str, np.ndarray]:
    return trained_weights.read(FEATURES, "s3attention")[0]


def test_folder_round_trips(tmp_path: Path):
    gate = trained(FEATURES, Featured(tokens=BUDGET)).weights
    assert gate.layers == (0, 1) and gate.active == 6
    trained_weights.write(tmp_path, vars(gate), {"method": "s3attention", "model": trained_weights.identities(PARAMS)})
    for name in (trained_weights.WEIGHTS, trained_weights.CARD):
        assert (tmp_path / name).read_bytes() == (Path(FEATURES) / name).read_bytes()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": np.array([1, 0])}, r"layers=\[1, 0\], active=6"),
        ({"layers": np.array([0, 0])}, "layers that rise"),
        ({"active": np.array(25)}, "active=25"),
        ({"layers": np.array([0])}, "not those of s3attention"),
        ({"bias": np.zeros((L, H, 2, 23))}, "not those of s3attention"),
        ({"centre": np.zeros((L, H, 1, D))}, "not those of s3attention"),
        ({"encoder": np.zeros(3)}, "not those of s3attention"),
    ],
)
def test_folder_with_invalid_arrays_is_refused(tmp_path: Path, change, says):
    trained_weights.write(tmp_path, arrays() | change, {"method": "s3attention", "model": []})
    with pytest.raises(FormatError, match=says):
        parse(f"s3attention(gate={str(tmp_path)!r})")


def test_foreign_or_damaged_folder_is_refused(tmp_path: Path):
    with pytest.raises(FormatError, match="describes 'trimkv', not s3attention"):
        parse(f"s3attention(gate={rig.GATE!r})")
    with pytest.raises(FormatError, match=r"it has no card\.json"):
        parse(f"s3attention(gate={str(tmp_path)!r})")
    some = arrays()
    trained_weights.write(tmp_path, {x: some[x] for x in some if x != "active"}, {"method": "s3attention", "model": []})
    with pytest.raises(FormatError, match="not those of s3attention"):
        parse(f"s3attention(gate={str(tmp_path)!r})")
    card = json.loads((tmp_path / trained_weights.CARD).read_text())
    (tmp_path / trained_weights.CARD).write_text(json.dumps(card | {"sha256": "0"}))
    with pytest.raises(FormatError, match="SHA-256 differ"):
        parse(f"s3attention(gate={str(tmp_path)!r})")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("s3attention(tokens=64)", "room for the window and a span"),
        ("s3attention(lexical=1.5)", "a weight from 0 to 1"),
        ("s3attention(span=0)", "1 or more"),
        ("s3attention", "jkv train s3attention"),
    ],
)
def test_invalid_compositions_are_refused(text: str, says: str):
    with pytest.raises(ValueError, match=says):
        jkv.prefill(PARAMS, text, ROWS)


def test_features_of_another_model_are_refused(tmp_path: Path):
    text = f"s3attention(tokens={BUDGET}, window=8, span=8, gate={{!r}})"
    with pytest.raises(ValueError, match="trained for the model"):
        jkv.prefill(LATENT, text.format(FEATURES), ROWS)
    trained_weights.write(tmp_path, arrays(), {"method": "s3attention", "model": []})  # for any
    with pytest.raises(ValueError, match="features are of 2 kv heads of 16 channels"):
        jkv.prefill(LATENT, text.format(str(tmp_path)), ROWS)
    deeper = trained_weights.read(tmp_path, "s3attention")[0] | {"layers": np.array([0, 2])}
    trained_weights.write(tmp_path, deeper, {"method": "s3attention", "model": []})
    with pytest.raises(ValueError, match="a draft of 3 blocks, of which 2 attend, and the model has 2"):
        jkv.prefill(PARAMS, text.format(str(tmp_path)), ROWS)


def test_config_carries_features_as_pytree():
    """Through jax, and whatever it is bound to: another method's prefill then reads what is left."""
    config = parse(rig.CASES["s3attention"][0].tight + " | int8")
    same = jax.tree.map(lambda x: x, config.bound(PARAMS))
    assert isinstance(same.prefill, Featured) and same.prefill.weights.layers == (0, 1)
    assert replace(same.prefill, gate=None).depth(PARAMS.config) == 1
