"""The recurrence of Mamba-2 against its definition, token by token in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.models import Mixers, ssd

M = Mixers(at=(0,), heads=4, head_dim=3, state=5, groups=2, kernel=4, limit=(0.001, 0.7))
WIDTH, EPS, WINDOW, T = 6, 1e-5, 8, 2 * ssd.STRETCH + 21
RNG = np.random.default_rng(0)
LENGTHS = (T, 30, 2)
SHAPES = dict(
    mix=(M.inner + M.channels + M.heads, WIDTH),
    conv=(M.channels, 1, M.kernel),
    conv_bias=(M.channels,),
    dt_bias=(M.heads,),
    a_log=(M.heads,),
    skip=(M.heads,),
    norm=(M.inner,),
    o=(WIDTH, M.inner),
)
W = {name: RNG.normal(0, 0.5, shape).astype(np.float32) for name, shape in SHAPES.items()} | {
    "dt_bias": RNG.uniform(-5, 0, M.heads).astype(np.float32)
}
X = RNG.normal(0, 1, (len(LENGTHS), T, WIDTH)).astype(np.float32)
LIVE = np.arange(T)[None] >= T - np.array(LENGTHS)[:, None]
GIVEN = jnp.asarray(np.where(LIVE[..., None], X, np.nan))  # nothing of a pad may show

reading = jax.jit(lambda x, live, old: ssd.read(W, M, EPS, x, live, old))
stepping = jax.jit(lambda x, alive, old: ssd.step(W, M, EPS, x, alive, old))
settling = jax.jit(lambda old: ssd.settle(W, M, old))


def silu(x):
    return x / (1 + np.exp(-x))


def truth(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs f64[T,E] and states f64[T,Hs,P,N] after each token of x f[T,E], one after the other."""
    w = {name: a.astype(np.float64) for name, a in W.items()}
    h, p, n, per = M.heads, M.head_dim, M.state, M.heads // M.groups
    s, before, out, states = np.zeros((h, p, n)), np.zeros((M.kernel, M.channels)), [], []
    for row in x.astype(np.float64):
        z, raw, dt = np.split(w["mix"] @ row, (M.inner, M.inner + M.channels))
        before = np.concatenate([before[1:], raw[None]])
        u = silu((before * w["conv"][:, 0].T).sum(0) + w["conv_bias"])
        u, b, c = np.split(u, (M.inner, M.inner + M.groups * n))
        dt = np.clip(np.log1p(np.exp(dt + w["dt_bias"])), *M.limit)
        y = np.zeros((h, p))
        for i in range(h):
            own = u[i * p : (i + 1) * p]
            g = slice(i // per * n, i // per * n + n)
            s[i] = np.exp(-np.exp(w["a_log"][i]) * dt[i]) * s[i] + dt[i] * np.outer(own, b[g])
            y[i] = s[i] @ c[g] + w["skip"][i] * own
        y = (y.reshape(-1) * silu(z)).reshape(M.groups, -1)
        y = y / np.sqrt((y**2).mean(1, keepdims=True) + EPS)
        out.append(w["o"] @ (y.reshape(-1) * w["norm"]))
        states.append(s.copy())
    return np.array(out), np.array(states)


TRUTH = [truth(X[r, T - n :]) for r, n in enumerate(LENGTHS)]


def close(got, want):
    np.testing.assert_allclose(got, want, atol=1e-5 * max(1, abs(want).max()), rtol=0)


def fresh():
    return ssd.start(M, len(LENGTHS), WINDOW, jnp.float32)


@pytest.fixture(scope="module")
def whole():
    return reading(GIVEN, LIVE, fresh())


def test_a_text_is_read_as_token_by_token(whole):
    y, after = whole
    for r, n in enumerate(LENGTHS):
        want, states = TRUTH[r]
        close(y[r, T - n :], want)
        close(after.state[r], states[-1])
    assert not np.asarray(after.count).any()


def test_stretches_may_be_read_in_several_pieces(whole, monkeypatch):
    monkeypatch.setattr(ssd, "BESIDE", 2)
    y, after = jax.jit(lambda x, live, old: ssd.read(W, M, EPS, x, live, old))(GIVEN, LIVE, fresh())
    close(np.asarray(y)[LIVE], np.asarray(whole[0])[LIVE])
    close(after.state, np.asarray(whole[1].state))


def test_small_steps_behind_large_ones_are_not_lost_in_their_sum():
    x = -np.concatenate([np.full(64, 7.1), RNG.uniform(1e-4, 1e-3, 64)]).astype(np.float32)
    total, lost = (np.asarray(a, np.float64)[63:] for a in ssd._sums(jnp.asarray(x)))
    np.testing.assert_allclose((total - total[0] + lost - lost[0])[1:], np.cumsum(x[64:].astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize("first", [1, 100, T - 1])
def test_it_does_not_matter_where_a_text_is_cut(whole, first):
    """Also where a row has all of its tokens in one of the pieces."""
    _, half = reading(GIVEN[:, :first], LIVE[:, :first], fresh())
    y, after = reading(GIVEN[:, first:], LIVE[:, first:], half)
    late = LIVE.copy()
    late[:, :first] = False
    close(np.asarray(y)[late[:, first:]], np.asarray(whole[0])[late])
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(whole[1]), strict=True):
        close(a, np.asarray(b))


def test_steps_settle_and_pauses_are_the_same_text(whole):
    """The last tokens one by one, a row pausing now and then, a window that settles; also before more is read."""
    n, cut = 20, T - 20
    _, state = reading(GIVEN[:, :cut], LIVE[:, :cut], fresh())
    done, turn = np.zeros(3, int), 0
    while (done < n - 3).any():
        alive = (done < n - 3) & ((np.arange(3) + turn) % 4 > 0) & LIVE[np.arange(3), np.minimum(cut + done, T - 1)]
        done += (~LIVE[np.arange(3), np.minimum(cut + done, T - 1)]) & (done < n - 3)  # a pad is no token
        turn += 1
        if int(state.count.max()) == WINDOW:
            state = settling(state)
        x = np.where(alive[:, None], X[np.arange(3), cut + np.minimum(done, n - 1)], np.nan)
        y, state = stepping(jnp.asarray(x)[:, None], jnp.asarray(alive), state)
        for r in np.flatnonzero(alive):
            close(y[r, 0], TRUTH[r][0][LENGTHS[r] - n + done[r]])
        done += alive
    assert int(state.count.min()) < int(state.count.max())
    y, after = reading(GIVEN[:, T - 3 :], LIVE[:, T - 3 :], settling(state))
    close(np.asarray(y)[LIVE[:, T - 3 :]], np.asarray(whole[0])[:, T - 3 :][LIVE[:, T - 3 :]])
    close(after.state, np.asarray(whole[1].state))
    close(after.raw, np.asarray(whole[1].raw))


def test_what_waits_can_be_taken_back(whole):
    _, state = reading(GIVEN[:, : T - 6], LIVE[:, : T - 6], fresh())
    for i in range(6):
        noise = jnp.asarray(X[:, T - 6 + i if i < 2 else 5])[:, None]
        _, state = stepping(noise, jnp.asarray([True, True, i >= 4]), state)
    back = replace(state, count=jnp.asarray([2, 2, 0]))
    _, after = reading(GIVEN[:, T - 4 :], LIVE[:, T - 4 :], settling(back))
    close(after.state, np.asarray(whole[1].state))
