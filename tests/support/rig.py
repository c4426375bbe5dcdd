"""What the tests of the runtime share: tiny models, ragged prompts, the catalogue's compositions and their runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv import methods
from jkv.cache import codec_map as codecs
from jkv.cache.cache import Cache
from jkv.cache.padding import pad
from jkv.cache.spec import LayerConfig
from jkv.core import decode_loop, sampling
from jkv.core.compilation import Cost
from jkv.methods import METHODS
from jkv.methods.budgets.sizes import Beyond
from jkv.methods.config import CacheConfig, resolve
from jkv.methods.registry import Method
from jkv.models import Params
from jkv.models.rope import Rope
from jkv.prompts.allocation import CacheShape
from jkv.prompts.prefill import PrefillRunner
from support.dense import dense_prompt, dense_step
from support.tiny import (  # noqa: F401
    CAPPED,
    CHANNELS,
    DEEP,
    DUO,
    ESTIMATES,
    FEATURES,
    FINDERS,
    FOLDER,
    GATE,
    GATED,
    HYBRID,
    KEEPERS,
    LOOK,
    MIXTURES,
    MODEL,
    MOMENTS,
    PARAMS,
    PLAN,
    PREDICTOR,
    QUERIES,
    SENSITIVITY,
    SINKS,
    SUNK,
    SWITCH,
    UNTURNED,
    WORTH,
    ZAP,
    D,
    G,
    H,
    L,
)

AROUND = {"pooled", "indexcache", "similar", "vote", "values"}  # rows that change what another has
LENGTHS, STEPS = (90, 73), 52  # prompt tokens of each row; teacher-forced tokens: three flushes
LONGEST = max(LENGTHS) + STEPS
LONG = 1000  # more than every budget
BUDGET, EVERYTHING = 48, 4000
MODELS = {"llama": PARAMS, "bamba": HYBRID, "gemma2": CAPPED, "smollm3": UNTURNED, "gpt_oss": SUNK, "qwen3_next": GATED}

_rng = np.random.default_rng(0)
PROMPT = np.full((2, max(LENGTHS)), -1, np.int32)
for _row, _n in enumerate(LENGTHS):
    PROMPT[_row, PROMPT.shape[1] - _n :] = _rng.integers(0, MODEL.vocab, _n)
FORCED = _rng.integers(0, MODEL.vocab, (2, STEPS)).astype(np.int32)
PAUSES = np.array(FORCED)
PAUSES[0, 5:9] = PAUSES[1, 20:30] = -1


@dataclass(frozen=True)
class Slot:
    """Bytes of one token and kv head in a tier: keys and values, group metadata included."""

    k: float = 4.0 * D
    v: float = 4.0 * D
    lossy: bool = False


DENSE = Slot()
INT8 = Slot(k=D + 4, v=D + 4, lossy=True)  # bfloat16 scale and low
TURNS = Slot(*[(D + 4 + D / 2 + 4) / 2] * 2, lossy=True)  # a side in 8 bits, the other one in 4
INT4 = Slot(k=D / 2 + 4, v=D / 2 + 4, lossy=True)  # D = 16 is one group
SPARSE = Slot(k=5 * 2 + D / 8, v=5 * 2 + D / 8, lossy=True)  # 5 of 16 numbers, bfloat16
LEVELS = Slot(k=D / 4 + 2, v=D / 8 + 2, lossy=True)  # 2 bits and 1, and a bfloat16 scale
INT3 = Slot(k=3 * D / 8 + 4, v=3 * D / 8 + 4, lossy=True)
BLOCKS = Slot(k=D / 2 + 1, v=D / 2 + 1, lossy=True)  # a byte of exponents
LATENT = Slot(k=4.0 * 8 / 2, v=4.0 * 8 / 2, lossy=True)  # a quarter of the channels of both heads
CODED_LATENT = Slot(k=16 / 2 / 2 + 4 * 16 / 16 / 2, v=24 / 2 / 2 + 4 / 2, lossy=True)  # kivi's of 16 and 24 of 32
SPECTRUM = Slot(k=4 * (8 + 4 + 4 + 2 + 2) / 8 / 2, v=D / 2 + 4, lossy=True)  # 5 of 8 stretches of 4 channels
SHADOW = Slot(k=4.0 * 8 / 2, v=D / 2 + 4, lossy=True)
ONE_FOR_TWO = Slot(*[(D / 2 + 4 + 2 * 2 + 1) / 2] * 2, lossy=True)  # a direction, its scale, two norms, which is apart
FEWER = Slot(k=4.0 * 8, v=4.0 * 4, lossy=True)
THIN = Slot(k=4.0 * 8, lossy=True)
ALLOTTED = Slot(k=D / 4 + 2, v=D / 4 + 2, lossy=True)  # 2 bits on average, and the size of a token
NONUNIFORM = Slot(k=3 * D / 8 + 2 * 3, v=3 * D / 8 + 4 + 2 * 3, lossy=True)  # two outliers; the ends of a token
KIVI = Slot(k=D / 4 + 4 * D / 16, v=D / 4 + 4, lossy=True)  # 16 tokens share a scale and a low per channel
POLAR = Slot(k=D / 2 + 4 * D / 16, v=D / 2 + 4, lossy=True)  # a byte a pair of channels; 4 numbers for 16 tokens
GEAR = Slot(  # like kivi; a token's number; 2 outliers of a channel, or of a token; the two factors of rank 2
    k=D / 4 + 4 * D / 16 + 1 + 6 * D / 16 + 4 + 4 * D / 16, v=D / 4 + 4 + 6 + 4 + 4 * D / 16, lossy=True
)
NSN = Slot(*[D / 4 + 2 + 4 / 16 + (D / 2 + 4) / 16] * 2, lossy=True)  # entries and signs, both scales, means
VID = Slot(k=3 * D / 16 + 3 * D / 16 + D / 8 / 16, v=4 + 2 * D / 16, lossy=True)  # half of the channels in 2 bits


@dataclass(frozen=True)
class Case:
    """A composition; `text` has {b} for the budget, {p}, {t} for what else holds all.

    What it is made of follows from its config and its plan. The numbers here are those that its bytes have beside them.
    """

    text: str
    slot: Slot = DENSE
    ranked: int = 0  # slots that remember where they act
    index: int = 0  # numbers that are known of a page and head
    memo: int = 0  # numbers that are remembered of a head
    whole: int = 0  # kv heads of a layer that keep everything, the others BUDGET tokens
    rest: bool = False  # what leaves is one token more of its head
    draft: int = 0  # lower layers that hold everything
    odds: bool = False  # in the others what leaves is a mean of known weight
    tiers: int = 1  # each with slots for every token
    later: Slot | None = None  # of what follows the prompt, in a tier of its own
    taught: int = 0  # numbers of a layer that a prompt taught its codecs
    apart: int = 0  # slots in front of those, as exact as what follows the prompt and without an index
    model: str = "llama"

    @property
    def params(self) -> Params:
        return MODELS[self.model]

    @property
    def tight(self) -> str:
        return self.text.format(b=BUDGET, p=3, t=0.5)

    @property
    def wide(self) -> str:
        return self.text.format(b=EVERYTHING, p=64, t=0.0)

    @cached_property
    def config(self) -> CacheConfig:
        return methods.parse(self.tight)

    @cached_property
    def plan(self) -> tuple[LayerConfig, ...]:
        """For texts that fill every budget."""
        return resolve(self.config, self.params.config, LONG, STEPS)

    @property
    def budget(self) -> bool:
        """Whether a layer keeps BUDGET tokens, on average, beside those on top of it."""
        kept = [layer.size.tokens for layer in self.plan]
        return sum(kept) == BUDGET * len(kept)

    @property
    def recent(self) -> int:
        return self.config.recent

    @property
    def sinks(self) -> int:
        """One first token where codes lose anything, or as many as the text says, and the 3 of kvsink."""
        said = re.search(r"(rotatekv|kvtc|kvquant|kivi)\([^)]*sinks=(\d+)", self.text)
        mixed = self.text.startswith(("zipcache", "mikv", "arkv"))  # a tier of theirs is coded, if an empty one
        lossy = (self.slot.lossy or mixed) and not self.ranked  # where keys move there are none
        return (int(said[2]) if said else int(lossy)) + 3 * ("kvsink" in self.text)

    @property
    def exact(self) -> int:
        return self.sinks + self.recent

    @property
    def unit(self) -> int:
        return self.config.unit

    @property
    def page(self) -> int:
        """Slots of a page; 0: nothing is read by pages."""
        return self.config.select.unit if self.config.select else 0

    @property
    def uniform(self) -> bool:
        return self.plan[-1].uniform

    @property
    def pooled(self) -> bool:
        return self.config.pooled is not None

    @property
    def merges(self) -> bool:
        """Whether entries change by what is evicted."""
        return self.config.merge is not None and self.config.merge.changes != "none"

    @property
    def beyond(self) -> float:
        """The share of the generated tokens that is kept on top of the budget."""
        return self.config.budget.share if isinstance(self.config.budget, Beyond) else 0.0

    @property
    def appends(self) -> bool:
        """Whether what is generated is kept on top of the budget."""
        return self.beyond == 1

    @property
    def grows(self) -> float:
        """The share of the generated tokens that is kept on top of the prompt."""
        return 0.0 if self.appends else self.beyond

    @property
    def prunes(self) -> bool:
        """Whether upper layers see fewer tokens of the prompt."""
        return any(layer.pruning for layer in self.plan)

    @property
    def follows(self) -> bool:
        """Whether upper layers keep what the one below keeps, without queries of their own."""
        return any(layer.needs.layer is not None and not layer.queries for layer in self.plan)

    @property
    def measured(self) -> bool:
        """Whether layers divide the budget by what they ask."""
        return self.config.budget.statistic is not None

    def __str__(self) -> str:
        text = self.tight.replace(FOLDER.name, "tiny")  # the same in every worker
        return text if self.model == "llama" else f"{self.model}: {text}"


PREDICTOR_TEXT = f"page=8, sinks=8, rows=16, dense_layers=0, recent=16, predictor={PREDICTOR!r}"
KIVI_TEXT = "kivi(recent=0, group=16)"
# Rows whose arguments must be smaller than their defaults for texts this short, or whose bytes have more to them.
OWN: dict[str, tuple[Case, ...]] = {
    "streaming": (Case("streaming(budget={b})", ranked=4),),
    "snapkv": (
        Case("snapkv(budget={b}, window=8)"),
        Case("snapkv(budget={b}, window=8) | int4", slot=INT4),
    ),
    "knorm": (Case("knorm(budget={b}) | kivi(recent=0, group=16, sinks=0)", slot=KIVI),),
    "kivi": (Case(KIVI_TEXT, slot=KIVI),),
    "int8": (Case("int8", slot=INT8),),
    "int4": (Case("int4", slot=INT4),),
    "fp8": (Case("fp8", slot=Slot(k=D, v=D, lossy=True)),),
    "fp4": (Case("fp4", slot=Slot(k=D / 2 + 1, v=D / 2 + 1, lossy=True)),),  # D = 16 is one block
    "values": (Case("int8 | values", slot=Slot(k=D + 4, v=D / 2 + 4, lossy=True)),),
    "polarquant": (Case("polarquant(group=16)", slot=POLAR),),
    "gear": (Case("gear(bits=2, rank=2, outliers=0.02, group=16)", slot=GEAR),),
    "nsnquant": (Case("nsnquant(window=16)", slot=NSN),),
    "vidkv": (Case("vidkv(group=16, recent=16)", slot=VID),),
    "int3": (Case("int3", slot=INT3),),
    "turboquant": (Case(f"turboquant(bits=2, values=1, center=True, moments={MOMENTS!r})", slot=LEVELS),),
    "rotatekv": (Case("rotatekv(sinks=4)", slot=Slot(k=D / 4 + 4, v=D / 4 + 4, lossy=True)),),
    "ksort": (Case(f"ksort(moments={MOMENTS!r})", slot=BLOCKS),),
    "matryoshkakv": (Case(f"matryoshkakv(keys=0.5, values=0.25, moments={MOMENTS!r})", slot=FEWER),),
    "palu": (
        Case(f"palu(keys=0.25, values=0.25, moments={MOMENTS!r})", slot=LATENT),
        Case(
            f"palu(keys=0.25, values=0.25, moments={MOMENTS!r}) | quest(pages={{p}}, page=8, dense_layers=1)",
            slot=LATENT,
            index=2 * D,
        ),
    ),
    "kvheads": (Case(f"kvheads(moments={MOMENTS!r})", slot=Slot(k=2 * D, v=2 * D, lossy=True)),),  # of two heads one
    "cskv": (Case(f"cskv(values=0.75, bits=4, group=16, moments={MOMENTS!r})", slot=CODED_LATENT),),
    "svdq": (Case("svdq(values=4)", slot=SPECTRUM, later=DENSE, taught=32 * 32 + 3 * 32),),
    "shadowkv": (
        Case(
            "shadowkv(rank=8, pages={p}, outliers=2, values=4)",
            slot=SHADOW,
            later=DENSE,
            taught=32 * 8,
            index=D,
            apart=16,
        ),
    ),
    "xkv": (Case("xkv(layers=2)", slot=Slot(k=8.0, v=16.0, lossy=True), later=DENSE, taught=32 * (8 + 16)),),
    "minicache": (Case("minicache(kept=4)", slot=ONE_FOR_TWO, later=DENSE, taught=2 * 2 * 4 * D),),
    "kvtc": (Case(f"kvtc(sinks=4, sensitivity={SENSITIVITY!r})", slot=ALLOTTED),),
    "kvquant": (Case(f"kvquant(sinks=0, sensitivity={SENSITIVITY!r})", slot=NONUNIFORM),),
    "planned": (Case(f"planned(plan={PLAN!r})", slot=TURNS),),
    "mustafar": (Case("mustafar(recent=16)", slot=SPARSE),),
    "adakv": (
        Case("adakv(budget={b}, window=8)"),
        Case("adakv(budget={b}, window=8) | int4", slot=INT4),
    ),
    "pooled": (Case("h2o(budget={b}, newest=0.2) | pooled(floor=0.5)"),),
    "quest": (
        Case(
            "quest(pages={p}, page=8, dense_layers=1)",
            index=2 * D,
        ),
    ),
    "rocketkv": (Case("rocketkv(budget={b}, window=8, pool=7, pages=16, page=8)", index=2 * D),),
    "tokenselect": (Case("tokenselect(tokens={b}, sinks=4, local=16)", memo=G * D + BUDGET + 4 + 1),),
    "triforce": (Case("triforce(tokens={b}, newest=16)", memo=G * D + BUDGET // 8 + 1),),
    "fasa": (Case(f"fasa(tokens={{b}}, pairs=3, dense_layers=0, channels={CHANNELS!r})", index=3),),
    "infinigen": (
        Case(f"infinigen(tokens={{b}}, directions=4, gap=0, dense_layers=0, channels={CHANNELS!r})", index=2),
    ),
    "lrqk": (Case("lrqk(tokens={b}, rank=4)", index=2, memo=2 * D * 4 + 1),),
    "icecache": (
        Case("icecache(pages={p}, page=8, sinks=8, recent=16)", index=D),
        Case("icecache(pages={p}, page=8, sinks=8, recent=16) | int4", slot=INT4, index=D),
    ),
    "infllm": (Case("infllm(blocks={p}, block_size=8, sinks=8, local=16)", index=D),),
    "mpcache": (Case("mpcache(budget={b}, window=8, pages=16, page=8)", index=2 * D),),
    "sentencekv": (
        Case(
            "sentencekv(budget={b}, tokens=200, window=8, sinks=4, longest=8)",
            index=1,
            memo=-(-(BUDGET + STEPS - 8) // 8) * (D + 1) + G * D,
        ),
    ),
    "loopserve": (Case("loopserve(tokens={b})", index=1),),
    "indexcache": (Case("quest(pages={p}, page=8, dense_layers=0) | indexcache(pattern='FS')", index=2 * D),),
    "similar": (Case("quest(pages={p}, page=8, dense_layers=1) | similar", index=2 * D, memo=G * D + 3 + 1),),
    "vote": (Case("quest(pages={p}, page=8, dense_layers=1) | vote(join='sum', layer=True)", index=2 * D),),
    "finch": (Case("finch(budget={b}, window=8)", ranked=92),),
    "rkv": (Case("rkv(budget={b}, block=16)"),),
    "compactor": (Case("compactor(budget={b}, width=32)"),),
    "simlayerkv": (Case("simlayerkv(threshold=0.5, local={b})"),),
    "attentionpredictor": (
        Case(
            f"attentionpredictor(pages={{p}}, {PREDICTOR_TEXT})",
            index=16 + 32 + 1,
        ),
    ),
    "zipcache": (
        Case("zipcache(share=1.0, high=16, group=16, block=16)"),
    ),  # the lossy forms are in methods/test_merging.py
    "lagkv": (Case("lagkv(budget={b}, lag=8, sinks=4)"),),  # by default they follow a number of tokens
    "scissorhands": (Case("scissorhands(budget={b}, history=32, block=16)"),),
    "lacache": (
        Case("lacache(budget={b})", ranked=32),
        Case("lacache(budget={b}) | int8", slot=INT8, ranked=32),
    ),
    "treekv": (Case("treekv(budget={b})", ranked=32),),
    "lazyeviction": (Case("lazyeviction(budget={b}, window=16, threshold=0.01)"),),
    "kvcrush": (Case("kvcrush(budget={b}, page=4, window=8, sinks=4, newest=20)"),),
    "windowkv": (Case("windowkv(budget={b}, window=8, beta=2, group=2)"),),
    "rpc": (Case("rpc(window={p}, period=16)"),),
    "critic": (Case("critic(keep=0.01, least={b})"),),
    "elasticcache": (Case("elasticcache(budget={b}, newest=20)"),),
    "fastkv": (Case("fastkv(budget={b}, window=8, layer=0, tokens={b})"),),
    "dapq": (Case("dapq(budget={b}, tokens=16)"),),
    "kvzip": (Case("kvzip(budget={b}, piece=48, step={b})"),),
    "kvgrad": (Case("kvgrad(budget={b}, piece=48, step={b})"),),
    "trimkv": (Case(f"trimkv(budget={{b}}, gate={GATE!r})"),),
    "retrieval": (Case(f"retrieval(budget={{b}}, window=8, step={{b}}, gate={GATE!r}, heads={FINDERS!r})"),),
    "makeeach": (Case(f"makeeach(budget={{b}}, gate={DEEP!r}, step={{b}})"),),
    "locret": (Case(f"locret(budget={{b}}, gate={ESTIMATES!r}, local=8)", ranked=92),),
    "lococo": (Case(f"lococo(budget={{b}}, gate={MIXTURES!r})"),),
    "dms": (Case(f"dms(keep=1.0, window={{b}}, gate={SWITCH!r})"),),
    "attentiongate": (Case(f"attentiongate(keep=1.0, threshold={{t}}, gate={LOOK!r})"),),
    "compresskv": (Case(f"compresskv(budget={{b}}, top=2, heads={FINDERS!r})"),),
    "razorattention": (Case(f"razorattention(local={{b}}, share=0.0, heads={KEEPERS!r})", whole=1, rest=True),),
    "rest": (Case("knorm(budget={b}) | rest", rest=True),),
    "speckv": (Case("speckv(budget={b}, tokens=8, layers=1, window=8)"),),
    "arkv": (Case("arkv(budget={b}, share=1.0, window=8, block=16)"),),
    "mikv": (Case("mikv(keep=1.0, recent=16)"),),
    "ems": (Case("ems(budget={b}, window=8, threshold=0.2)"),),
    "specpc": (Case("specpc(tokens={b}, window=8, around=6)"),),
    "reform": (Case("reform(tokens={b}, window=8, pool=5, ends=6)"),),
    "s3attention": (Case(f"s3attention(tokens={{b}}, window=8, span=8, gate={FEATURES!r})"),),
    "alisa": (
        Case(
            "alisa(tokens={b}, page=8, window=16, recent=16)",
            index=1,
        ),
    ),
    "zipvl": (
        Case(
            "zipvl(mass=0.6, high=16, low=16, window=16, step=4000)",
            tiers=2,
        ),
    ),
    "smallkv": (Case("smallkv(budget={b}, window=8)", draft=1, odds=True),),
    "qfilters": (Case(f"qfilters(budget={{b}}, window=8, queries={QUERIES!r})"),),
    "triattention": (Case(f"triattention(budget={{b}}, block=16, queries={QUERIES!r})"),),
    "kvzap": (Case(f"kvzap(budget={{b}}, window=8, step={{b}}, gate={ZAP!r})"),),
    "utility": (Case(f"utility(budget={{b}}, window=8, step={{b}}, gate={WORTH!r})"),),
    "fastkvzip": (Case(f"fastkvzip(budget={{b}}, window=8, portion=0.5, step={{b}}, gate={SINKS!r})"),),
    "duoattention": (Case(f"duoattention(local={{b}}, heads={DUO!r})", whole=1),),
    "think": (
        Case(f"think(share=0.5, recent=16, queries={QUERIES!r})", slot=THIN),
        Case("think(share=0.5, recent=16, window=8)", slot=THIN, later=DENSE, taught=2 * 8),
    ),
    "coded": (Case("full | coded"), Case("knorm(budget={b}) | coded")),
    "kvsink": (Case("int4 | kvsink(tokens=3)", slot=INT4),),
    "append": (Case("snapkv(budget={b}, window=8) | append"),),
}


def usual(method: Method) -> str:
    """A method with its defaults, of a budget and a window that texts of some tokens can fill."""
    small = {"window": "8", "step": "{b}"} if method.sized else {}
    given = ["budget={b}"] * method.sized + [f"{name}={n}" for name, n in small.items() if name in method.arguments]
    return f"{method.name}({', '.join(given)})" if given else method.name


CASES = {name: OWN.get(name) or (Case(usual(method)),) for name, method in METHODS.items()}
ALL = [case for cases in CASES.values() for case in cases]
# of the model with a block that recurs: everything, evicted by queries and coded, picked by pages
RECURRING = [replace(case, model="bamba") for case in (CASES["full"][0], CASES["snapkv"][1], CASES["quest"][0])]
# and of one with the delta rule
RECURRING.append(replace(CASES["snapkv"][1], model="qwen3_next"))
# of logits that saturate: evicted by queries and coded, picked by pages; of a layer that turns nothing: turned at read
OTHERS = [
    *RECURRING,
    *(replace(case, model="gemma2") for case in (CASES["snapkv"][1], CASES["quest"][0])),
    replace(CASES["kivi"][0], model="smollm3"),
]
# of the model with sinks and experts: evicted by attention, and picked by pages
OTHERS += [replace(case, model="gpt_oss") for case in (CASES["snapkv"][1], CASES["quest"][0])]

# what `make test` holds the laws against
COMMON = [CASES[name][-1] for name in ("full", "h2o", "snapkv", "kivi", "quest", "adakv", "trimkv", "kvzip")]


def compositions() -> list[CacheConfig]:
    """Every method of the catalogue as it is, and as it is tested; some alone are none."""
    given = {name: f"{name}(budget=4096)" if "budget" in x.arguments else name for name, x in METHODS.items()}
    given = {name: text for name, text in given.items() if name not in AROUND}
    given |= {name: f"{name}(moments={MOMENTS!r})" for name in ("ksort", "matryoshkakv", "palu", "kvheads", "cskv")}
    given |= {name: f"{name}(sensitivity={SENSITIVITY!r})" for name in ("kvtc", "kvquant")}
    given |= {
        "fasa": f"fasa(pairs=3, channels={CHANNELS!r})",
        "infinigen": f"infinigen(directions=4, channels={CHANNELS!r})",
    }
    given["planned"] = f"planned(plan={PLAN!r})"
    given["think"] = f"think(queries={QUERIES!r})"
    return [methods.parse(x) for x in (*given.values(), *(c.tight for cases in CASES.values() for c in cases))]


def empty(text: str, rows: int = 2, longest: int = LONGEST, new: int = STEPS, params: Params = PARAMS) -> Cache:
    return made(methods.parse(text), rows, longest, new, params)


def made(
    config: CacheConfig, rows: int = 2, longest: int = LONGEST, new: int = STEPS, params: Params = PARAMS
) -> Cache:
    cache = CacheShape(config, params.config, rows, longest, new, jnp.float32).empty()
    return replace(cache, name="")  # so what has the same plan has the same programs


@dataclass(frozen=True)
class Run:
    """Caches and logits after the prompt and after every forced token."""

    caches: list[Cache]
    logits: list[np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Given(PrefillRunner):
    """A prefill whose caches have room for LONGEST tokens, whatever their own length."""

    def empty(self) -> Cache:
        return made(self.config, len(self.rows), params=self.params)

    def fill(self, cache: Cache, chunk: int = 0) -> tuple[Cache, jax.Array]:
        return decode_loop.prefill(self.params, cache, pad(self.rows, self.padded), fresh=True)


def begun(text: str, prompt: np.ndarray = PROMPT, params: Params = PARAMS) -> tuple[Cache, jax.Array]:
    """The cache after a prompt, and the next logits."""
    config, rows = methods.parse(text), [row[row >= 0].tolist() for row in prompt]
    read = Given(params=params, config=config, rows=rows, reserve=STEPS, cost=Cost(), length=prompt.shape[1])
    return read.run()


def run(
    text: str, prompt: np.ndarray = PROMPT, forced: np.ndarray = FORCED, poison: Any = None, params: Params = PARAMS
) -> Run:
    """After a prompt, tokens one by one (-1: the row pauses) as `generate` runs them."""
    cache, logits = begun(text, prompt, params)
    given = np.zeros((len(prompt), STEPS), np.int32)
    given[:, : forced.shape[1]] = np.maximum(forced, 0)
    state = decode_loop.Decoding.start(cache, logits, STEPS, forced=jnp.asarray(given))
    settings = sampling.make(len(prompt), params.config.vocab, seeds=range(len(prompt)), stop_ids=())
    caches, out = [cache], [np.asarray(logits)]
    for i in range(forced.shape[1]):
        if poison is not None and i % 10 == 0:
            cache = poison(cache)
        state = replace(
            state, cache=decode_loop.copied(cache), alive=jnp.asarray(forced[:, i] >= 0)
        )  # a block takes it over
        state = decode_loop.run_block(params, state, settings, jnp.int32(i + 1))
        cache = state.cache
        caches.append(cache)
        out.append(np.asarray(state.logits))
    return Run(caches, out)


@lru_cache(8)
def prompted(text: str) -> Cache:
    return begun(text)[0]


@lru_cache(8)  # the laws of a composition come one after the other
def shared(text: str, model: str = "llama") -> Run:
    return run(text, params=MODELS[model])


def flushed(caches: list[Cache]) -> list[int]:
    """Indices of caches whose first new token came right after a flush."""
    fill = [int(c.fill) for c in caches]
    return [i for i in range(1, len(fill)) if fill[i] <= fill[i - 1]]


def placed(pos: Any) -> np.ndarray:
    """bool[B,H,LONGEST]: the positions in pos i32[B,Hs,C], where -1 is none."""
    pos = np.broadcast_to(np.asarray(pos), (pos.shape[0], H, pos.shape[2]))
    out = np.zeros((*pos.shape[:2], LONGEST + 1), bool)
    np.put_along_axis(out, pos % (LONGEST + 1), True, 2)
    return out[..., :-1]


def held(tree: Cache, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """bool[B,H,LONGEST]: positions in the tiers, and positions in the recent window."""
    part = tree.layers[layer]
    coded = np.zeros((tree.rows, H, LONGEST + 1), bool)
    exact = np.zeros_like(coded)
    rows, heads = np.arange(tree.rows)[:, None, None], np.arange(H)[None, :, None]
    for tier in part.tiers:
        coded[..., :-1] |= placed(tier.seen_by(H))
    exact[rows, heads, np.asarray(part.recent.pos)[:, None]] = True
    return coded[..., :-1], exact[..., :-1]


def codes(cache) -> dict[tuple[int, ...], bytes]:
    """Bytes of every token in the tiers by (layer, row, head, position)."""
    out = {}
    for i, layer in enumerate(cache.layers):
        for n, tier in enumerate(layer.tiers):
            slots = tier.pos.shape[2]
            leaves = [np.asarray(x) for x in jax.tree.leaves((tier.k, tier.v))]
            leaves = [np.broadcast_to(x, (2, H, *x.shape[2:])) for x in leaves]
            pos = np.broadcast_to(np.asarray(tier.seen_by(H)), (2, H, slots))
            for b, h, c in zip(*np.nonzero(pos >= 0), strict=True):
                parts = [x[b, h, c * x.shape[2] // slots].tobytes() for x in leaves]
                out[i, b, h, pos[b, h, c]] = b"".join(parts) + bytes([n])
    return out


# ---------------------------------------------------------------- a dense model that is told which tokens to see


@partial(jax.jit, static_argnames=("grain", "sinks"))
def round_trip(codec: Any, x: jax.Array, grain: int, sinks: int) -> jax.Array:
    """decode(encode(x)) of x [B,H,LONGEST,D] behind its sinks, from which groups of tokens are counted."""
    n = x.shape[2]
    padded = jnp.pad(x[:, :, sinks:], ((0, 0), (0, 0), (0, (sinks - n) % grain), (0, 0)))
    return jnp.concatenate([x[:, :, :sinks], codecs.decode(codec, codecs.encode(codec, padded))[:, :, : n - sinks]], 2)


@jax.jit
def stored(codec: Any, code: Any, pos: jax.Array) -> jax.Array:
    """f32[B,H,LONGEST,D]: what a tier's codes say, by position i32[B,Hs,C]."""
    x = codecs.decode(codec, code)
    x = jnp.broadcast_to(x, (x.shape[0], H, *x.shape[2:]))
    pos = jnp.broadcast_to(pos, x.shape[:3])
    out = jnp.zeros((*x.shape[:2], LONGEST + 1, D))
    return jax.vmap(jax.vmap(lambda o, p, y: o.at[p].set(y)))(out, pos, x)[:, :, :-1]


