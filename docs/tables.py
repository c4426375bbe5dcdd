"""Tables of the pages, from results/ and the cards of what was trained. Run it: python docs/tables.py"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import exp
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jkv import methods, models
from jkv.aot import tpu
from jkv.bench.model_shapes import SHAPES
from jkv.eval.chunk_reuse import PLAIN, WHOLE, summed
from jkv.eval.pareto import wilson
from jkv.generation.receipt import moved_bytes
from jkv.methods.selection.attention_predictor import Forecast, Linear
from jkv.methods.selection.proxy_keys import Channels, Proxies
from jkv.prompts.allocation import CacheShape

ROOT = Path(__file__).parent.parent
LEARNED = ROOT / "jkv" / "methods" / "weights"
TASKS = ("prose", "code", "later", "needles")
ADVISED = {
    "a safe default, any model": "int4",
    "the same, fewer bytes (calibrated for SmolLM2)": "kvtc(bits=2.875)",
    "one document, many questions, any model": "kvzip(keep=0.5) | int4(rotate=True)",
    "the same in fewer bytes": "kvzip(keep=0.25) | int4(rotate=True)",
    "the same, by gates trained for SmolLM2": "utility(keep=0.25) | int4",
    "running text without questions, gates for SmolLM2": "trimkv(keep=0.25) | int4(rotate=True)",
}
BUDGETS, PAGE = (512, 256, 128), 16
ABOUT = {
    "attentionpredictor": "which keeps all and forecasts what to read",
    "compresskv": "whose heads were found to look for needles",
    "dms": "which learned what to forget",
    "kvzip": "which asks by reading the prompt again",
    "locret": "whose heads foresee what an answer looks at",
    "makeeach": "by trimkv's gates",
    "quest": "which keeps all and reads so many",
}
TRAINED = (
    "trimkv",
    "makeeach",
    "locret",
    "lococo",
    "dms",
    "attentiongate",
    "attentionpredictor",
    "quest",
    "snapkv",
    "streaming",
)
CHOICES = ("h2o", "quest", "linear", "conv", "best")  # of pages, in the card of attentionpredictor
CHIPS = ("v5e", "v6e")
PCIE = 25e9  # bytes a second of PCIe 4 x16, as it is reached
Rows = list[dict[str, Any]]


def whole(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def results(name: str) -> Rows:
    return whole(name)["rows"]


def code(cache: str) -> str:
    return f"`{cache}`".replace("|", "\\|")


def without_folders(text: str) -> str:
    """A composition or drafters without where their weights lie.

    >>> without_folders("kvtc(bits=4, sensitivity='made/here')"), without_folders("suffix | drafter(folder='there')")
    ('kvtc(bits=4)', 'suffix | drafter')
    """
    return re.sub(r"(, )?\b(folder|sensitivity)='[^']*'", "", text).replace("()", "")


def number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.1f}"


def line(*cells: str) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def by_text(row: dict[str, Any]) -> str:
    """A row's KL, and the least and the most of a text."""
    return f"{row['kl']:.2g} ({min(row['kl_by_text']):.2g} to {max(row['kl_by_text']):.2g})"


