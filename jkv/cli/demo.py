"""A two-minute demo: one long prompt with a compressed cache, compared with the full cache.

Run `python -m jkv.cli.demo`. The answer streams first; the comparison takes about a minute more.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from jkv.cli.app import MODEL, one_line, show, status

if TYPE_CHECKING:
    from jkv.generation.receipt import Receipt

CACHE = "snapkv(budget=512) | int4"
NEW = 64
ANSWER = "Marigold"
QUESTION = "What is the name of the ferry that crosses from Tarn Harbour to Low Island?"

NOTES = """
Tarn Harbour is a small town with one street, a chapel and a stone pier. The ferry that crosses from Tarn Harbour to
Low Island is named the Marigold. She is forty feet long, painted yellow, and leaves twice a day whenever the wind
allows. Most of the people she carries are schoolchildren, who do their homework on the crossing, and a vet who comes
for the sheep on Thursdays. When the fog is thick the skipper rings a brass bell by hand, and somebody on the pier
always rings one back.

A loaf of rye bread begins the evening before. Mix a spoon of old dough with a cup of flour and a cup of warm water,
cover the bowl with a cloth, and leave it on the shelf above the stove. By morning the top is domed and full of holes,
and it smells of apples. Stir in the salt, more flour and a handful of caraway seeds. The dough will be sticky, more
like mortar than like anything that could be kneaded, and it is a mistake to add flour until it behaves. Scrape it
into a tin, smooth it with a wet hand, and wait until it has risen by half. It bakes for an hour, and is best on the
second day, cut thin.

The clockmaker on Orchard Lane kept every key that had ever been left in her shop. They hung from nails on the back
wall in no order that anyone could see, some with paper tags, most without. Now and then a customer came in with a
clock bought at an auction and no way to wind it. She would look at the hole in the dial for a while, walk to the
wall, and take down a key, and it nearly always fitted. Asked how she did it, she said that clocks are made by people,
that people have habits, and that a key remembers the hand that cut it. Her apprentice, who was fond of figures,
measured all the keys one winter and wrote their sizes in a ledger. He never needed it, because she never forgot one.

Peat forms slowly, about a millimetre in a year, where the ground is too wet for dead plants to rot. Moss grows on top
of moss, and the weight of the new presses the water out of the old. A bog four metres deep has been growing since
before there were ploughs. Because so little air reaches the lower layers, things that fall in are preserved: pollen,
butter in wooden tubs, the planks of a road that sank while it was being used. People who study them take out a long
thin core with a hollow drill, cut it into slices, and count the grains of pollen in each one under a microscope. From
these counts they can tell when the elms died, when barley was first sown nearby, and in which century the rain
increased.

The orchestra rehearsed in a former bus depot, which had the advantage of being cheap and the disadvantage of being a
bus depot. Pigeons lived in the girders. In wet weather the roof leaked in four places, and the cellos sat around the
buckets as if around a fire. The conductor had chosen a long slow symphony for the spring concert, full of pauses, and
in every pause one could hear the drops. After some weeks the players no longer noticed. On the night of the concert,
in a proper hall with carpets and a dry ceiling, they reached the first pause and found it so empty that the second
oboe, without thinking, came in a whole bar too early.

To mend a dry stone wall, first take down more of it than has fallen. Lay the stones out on the grass by size, the
largest nearest, so that everything can be seen at a glance. The two faces of the wall lean towards each other, and
the space between is packed with small rubble, placed and not thrown. Every stone should touch its neighbours, sit
with its length into the wall, and cross the joint of the two below it. Halfway up comes a row of long stones that
reach from one face to the other and tie them together. A good waller never puts a stone down twice: what has been
picked up is turned in the hand until there is a place for it. Such a wall needs no mortar, gives shelter to wrens and
weasels, and will stand for two hundred years if the sheep are kept from climbing on it.