def turned(tier: Any, x: np.ndarray, rope: Rope, inverse: bool = False) -> np.ndarray:
    """Keys by position, rotated by it or back, for a tier that keeps them un-rotated."""
    if not tier.pre_rope:
        return x
    return np.asarray(rope.rotate(jnp.asarray(x), jnp.arange(LONGEST)[None, None], inverse))


def as_stored(codec: Any, code: Any, pos: jax.Array, x: np.ndarray, pick: np.ndarray, sinks: int) -> np.ndarray:
    """x by position, and where `pick` what a tier has of it; one layer alone does not make a code of several."""
    if codec.layers > 1:
        return np.where(pick, np.asarray(stored(codec, code, pos)), x)
    mine = np.asarray(round_trip(codec, jnp.asarray(x), codec.grain, sinks))
    return coded_as(x, mine, np.asarray(stored(codec, code, pos)), pick, codec.grain)


def coded_as(x: np.ndarray, mine: np.ndarray, theirs: np.ndarray, pick: np.ndarray, grain: int) -> np.ndarray:
    """The cache's own rounding of x where `pick`, once it is seen to be as good as the replay's.

    Rounding is not continuous: where x, known to 1e-5, lies in the middle of two codes, either is right and both are
    as far from x, codes of an angle in the pair of channels that it turns; and where a group's low or step lies in the
    middle of two bfloat16, all of the group may differ by their last places. Both are rare: at most one number of a
    hundred, or the tokens of two grains, whose numbers may have common factors. Anywhere else the two must agree.
    """

    def off(y: np.ndarray) -> np.ndarray:
        return np.hypot(*np.split(y - x, 2, -1))

    apart = np.where(pick, abs(off(theirs) - off(mine)), 0)
    np.testing.assert_array_less(apart, 3 * float(jnp.finfo(jnp.bfloat16).eps) * abs(x).max() + 1e-6)
    assert (pick & (abs(theirs - mine) > 1e-4)).sum() <= max(0.01 * x.size, 2 * grain * x.shape[-1])
    return np.where(pick, theirs, x)