def sized(rows: Iterable[dict[str, Any]], value: str) -> dict[str, list[float]]:
    """The means of a value by method, for those that were measured at all of `BUDGETS`."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if match := re.fullmatch(r"(\w+)\((budget|pages)=(\d+)\)", row["cache"]):
            tokens = int(match[3]) * (PAGE if match[2] == "pages" else 1)
            found.setdefault(match[1], {}).setdefault(tokens, []).append(row[value])
    return {
        name: [sum(some[b]) / len(some[b]) for b in BUDGETS]
        for name, some in found.items()
        if set(BUDGETS) <= set(some)
    }


def alike(found: dict[str, list[float]]) -> list[str]:
    """A line of names and shares each: the best first, those that look alike together."""
    out: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(found, key=lambda name: (-sum(found[name]), name)):
        shown = tuple("0" if x == 0 else f"{x:.2f}" for x in found[name])
        out.setdefault(shown, []).append(name)
    return [line(", ".join(names), *shares) for shares, names in out.items()]


def advised() -> list[str]:
    """What to pick, and what it costs; shares of questions and needles are of few answers."""
    found = by_composition()
    return [
        line(
            wish,
            code(name),
            f"{size(rows):.1%}",
            *(f"{rows[task][0]['kl']:.2g}" for task in ("prose", "code")),
            *(share(rows[task]) for task in ("later", "needles")),
        )
        for wish, name, rows in ((wish, name, found[name]) for wish, name in ADVISED.items())
    ]


def needles() -> list[str]:
    """Needles given back, and those that give back few in one line."""
    found = sized(results("ruler"), "score")
    few = {name: shares for name, shares in found.items() if shares[0] < 0.25}
    many = {f"{name}, {ABOUT[name]}" if name in ABOUT else name: found[name] for name in found.keys() - few}
    least, most = ([f(x) for x in zip(*few.values(), strict=True)] for f in (min, max))
    ranges = ["0" if b == 0 else f"{a:.2g} to {b:.2f}" for a, b in zip(least, most, strict=True)]
    return [*alike(many), line(f"the other {len(few)} that evict or merge", *ranges)]


def later() -> list[str]:
    """Answers to later questions."""
    return alike(sized((row for row in results("multiturn") if row["mode"] == "reused"), "score"))


def peers() -> list[str]:
    """jkv beside kvpress, a row a method and way of comparing."""
    found: dict[str, Rows] = {}
    for row in results("kvpress"):
        found.setdefault(row["method"], []).append(row)

    def of(rows: Rows, key: str, digits: int) -> str:
        return " / ".join(f"{row[key]:.{digits}f}" for row in rows)

    return [
        line(name, of(rows, "overlap", 3), of(rows, "ppl_jkv", 2), of(rows, "ppl_kvpress", 2))
        for name, rows in found.items()
    ]


def codecs(of: str = "codecs") -> list[str]:
    """What codecs cost at the bits that they really take, the most bits first."""
    rows = {row["cache"]: row for row in results(of)}
    shares = lambda row: [a / b for a, b in zip(row["kl_by_text"], rows["int4"]["kl_by_text"], strict=True)]  # noqa: E731
    return [
        line(
            code(without_folders(name)),
            f"{row['bits'][0]:.3g} / {row['bits'][1]:.3g}",
            f"{row['kl']:.2g}",
            f"{min(shares(row)):.2g} to {max(shares(row)):.2g}",
            f"{row['ppl']:.2f}",
        )
        for name, row in sorted(rows.items(), key=lambda x: -sum(x[1]["bits"]))
    ]


def quantized() -> list[str]:
    """jkv's codecs beside transformers' quantized caches, the most bits first."""
    return [
        line(
            row["engine"],
            code(row["cache"]) if row["engine"] == "jkv" else row["cache"],
            f"{row['bits'][0]:.3g} / {row['bits'][1]:.3g}",
            by_text(row) if row["kl"] else "0",
            f"{row['ppl']:.2f}",
            number(row["ms"]),
        )
        for row in sorted(results("quantized"), key=lambda row: (-sum(row["bits"]), row["kl"]))
    ]


def by_composition() -> dict[str, dict[str, Rows]]:
    """Results of codes, and of evictions with codes, on four tasks."""
    found: dict[str, dict[str, Rows]] = {}
    for task in TASKS:
        for row in results(f"compositions/{task}"):
            found.setdefault(row["cache"], {}).setdefault(task, []).append(row)
    return found


def share(rows: Rows) -> str:
    return f"{sum(row['score'] for row in rows) / len(rows):.2f}"


def size(rows: dict[str, Rows]) -> float:
    """Bytes after 2,048 tokens, relative to the full cache."""
    return rows["prose"][0]["bytes"] / rows["prose"][0]["bytes_full"]


def compositions() -> list[str]:
    """Codes, and evictions with codes, on four tasks: the most bytes first, and - for what was not measured."""

    def kl(rows: Rows) -> str:
        (row,) = rows
        return by_text(row)

    shown = {name: rows for name, rows in by_composition().items() if "prose" in rows and name != "full"}
    return [
        line(
            code(name),
            f"{size(rows):.1%}",
            *((kl if task in TASKS[:2] else share)(rows[task]) if task in rows else "-" for task in TASKS),
        )
        for name, rows in sorted(shown.items(), key=lambda x: -size(x[1]))
    ]


def after() -> list[str]:
    """Perplexity after 2,048 tokens of what keeps every token, and what its KL promises of it."""
    kinds = [{row["cache"]: row for row in results(f"compositions/{task}")} for task in ("prose", "code")]

    def cells(rows: dict[str, dict[str, Any]], name: str) -> list[str]:
        if name not in rows:
            return ["-", "-", "-"]
        row, full = rows[name], rows["full"]
        return [f"{row['ppl']:.2f}", f"{row['ppl'] / full['ppl'] - 1:+.1%}", f"{exp(row['kl']) - 1:+.1%}"]

    named = [name for name, row in kinds[0].items() if row["kept"] == 1]
    return [
        line(code(name), f"{kinds[0][name]['bits'][0]:.3g}", *(x for rows in kinds for x in cells(rows, name)))
        for name in sorted(named, key=lambda name: -kinds[0][name]["bits"][0])
    ]


def beside() -> list[str]:
    """jkv beside transformers."""
    what = {
        "decode": "decode, ms/token after {:,} tokens",
        "prefill": "prefill, ms for {:,} tokens",
        "prefill in bfloat16": "the same with bfloat16 products in jkv",
    }
    return [
        line(
            what[r["what"]].format(r["tokens"]),
            *(number(r[x]) for x in ("jkv", "other")),
            f"{r['ratio']:.2f}",
            number(r["floor"]),
        )
        for r in results("compare")
    ]


def draws() -> list[str]:
    """What drawing a token takes, by words and rows."""
    rows = results("sampling")
    sizes = dict.fromkeys((r["vocab"], r["batch"]) for r in rows)
    ms = {(r["sampling"], r["vocab"], r["batch"]): f"{r['ms']:.2f}" for r in rows}
    return [line(way, *(ms[way, *size] for size in sizes)) for way in dict.fromkeys(r["sampling"] for r in rows)]


def drafts() -> list[str]:
    """What drafts save, by kind of text."""
    names = {
        "quote": "a text, repeated",
        "code": "code, repeated with another name",
        "json": "records, with one field more",
        "prose": "a story, drawn at 0.7",
        "again": "a text, after nearly the same answer",
    }
    return [
        line(
            names[r["kind"]],
            code(without_folders(r["draft"])),
            *(f"{r[x]:.1f}" for x in ("plain_ms", "ms")),
            f"{r['speedup']:.2f} ({min(r['speedups']):.2f} to {max(r['speedups']):.2f})",
            f"{r['tokens_a_pass']:.2f}",
        )
        for r in results("drafts")
    ]


def beside_llama() -> list[str]:
    """A token, and a prompt, beside llama.cpp on the same file."""
    out = []
    for name in ("float32", "int8", "prefill"):
        found = whole(f"llama/{name}")
        for r in found["rows"]:
            what = f"{r['context']:,}" + " (the prompt itself)" * (r["what"] == "prefill")
            theirs = f"{number(r['peer']['ms'])} ({r['peer']['cache']})"
            weights = found["meta"]["weights"] or found["meta"]["dtype"]
            out.append(line(weights, f"`{r['cache']}`", what, number(r["ms"]), theirs, f"{r['ratio']:.2f}"))
    return out


def loaded() -> list[str]:
    """Servers under load: beside each other, and for ten minutes."""
    pair = lambda x, of, form: f"{x['p50'] / of:{form}} ({x['p99'] / of:{form}})"  # noqa: E731
    out = []
    for name in ("beside", "ten_minutes"):
        found = whole(f"serve/{name}")
        for r in found["rows"]:
            mib = r["mib"][0], max(r["mib"]), r["mib"][-1]
            counts = f"{found['meta']['seconds'] / 60:.0f}", f"{r['answers']:,}", str(r["lost"])
            times = pair(r["first_ms"], 1e3, ".1f"), pair(r["token_ms"], 1, ".0f")
            out.append(
                line(f"`{r['server']}`", *counts, f"{r['tokens_per_s']:.1f}", *times, ", ".join(f"{x:,}" for x in mib))
            )
    return out


def waiting() -> list[str]:
    """How long the compiler keeps a user waiting."""
    return [
        line(code(r["cache"]), r["how"], *(f"{r[x]:.1f}" for x in ("token_s", "first_s", "all_s")), f"{r['mib']:,.0f}")
        for r in results("compile")
    ]


def forms() -> list[str]:
    """What weights below 16 bits take, what they cost, and how fast they are."""
    rows = results("weights")
    return [
        line(
            code(r["weights"]),
            r["held"],
            f"{r['bytes'] / 1e6:,.1f}",
            "-" if r["kl"] is None else f"{r['kl']:.2g}",
            f"{r['ms']:.1f}",
            f"{r['ms'] / rows[0]['ms']:.2f}",
            f"{r['prefill_s']:.2f}",
        )
        for r in rows
    ]


def blocks() -> list[str]:
    """What weights in blocks say, beside those in codes."""
    return [
        line(
            code(r["weights"]),
            f"{r['bytes'] / 1e6:,.1f}",
            f"{r['ppl']:,.2f}",
            "-" if r["kl"] is None else f"{r['kl']:.2g}",
        )
        for r in results("bitstack")
    ]


def latents() -> list[str]:
    """A model with latents for keys and values, before its training and after some."""
    rows = results("xecomla")
    return [
        line(
            "the model" if r["rank"] is None else f"{r['rank']} and {r['rope_dim']}",
            f"{r['numbers']} ({rows[0]['numbers'] / r['numbers']:.1f})",
            f"{r['steps']} ({r['tokens']:,})",
            number(r["ppl"]),
            f"{r['kl']:.2g}",
        )
        for r in rows
    ]


def jobs() -> list[str]:
    """Jobs of many prompts beside a loop of transformers."""
    rows = sorted(results("batch"), key=lambda r: (r["shared"], r["ratio"]))
    name = lambda r: r["engine"].replace(", no sharing", ", each prompt whole")  # noqa: E731
    common = lambda r: f"{r['shared']} shared tokens: " if r["shared"] else ""  # noqa: E731
    return [line(common(r) + name(r), f"{r['tokens_per_s']:.1f}", f"{r['ratio']:.2f}") for r in rows]


def commons() -> list[str]:
    """Jobs whose prompts begin alike, by where that beginning is held."""
    speed, mib = (lambda r: f"{r['tokens_per_s']:.1f}"), lambda r: f"{r['cache_bytes'] / 2**20:.1f}"
    return [line(code(r["cache"]), r["held"], mib(r), speed(r)) for r in results("common")]


def stages() -> list[str]:
    """The most memory of a job's processes, and what a row's cache takes on its way."""
    names = {"all": "one process", "prefill": "the worker that prefills", "decode": "the worker that decodes"}
    names["parent"] = "their parent, which holds the weights too"
    found = {r["process"]: r["peak_bytes"] for r in results("stages")}
    handed = whole("stages")["meta"]["handed_bytes"]
    lines = [line(name, f"{found[key] / 2**20:,.0f}") for key, name in names.items()]
    return [*lines, line("handed over, a row", f"{handed / 2**20:.1f}")]


def packed() -> list[str]:
    """Texts by a model's probabilities, through caches, beside common compressors."""
    rows = results("pack")
    return [
        line(
            code(r["cache"]) if r["by"] == "jkv" else r["by"],
            *(
                f"{x['bytes']:,} ({8 * x['bytes'] / x['text_bytes']:.2f})"
                for x in rows
                if (x["by"], x.get("cache")) == (r["by"], r.get("cache"))
            ),
        )
        for r in rows
        if r["text"] == rows[0]["text"]
    ]