The night train left at ten past eleven and was never full. In the dining car a waiter with a grey moustache laid
every table, although he knew that at most three would be used, because an unlaid table, he said, makes people feel
that they have come too late. Outside, the lights of the suburbs thinned out into single windows and then into
nothing. A student was learning irregular verbs under her breath. Two brothers were playing chess on a folding board
with a magnet in every piece, and they had agreed that whoever lost would carry both of the suitcases. Towards four in
the morning the train stopped for a long time at a station without a name, somebody walked along it tapping the wheels
with a hammer, and listening to each of them like a doctor, and then it went on towards the mountains.

The library at the end of the tram line lends out more than books. Behind the desk there are shelves of cake tins in
the shapes of animals, a pair of binoculars, three accordions, a sewing machine and a tent for six. Each thing has a
card in a paper pocket, stamped with the date on which it is due. The fines are small, and nobody can remember that
one was ever paid, since the librarian prefers to be told what was done with the thing instead. She has heard about a
birthday with a cake like a hedgehog, about an owl that was seen from the roof of the hospital, and about a family of
six who slept in the tent for one hour, in the rain, and then walked home laughing.

Salt was once made on this coast by letting the sea into wide shallow pans at the spring tide and waiting for the sun.
In a good summer a crust formed within nine days. Women raked it into heaps, carried it in baskets to the sheds, and
let it drain until the autumn, when the boats came. In a wet summer there was no salt at all and the pans were used
for keeping eels. The last of them was abandoned when the railway brought cheap rock salt from the mines inland, and
what remains are rectangles of paler grass, which can be seen best from the hill in the evening, when the light comes
in low from the side.
"""


def prompt() -> list[dict[str, str]]:
    """Build a chat prompt of about 1,500 tokens: the fact is in the first passage, the question after the last.

    >>> ANSWER in prompt()[0]["content"][:400], prompt()[0]["content"].endswith(QUESTION)
    (True, True)
    """
    text = "\n\n".join(" ".join(passage.split()) for passage in NOTES.strip().split("\n\n"))
    return [{"role": "user", "content": f"Read these notes.\n\n{text}\n\nAnswer from the notes: {QUESTION}"}]


def table(own: Receipt, full: Receipt) -> Table:
    """Tabulate both receipts. Speed is left out, because one run each, compilation included, does not measure it."""
    out = Table(title=f"{own.tokens_prompt:,} tokens of prompt, {own.tokens_new} generated")
    out.add_column("")
    out.add_column(own.config, justify="right", style="bold cyan")
    out.add_column(full.config, justify="right")

    def row(name: str, form: str, *values: float) -> None:
        out.add_row(name, *(form.format(x) for x in values))

    row("bytes of the cache", "{:,}", own.bytes_kept, full.bytes_full)
    row("times smaller", "{:.1f}", own.ratio, 1)
    row("tokens kept per head", "{:,.0f}", float(np.mean(own.tokens_kept)), float(np.mean(full.tokens_kept)))
    row("KL to the full cache, nats", "{:.4f}", own.kl or 0.0, 0)
    same = own.divergence == -1
    out.add_row("first other token", "none" if same else f"{own.divergence}", "none")
    return out


def main() -> None:
    """Run both caches on one prompt; print the answer as it streams, the table, and a one-line summary."""
    import jkv

    with status("loading the model"):
        params = jkv.load(MODEL)
    print(f"[{len(NOTES.split()):,} words of notes]\n{QUESTION}\n")
    own = show(jkv.stream(params, CACHE, prompt(), max_new_tokens=NEW, compare=True))
    with status("the same with the full cache"):
        full = jkv.generate(params, None, prompt(), max_new_tokens=NEW)
    print(f"\nthe full cache says: {str(full.text).strip()}\n")
    Console().print(table(own.receipt, full.receipt))
    found = "the right answer" if ANSWER in own.text else "a wrong answer"
    also = "as does the full cache" if (ANSWER in full.text) == (ANSWER in own.text) else "unlike the full cache"
    print(f"Shown: {CACHE} gives {found}, {also}, from a cache {own.receipt.ratio:.1f} times smaller.")


if __name__ == "__main__":
    try:
        with one_line():
            main()
    except typer.Exit as end:
        sys.exit(end.exit_code)