class Replay:
    """The dense model over exactly those tokens, coded or exact, that a cache says it holds."""

    def __init__(self, plan: Any, params: Params = PARAMS, prompt: np.ndarray = PROMPT):
        self.plan, self.params = plan, params
        logits, taps, self.states = dense_prompt(jnp.asarray(prompt), params)
        self.logits = np.asarray(logits[:, -1])
        self.seen = (prompt >= 0).sum(1, dtype=np.int32)
        self.k, self.v = ([self._by_position(np.asarray(t[j])) for t in taps] for j in (1, 2))
        self.taps: list[Any] = []

    def _by_position(self, x: np.ndarray) -> np.ndarray:
        out = np.zeros((2, H, LONGEST, D), np.float32)
        for row, n in enumerate(self.seen):
            out[row, :, :n] = x[row, :, x.shape[2] - n :]
        return out

    def step(self, token: np.ndarray, after: Cache) -> np.ndarray:
        ks, vs, sees = [], [], []
        for i in range(L):
            coded, exact = held(after, i)
            k, v, rope = self.k[i], self.v[i], self.params.config.ropes[i]
            sinks = self.plan[i].sinks - self.plan[i].predicted
            for tier, held_by in zip(self.plan[i].tiers, after.read[i].tiers, strict=True):
                tier, at = tier.of(held_by), held_by.seen_by(H)
                pick = placed(at)[..., None]
                k = as_stored(tier.k, held_by.k, at, turned(tier, k, rope, inverse=True), pick, sinks)
                k, v = turned(tier, k, rope), as_stored(tier.v, held_by.v, at, v, pick, sinks)
            ks.append(jnp.asarray(k))
            vs.append(jnp.asarray(v))
            sees.append(jnp.asarray(coded | exact))
        logits, taps, self.states = dense_step(
            jnp.asarray(token), jnp.asarray(self.seen), ks, vs, sees, self.states, self.params
        )
        self.taps = taps
        for i, (_, k, v, _) in enumerate(taps):
            for row in range(2):
                self.k[i][row, :, self.seen[row]] = np.asarray(k)[row, :, 0]
                self.v[i][row, :, self.seen[row]] = np.asarray(v)[row, :, 0]
        self.seen = self.seen + 1
        return np.asarray(logits)