def held() -> list[str]:
    """Bits of a byte of text, and what it takes in a cache."""
    prose, code_rows = ({r["cache"]: r for r in results(name) if "cache" in r} for name in ("tokens", "tokens_stdlib"))
    cells = lambda r: (f"{r['bits_byte']:.2f}", f"{r['kv_byte']:,.0f}")  # noqa: E731
    return [line(code(name), *cells(r), *cells(code_rows[name])) for name, r in prose.items()]


def recurrent() -> list[str]:
    """What a model without attention takes on chips, by the compiler's schedule."""
    lines = []
    for model in ("130m", "780m", "2.7b"):
        for chip in CHIPS:
            prompt, step = results(f"plan/mamba2-{model}-{chip}")
            flops, bandwidth = tpu.RATES[chip]
            seconds = [x["cycles"] / (flops / tpu.PER_CYCLE[chip]) for x in (prompt, step)]
            done = prompt["flops"] / seconds[0]
            needed = step["weights"] + step["bytes"]
            lines.append(
                line(
                    model.upper(),
                    chip,
                    f"{prompt['flops'] / 1e9:,.0f}",
                    f"{seconds[0] * 1e3:.1f}",
                    f"{done / 1e12:.0f}",
                    f"{done / flops:.0%}",
                    f"{step['moved'] / 2**20:,.0f}",
                    f"{needed / 2**20:,.0f}",
                    f"{seconds[1] * 1e3:.2f}",
                    f"{needed / seconds[1] / bandwidth:.0%}",
                )
            )
    return lines


