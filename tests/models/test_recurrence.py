"""The rules of recurrence against their definitions, token by token in float64."""

from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.models import RULES, Mixers
from jkv.models.layers import gated_delta, mamba2_ssd, recurrent_state

WIDTH, EPS, WINDOW, T = 6, 1e-5, 8, 2 * mamba2_ssd.STRETCH + 21
RNG = np.random.default_rng(0)
LENGTHS = (T, 30, 2)
X = RNG.normal(0, 1, (len(LENGTHS), T, WIDTH)).astype(np.float32)
LIVE = np.arange(T)[None] >= T - np.array(LENGTHS)[:, None]
GIVEN = jnp.asarray(np.where(LIVE[..., None], X, np.nan))  # nothing of a pad may show


def silu(x):
    return x / (1 + np.exp(-x))


def softplus(x):
    return np.log1p(np.exp(x))


class Ssd:
    """y = S C + D x, S <- exp(a dt) S + dt x B^T."""

    m = Mixers(at=(0,), heads=4, head_dim=3, state=5, groups=2, kernel=4, limit=(0.001, 0.7))
    shapes = dict(
        mix=(m.inner + m.channels + m.heads, WIDTH), conv_bias=(m.channels,), skip=(m.heads,), norm=(m.inner,)
    )

    def project(self, w, x):
        """z, inputs of the convolution, what else a token is."""
        return np.split(w["mix"] @ x, (self.m.inner, self.m.inner + self.m.channels))

    def change(self, w, s, u, dt):
        """y [Hs,P] of the convolved inputs; s changes."""
        m, n = self.m, self.m.state
        u, b, c = np.split(u, (m.inner, m.inner + m.groups * n))
        dt, y = np.clip(softplus(dt + w["dt_bias"]), *m.limit), np.zeros((m.heads, m.head_dim))
        for i in range(m.heads):
            own, g = u[i * m.head_dim :][: m.head_dim], slice(i // 2 * n, i // 2 * n + n)
            s[i] = np.exp(-np.exp(w["a_log"][i]) * dt[i]) * s[i] + dt[i] * np.outer(own, b[g])
            y[i] = s[i] @ c[g] + w["skip"][i] * own
        return y

    def finish(self, w, y, z):
        y = (y.reshape(-1) * silu(z)).reshape(self.m.groups, -1)
        y = y / np.sqrt((y**2).mean(1, keepdims=True) + EPS)
        return y.reshape(-1) * w["norm"]


class Delta:
    """y = S q, S <- exp(a dt) S, then S <- S + beta (v - S k) k^T."""

    m = Mixers(at=(0,), heads=4, head_dim=3, state=5, groups=2, kernel=4, rule="delta")
    shapes = dict(mix=(m.channels, WIDTH), z=(m.inner, WIDTH), pace=(2, 2, m.heads // 2, WIDTH), norm=(m.head_dim,))

    def project(self, w, x):
        return w["z"] @ x, w["mix"] @ x, np.einsum("nise,e->ins", w["pace"], x).reshape(2, -1)

    def change(self, w, s, u, rates):
        m, n = self.m, self.m.state
        q, k, v = np.split(u, (m.groups * n, 2 * m.groups * n))
        q, k = (x.reshape(m.groups, n) for x in (q, k))
        q, k = (x / np.sqrt((x**2).sum(1, keepdims=True) + 1e-6) for x in (q, k))
        beta, dt = 1 / (1 + np.exp(-rates[0])), softplus(rates[1] + w["dt_bias"])
        y = np.zeros((m.heads, m.head_dim))
        for i in range(m.heads):
            g = i // 2
            s[i] *= np.exp(-np.exp(w["a_log"][i]) * dt[i])
            s[i] += beta[i] * np.outer(v[i * m.head_dim :][: m.head_dim] - s[i] @ k[g], k[g])
            y[i] = s[i] @ q[g] / n**0.5
        return y

    def finish(self, w, y, z):
        y = y / np.sqrt((y**2).mean(1, keepdims=True) + EPS) * w["norm"]
        return y.reshape(-1) * silu(z)


@dataclass(frozen=True)
class Rule:
    """A rule, random weights of a mixer, and its programs."""

    of: Ssd | Delta

    @cached_property
    def w(self):
        m = self.of.m
        shapes = self.of.shapes | dict(conv=(m.channels, 1, m.kernel), a_log=(m.heads,), o=(WIDTH, m.inner))
        rng = np.random.default_rng(1)
        drawn = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
        return drawn | {"dt_bias": rng.uniform(-5, 0, m.heads).astype(np.float32)}

    @cached_property
    def truth(self):
        """Of each row, outputs f64[n,E] and states f64[n,Hs,P,N] after each of its tokens."""
        return [self._told(X[r, T - n :].astype(np.float64)) for r, n in enumerate(LENGTHS)]

    def _told(self, x):
        m, w = self.of.m, {name: a.astype(np.float64) for name, a in self.w.items()}
        s, before, out, states = np.zeros((m.heads, m.head_dim, m.state)), np.zeros((m.kernel, m.channels)), [], []
        for row in x:
            z, raw, rest = self.of.project(w, row)
            before = np.concatenate([before[1:], raw[None]])
            y = self.of.change(w, s, silu((before * w["conv"][:, 0].T).sum(0) + w.get("conv_bias", 0)), rest)
            out.append(w["o"] @ self.of.finish(w, y, z))
            states.append(s.copy())
        return np.array(out), np.array(states)

    @cached_property
    def programs(self):
        m, net = self.of.m, RULES[self.of.m.rule]
        return (
            jax.jit(lambda x, live, old: net.read(self.w, m, EPS, x, live, old)),
            jax.jit(lambda x, alive, old: net.step(self.w, m, EPS, x, alive, old)),
            jax.jit(lambda old: net.settle(self.w, m, old)),
        )

    def read(self, *given):
        return self.programs[0](*given)

    def step(self, *given):
        return self.programs[1](*given)

    def settle(self, *given):
        return self.programs[2](*given)

    @property
    def fresh(self):
        return RULES[self.of.m.rule].start(self.of.m, len(LENGTHS), WINDOW, jnp.float32)

    @cached_property
    def whole(self):
        return self.read(GIVEN, LIVE, self.fresh)


@pytest.fixture(params=[Ssd, Delta], scope="module", ids=["ssd", "delta"])
def rule(request):
    return Rule(request.param())


def close(got, want):
    np.testing.assert_allclose(got, want, atol=1e-5 * max(1, abs(want).max()), rtol=0)


def test_prefill_equals_token_by_token(rule):
    y, after = rule.whole
    for r, n in enumerate(LENGTHS):
        want, states = rule.truth[r]
        close(y[r, T - n :], want)
        close(after.state[r], states[-1])
    assert not np.asarray(after.count).any()


def test_programs_make_no_custom_calls(rule):
    """Whose batches wait for threads, of which programs that run side by side may have taken all."""
    read, step, settle = rule.programs
    assert "custom_call" not in read.lower(GIVEN, LIVE, rule.fresh).as_text()
    assert "custom_call" not in step.lower(GIVEN[:, :1], LIVE[:, 0], rule.fresh).as_text()
    assert "custom_call" not in settle.lower(rule.fresh).as_text()


def test_stretches_read_in_batches_equal_one_pass(rule, monkeypatch):
    for net in (mamba2_ssd, gated_delta):
        monkeypatch.setattr(net, "BESIDE", 2)
    y, after = replace(rule).read(GIVEN, LIVE, rule.fresh)
    close(np.asarray(y)[LIVE], np.asarray(rule.whole[0])[LIVE])
    close(after.state, np.asarray(rule.whole[1].state))


def test_small_terms_after_large_ones_keep_precision():
    x = -np.concatenate([np.full(64, 7.1), RNG.uniform(1e-4, 1e-3, 64)]).astype(np.float32)
    total, lost = (np.asarray(a, np.float64)[63:] for a in recurrent_state.sums(jnp.asarray(x)))
    np.testing.assert_allclose((total - total[0] + lost - lost[0])[1:], np.cumsum(x[64:].astype(np.float64)), rtol=1e-6)


def test_equal_keys_overwrite_each_other():
    """A system whose inverse, made by powers of it, would have no digit left: the newest value alone is kept."""
    m, t = replace(Delta.m, heads=1, groups=1), gated_delta.STRETCH
    x = np.ones((1, m.channels, t), np.float32)
    x[:, 2 * m.state :] = RNG.normal(size=(1, m.head_dim, t))
    none, full = jnp.zeros((1, 1, 1, t)), jnp.ones((1, 1, t))
    y, _ = jax.jit(lambda x: gated_delta._scan(m, jnp.zeros((1, 1, 1, m.head_dim, m.state)), x, none, full))(x)
    np.testing.assert_allclose(y[0] * m.state**0.5, x[0, 2 * m.state :].T, atol=1e-5)


@pytest.mark.parametrize("first", [1, 100, T - 1])
def test_split_prefill_equals_one_pass(rule, first):
    """Also where a row has all of its tokens in one of the pieces."""
    _, half = rule.read(GIVEN[:, :first], LIVE[:, :first], rule.fresh)
    y, after = rule.read(GIVEN[:, first:], LIVE[:, first:], half)
    late = LIVE.copy()
    late[:, :first] = False
    close(np.asarray(y)[late[:, first:]], np.asarray(rule.whole[0])[late])
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(rule.whole[1]), strict=True):
        close(a, np.asarray(b))


def test_steps_with_pauses_and_settling_equal_prefill(rule):
    """The last tokens one by one, a row pausing now and then, a window that settles; also before more is read."""
    n, cut = 20, T - 20
    _, state = rule.read(GIVEN[:, :cut], LIVE[:, :cut], rule.fresh)
    done, turn = np.zeros(3, int), 0
    while (done < n - 3).any():
        alive = (done < n - 3) & ((np.arange(3) + turn) % 4 > 0) & LIVE[np.arange(3), np.minimum(cut + done, T - 1)]
        done += (~LIVE[np.arange(3), np.minimum(cut + done, T - 1)]) & (done < n - 3)  # a pad is no token
        turn += 1
        if int(state.count.max()) == WINDOW:
            state = rule.settle(state)
        x = np.where(alive[:, None], X[np.arange(3), cut + np.minimum(done, n - 1)], np.nan)
        y, state = rule.step(jnp.asarray(x)[:, None], jnp.asarray(alive), state)
        for r in np.flatnonzero(alive):
            close(y[r, 0], rule.truth[r][0][LENGTHS[r] - n + done[r]])
        done += alive
    assert int(state.count.min()) < int(state.count.max())
    y, after = rule.read(GIVEN[:, T - 3 :], LIVE[:, T - 3 :], rule.settle(state))
    close(np.asarray(y)[LIVE[:, T - 3 :]], np.asarray(rule.whole[0])[:, T - 3 :][LIVE[:, T - 3 :]])
    close(after.state, np.asarray(rule.whole[1].state))
    close(after.raw, np.asarray(rule.whole[1].raw))


def test_pending_steps_can_be_rolled_back(rule):
    _, state = rule.read(GIVEN[:, : T - 6], LIVE[:, : T - 6], rule.fresh)
    for i in range(6):
        noise = jnp.asarray(X[:, T - 6 + i if i < 2 else 5])[:, None]
        _, state = rule.step(noise, jnp.asarray([True, True, i >= 4]), state)
    back = replace(state, count=jnp.asarray([2, 2, 0]))
    # what was taken back still lies in the window
    again, _ = rule.step(GIVEN[:, T - 4 : T - 3], jnp.asarray(LIVE[:, T - 4]), back)
    close(np.asarray(again)[LIVE[:, T - 4], 0], np.asarray(rule.whole[0])[LIVE[:, T - 4], T - 4])
    _, after = rule.read(GIVEN[:, T - 4 :], LIVE[:, T - 4 :], rule.settle(back))
    close(after.state, np.asarray(rule.whole[1].state))