def trained() -> list[str]:
    """What is learned, by three measures, and some that are not beside it."""
    measured = [(sized(results("fidelity"), "kl"), 3), (sized(results("ppl_stdlib"), "ppl"), 2)]
    measured.append((sized(results("ruler"), "score"), 2))
    return [
        line(name, *(" / ".join("0" if x == 0 else f"{x:.{n}f}" for x in found[name]) for found, n in measured))
        for name in TRAINED
    ]


def unseen() -> list[str]:
    """Perplexity on texts that no training has seen, by budget."""
    python, vim = ({row["cache"]: row for row in results(f"heldout/{name}")} for name in ("pydoc", "vim"))
    budget = lambda cache: int((re.search(r"budget=(\d+)", cache) or "00")[1])  # noqa: E731
    lines = []
    for cache in sorted(python.keys() - {"full"}, key=lambda x: (-budget(x), python[x]["ppl"])):
        row, other = python[cache], vim.get(cache)
        kept = dict.fromkeys(f"{x['kept']:.1%}".replace(".0%", "%") for x in (row, other) if x)
        smaller, ppl = row["bytes_full"] / row["bytes"], "-" if other is None else f"{other['ppl']:.2f}"
        lines.append(line(code(cache), ", ".join(kept), f"{smaller:.2f}", f"{row['ppl']:.2f}", ppl))
    return lines


def found() -> list[str]:
    """Needles that a cache still finds, asked for after it was compressed, with intervals of 95%."""
    lines, rows = [], {(row["cache"], row["task"]): row for row in results("heldout/needles")}
    for cache in dict.fromkeys(cache for cache, _ in rows):
        some = [rows[cache, f"ruler/{task}"] for task in ("niah_single_2", "niah_multikey_1")]
        low_high = [wilson(row["score"], row["samples"]) for row in some]
        shares = [f"{r['score']:.2f} ({a:.2f} to {b:.2f})" for r, (a, b) in zip(some, low_high, strict=True)]
        smaller = some[0]["bytes_full"] / some[0]["bytes"]
        lines.append(line(code(cache), f"{some[0]['kept']:.1%}".replace(".0%", "%"), f"{smaller:.2f}", *shares))
    return lines


def foreseen() -> list[str]:
    """Perplexity by how many texts a gate of kvzap has read, its teacher last."""
    ppl = {row["cache"]: row["ppl"] for name in ("kvzap", "pydoc") for row in results(f"heldout/{name}")}
    lines = []
    for says, budget in (("a quarter", 336), ("an eighth", 168)):
        gates = [f"kvzap(budget={budget}, window=32, sinks=4, gate='gates/kvzap{n}')" for n in (6, 12, 24, "")]
        lines.append(line(says, *(f"{ppl[x]:.2f}" for x in (*gates, f"kvzip(budget={budget})"))))
    return lines


def forecast() -> list[str]:
    """Attention found in so many pages, knowing everything."""
    found = json.loads((LEARNED / "smollm2-135m-attentionpredictor" / "card.json").read_text())["eval"]["recovered"]
    names = {"linear": "attentionpredictor, linear", "conv": "attentionpredictor", "best": "the best choice"}
    return [line(names.get(x, x), *(f"{share:.3f}" for share in found[x].values())) for x in CHOICES]


def reading() -> list[str]:
    """Attention found in a cache, by the tokens that each head reads: the first cache of so many says the number."""
    groups: dict[str, Rows] = {}
    for row in results("attention"):
        if match := re.fullmatch(r"h2o\(budget=(\d+)\)", row["cache"]):
            groups[match[1]] = []
        groups[[*groups][-1]].append(row)
    return [line(tokens, *(f"{r['recovered']:.3f}" for r in rows)) for tokens, rows in groups.items()]


def selectors() -> list[str]:
    """Attention in what selectors pick of a full cache, the most first."""
    rows = sorted(results("selectors"), key=lambda r: -r["recovered"])
    shares = ("recovered", "tokens_share", "bytes_share")
    return [line(code(r["cache"]), f"{r[shares[0]]:.3f}", *(f"{r[x]:.1%}" for x in shares[1:])) for r in rows]


def eighth() -> list[str]:
    """What caches lose of which a step reads an eighth."""
    prose, of_code = ({r["cache"]: r["ppl"] for r in results(f"selectors_ppl_{x}")} for x in ("pydoc", "stdlib"))
    scores: dict[str, list[float]] = {}
    for row in results("selectors_ruler"):
        scores.setdefault(row["cache"], []).append(row["score"])
    share = lambda cache: sum(scores[cache]) / len(scores[cache])  # noqa: E731
    return [line(code(x), f"{prose[x]:.2f}", f"{of_code[x]:.2f}", f"{share(x):.2f}") for x in prose]


def dense_layers() -> list[str]:
    """Perplexity by how many of the lowest layers read everything, the others the keys of highest logits."""
    lines = []
    for name, corpus in (("prose", "pydoc"), ("code", "stdlib")):
        full = next(r["ppl"] for r in results(f"selectors_ppl_{corpus}") if r["cache"] == "full")
        found = [r["ppl"] for r in results(f"selectors_layers_{corpus}")]
        lines.append(line(name, *(f"{x:.2f} ({x / full - 1:+.1%})" for x in found)))
    return lines


def families() -> list[str]:
    """Every family beside transformers."""
    return [
        line(
            f"`{row['model']}`",
            f"{row['largest']:.1f}",
            f"{row['difference']:.1e}",
            f"{row['equal']} of {row['tokens']}",
            row["transformers"],
        )
        for row in results("families")
    ]


FAR = (
    "full(host='all')",
    "int8(host='all')",
    "int8 | quest(pages=64, page=64, dense_layers=0, host='all')",
    "int8 | quest(pages=64, page=64, dense_layers=0, host='values')",
    "int8 | icecache(pages=64, page=64, host='values')",
    "int8 | lrqk(tokens=4096, page=64, host='values')",
    "int8 | lrqk(tokens=4096, page=64, host='all')",
    "int8 | infinigen(tokens=4096, page=64, directions=26, dense_layers=0, host='values')",
    "int8 | attentionpredictor(pages=64, page=64, dense_layers=0, host='values')",
    "int8 | attentionpredictor(pages=64, page=64, dense_layers=0, host='all')",
)


def moves() -> list[str]:
    """Llama 3.1 8B, one row of 131,072 tokens in bfloat16, from shapes: where bytes are and what a step moves."""
    out, model = [], models.read_config(SHAPES["llama-3.1-8b"])
    for text in FAR:
        config = methods.parse(text)
        if isinstance(config.select, Forecast):  # any weights: its shapes are the same for all models
            config = replace(config, select=replace(config.select, net=Linear(weights=jnp.ones(3))))
        if isinstance(config.select, Proxies):  # any directions, a quarter of them as `jkv calibrate channels` finds
            pairs, directions = (model.layers, model.heads, model.head_dim // 2), (model.head_dim, model.head_dim // 4)
            known = Channels(agreement=jnp.ones(pairs), skew=jnp.ones((*pairs[:2], *directions)))
            config = replace(config, select=replace(config.select, known=known))
        cache = CacheShape(config, model, 1, 131072, 256, jnp.bfloat16).shapes()
        device, host, moved = cache.nbytes - cache.on_host, cache.on_host, moved_bytes(cache)
        cells = f"{device / 2**30:.2f}", f"{host / 2**30:.2f}", f"{moved / 2**20:,.0f}", f"{1e3 * moved / PCIE:,.1f}"
        out.append(line(code(text), *cells))
    return out


def hot() -> list[str]:
    """Runs of SmolLM2."""
    out = []
    for row in results("placement"):
        asked = row["hits"] + row["misses"]
        found = (f"{row['hits']:,}", f"{row['misses']:,}") if asked else ("", "")
        sized = (f"{row.get(x, 0) / 2**20:.2f}" for x in ("device", "host", "disk", "moved"))
        time = f"{1e3 * row['moved'] / PCIE:.2f}"
        out.append(line(code(row["cache"]), *sized, time, *found, "yes" if row["same"] else "no"))
    return out


def evicted() -> list[str]:
    """What a store finds of a trace, by its order of eviction."""
    rows = {(r["evict"], r["blocks"]): r for r in results("store")}
    share = lambda row: "-" if row["alike"] is None else f"{row['alike']:.0%}"  # noqa: E731
    return [
        line(
            f"{blocks:,}",
            *(f"{rows[name, blocks]['hits']:.1%}" for name in ("lru", "lpc", "belady")),
            *(share(rows[name, blocks]) for name in ("lpc", "belady")),
        )
        for blocks in dict.fromkeys(blocks for _, blocks in rows)
    ]


def coded() -> list[str]:
    """Records that are rounded: by text and codec."""
    texts = {"pydoc": "Python's manual", "stdlib": "code"}
    return [
        line(texts[r["corpus"]], code(r["codec"]), f"{r['bits']:.2f}", f"{r['kl']:.2g} ± {r['kl_se']:.1g}")
        for r in results("transit")
    ]


def reused(bed: str, *names: str) -> list[str]:
    """What passages cost and save, by cache and renewal; names: of what a row of this bed says besides."""
    mean = lambda pair, form: "" if pair is None else f"{pair[0]:{form}} ± {pair[1]:.1g}"  # noqa: E731
    more = {
        "edits": lambda r: str(r["edits"]),
        "score": lambda r: f"{r['score']:.2f}",
        "fewer": lambda r: mean(r["fewer"], "+.2f") if r["renew"] != WHOLE else "",
    }
    return [
        line(
            code(r["cache"]),
            r["renew"] if r["renew"] == WHOLE else f"`{r['renew']}`",
            *(more[x](r) for x in names),
            str(r["samples"]),
            f"{r['read']:.0%}",
            "" if r["renew"] == WHOLE else mean(r["kl"], ".2g"),
            "" if r["renew"] in (WHOLE, PLAIN) else mean(r["less"], ".2g"),
        )
        for r in summed(results(f"reuse/{bed}"))
        if r["renew"] != WHOLE or bed != "edits"
    ]


def first() -> list[str]:
    """Milliseconds to the first token, alone on the machine."""
    rows = results("reuse/times")
    ms = {r["renew"] if r["renew"] == WHOLE else code(r["renew"]): r["first_ms"] for r in rows}
    return [line(renew, f"{x:,.0f}", f"{x / ms[WHOLE]:.2f}") for renew, x in ms.items()]


def second() -> list[str]:
    """Caches of a second model, the largest first."""
    rows = sorted(results("gemma"), key=lambda r: -r["bytes"])
    whole = next(r["bytes"] for r in rows if r["cache"] == "full")
    return [
        line(
            code(r["cache"]),
            f"{r['bytes'] / whole:.1%}",
            by_text(r),
            f"{r['ppl']:.2f}",
        )
        for r in rows
        if r["cache"] != "full"
    ]


def sinks() -> list[str]:
    """Caches with and without what they keep exact, or read, for sure: the most that it gains first."""
    texts = [{r["cache"]: r for r in results(f"sinks/{name}")} for name in ("pydoc", "stdlib")]
    measured = set(texts[0]) & set(texts[1])
    pairs = {name: x for x in texts[0] if (name := with_first(x)) != x and {name, x} <= measured}

    def kl(rows: Sequence[dict[str, Any]]) -> list[float]:
        return [x for r in rows for x in r["kl_by_text"]]

    found = []
    for name, without in pairs.items():
        old, new = (kl([rows[x] for rows in texts]) for x in (without, name))
        size = texts[0][name]["bytes"] / texts[0][without]["bytes"] - 1
        found.append((sum(new) / sum(old), line(code(name), *map(spread, (old, new)), f"{size:+.2%}")))
    return [shown for _, shown in sorted(found)]


def with_first(cache: str) -> str:
    """The row of a cache without its sinks, or without its first page.

    >>> with_first("palu(sinks=0)"), with_first("quest(pages=16, sinks=0)"), with_first("kivi")
    ('palu', 'quest(pages=16)', 'kivi')
    """
    return re.sub(r"(, )?sinks=0", "", cache).replace("()", "")


def spread(x: Sequence[float]) -> str:
    """The mean, and the least and the most."""
    return f"{sum(x) / len(x):.2g} ({min(x):.2g} to {max(x):.2g})"


def by_layer() -> list[str]:
    """A plan beside one codec in every layer, on prose and on code."""
    texts = [{r["cache"]: r for r in results(f"layers/heldout-{name}")} for name in ("pydoc", "stdlib")]
    return [
        line(
            code(cache),
            "{:.2f} / {:.2f}".format(*texts[0][cache]["bits"]),
            *(f"{rows[cache][x]:{form}}" for x, form in (("kl", ".2g"), ("ppl", ".2f")) for rows in texts),
        )
        for cache in texts[0]
    ]


def head(*cells: str) -> str:
    return f"{line(*cells)}\n{'|---' * len(cells)}|\n"


SIZES = ("512 tokens, 74%", "256, 37%", "128, 18%")
TABLES: dict[str, dict[str, Callable[[], Sequence[str]]]] = {
    "README.md": {
        head("you want", "cache", "bytes", "KL, prose", "KL, code", "later questions", "needles found"): advised
    },
    "docs/batch.md": {
        head("", "tokens/s", "ratio"): jobs,
        head("cache", "the beginning is held", "MiB", "tokens/s"): commons,
        head("6 prompts of 1,400 to 1,450 tokens", "MiB"): stages,
    },
    "docs/families.md": {
        head("model", "largest logit", "largest difference", "greedy tokens equal", "transformers"): families
    },
    "docs/placement.md": {
        head("cache", "device GiB", "host GiB", "a step moves MiB", "ms at 25 GB/s"): moves,
        head(
            *("cache", "device MiB", "host MiB", "disk MiB", "a step moves MiB", "ms at 25 GB/s", "hits", "misses"),
            "same tokens",
        ): hot,
    },
    "docs/quality.md": {
        head("cache of Gemma 3 270M", "bytes of its full cache", "KL (by text)", "perplexity"): second,
        head("cache", "KL without (by text)", "KL with", "bytes"): sinks,
        head(
            "cache", "bits (keys / values)", "KL, prose", "KL, code", "perplexity, prose", "perplexity, code"
        ): by_layer,
        head("", "half of the tokens", "a quarter", "an eighth"): needles,
        head("", *SIZES): later,
        head("selector", "attention", "of the older tokens", "of their bytes, by tiles"): selectors,
        head("an eighth read by", "perplexity, prose", "code", "needles"): eighth,
        head("layers that read everything", "0", "2", "5", "10", "15", "20", "25"): dense_layers,
        head("codec", "bits, keys / values", "KL", "of int4's, by text", "perplexity"): codecs,
        head("codec of Gemma 3 270M", "bits, keys / values", "KL", "of int4's, by text", "perplexity"): partial(
            codecs, "gemma_codecs"
        ),
        head("codec", "bits", "prose", "of full", "by KL", "code", "of full", "by KL"): after,
        head("cache", "bytes", "KL, prose (by text)", "KL, code", "later questions", "needles"): compositions,
        head("method", "tokens in common", "perplexity jkv", "perplexity kvpress"): peers,
        head("", "cache", "bits, keys / values", "KL (by text)", "perplexity", "ms a token"): quantized,
        head("latent and rotated key", "numbers (times smaller)", "steps (tokens)", "perplexity", "KL"): latents,
        head("by", "prose: bytes (bits a byte)", "code: bytes (bits a byte)"): packed,
        head(
            *("cache", "bits a byte, prose", "bytes of cache a byte", "bits a byte, code"),
            "bytes of cache a byte of code",
        ): held,
    },
    "docs/serve.md": {
        head(
            *("server", "minutes", "answers", "lost", "tokens/s", "first token, s (99%)", "ms a token (99%)"),
            "MiB at first, most, last",
        ): loaded,
        head("blocks of 64 tokens", "lru", "lpc", "belady", "lpc needs", "belady needs"): evicted,
        head("text", "codec", "bits of a number", "KL"): coded,
        head("cache", "passages", "needles", "fewer", "prompts", "read", "KL to read whole", "less than pie"): partial(
            reused, "documents", "score", "fewer"
        ),
        head("passages", "first token, ms", "of reading it whole"): first,
        head("cache", "passages", "edits", "prompts", "read", "KL to read whole", "less than pie"): partial(
            reused, "edits", "edits"
        ),
        head("cache", "passages", "prompts", "read", "KL to read whole", "less than pie"): partial(reused, "agents"),
    },
    "docs/speed.md": {
        head("", "jkv ms", "transformers ms", "ratio", "floor ms"): beside,
        head("sampling, ms", "49,152 words, 1 row", "16 rows", "128,256 words, 1 row", "16 rows"): draws,
        head("cache", "compiled", "first token, s", "first block, s", "all, s", "MiB of programs"): waiting,
        head("weights of jkv", "cache", "tokens before", "jkv", "llama.cpp (its cache)", "ratio"): beside_llama,
        head("text", "drafts", "plain, ms a token", "ms a token", "speed-up (of each prompt)", "tokens a pass"): drafts,
        head("`weights=`", "held as", "MB", "KL", "ms a token", "of float32's", "prompt, s"): forms,
        head("`weights=`", "MB", "perplexity", "KL"): blocks,
    },
    "docs/tpu.md": {
        head(
            *("", "", "prefill GFLOP", "ms", "TFLOP/s", "of the peak", "a step moves MiB", "weights and states MiB"),
            *("ms", "of the bandwidth"),
        ): recurrent
    },
    "docs/training.md": {
        head("texts of 448 tokens", "6", "12", "24", "48", "kvzip"): foreseen,
        head("at half / a quarter / an eighth of 1,024 tokens", "KL, prose", "perplexity, code", "needles"): trained,
        head("", "tokens kept", "times smaller", "Python's", "Vim's"): unseen,
        head("", "tokens kept", "times smaller", "one key", "one of four keys"): found,
        head("pages", "4", "8", "16", "32"): forecast,
        head(
            *("tokens read of each head", "h2o", "quest", "attentionpredictor, linear", "attentionpredictor"),
            "sentencekv",
        ): reading,
    },
}


def filled(name: str) -> str:
    """The page with the tables that the results make."""
    text = (ROOT / name).read_text()
    for top, made in TABLES[name].items():
        before, table = text.split(top)
        rest = table.splitlines(keepends=True)
        after = next((i for i, row in enumerate(rest) if not row.startswith("|")), len(rest))
        text = "".join([before, top, *(f"{row}\n" for row in made()), *rest[after:]])
    return text


if __name__ == "__main__":
    for name in TABLES:
        (ROOT / name).write_text(filled(name))
