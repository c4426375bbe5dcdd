"""Material for synthetic texts: word lists, distinct random strings, haystacks, chains and people."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jkv.eval import corpora

ADJECTIVES = """
able agile airy amber ample ancient ardent arid azure balmy bare basic blank bleak blunt bold brave bright brisk broad
bronze calm candid careful chilly civil clean clear clever close coarse cobalt cosy crimson crisp crooked cubic curly
daring deep dense dim distant double dry dusty eager early earnest eastern easy elastic empty equal exact faint fair
famous fancy fertile fierce fine firm flat fluffy foggy fond formal fragile frank free fresh frosty frugal gentle giant
gifted glad glossy golden graceful grand grassy grave handy happy hardy hasty hazy heavy hidden hollow honest huge
humble humid icy ideal inner ivory jolly keen kind lavish lazy lean level light limber lively lofty lone loud loyal
lucid lucky lunar magenta major mellow merry mighty mild minor misty modest moist mossy muted narrow native neat nimble
noble northern novel oaken odd olive opal open orange ornate oval pale patient plain pleasant plump polar polite proud
prudent purple quaint quick quiet rapid rare ready remote rich rigid ripe robust rough round royal ruby rural rustic
sacred salty sandy scarlet secret serene severe shady sharp shiny short shy silent silky silver simple sincere sleek
slender slim slow smooth snowy sober soft solar solemn solid southern sparse spicy square steady steep stern still
stormy strict sturdy subtle sunny supple sweet swift tall tame tender thick thin tidy tiny tough tranquil true upper
urban vague vast velvet violet vital vivid warm wary western wide wild windy wise witty woolly worthy young zesty
""".split()
NOUNS = """
acorn anchor apple apron arch arrow attic badge badger bagel bakery balcony bamboo banjo banner barley barn barrel
basin basket beacon beaver bell bench birch biscuit blanket blossom boat bonnet bottle boulder bowl bracelet branch
bridge broom brush bucket buckle bundle button cabbage cabin cable cactus camel camera canal candle canoe canvas canyon
cape caravan carpet carrot castle cavern cellar chain chair chapel cherry chest chimney cinder circus clay cliff clock
cloud clover coast cobweb coconut collar comet compass copper coral cork cottage cotton cradle crane crater crayon
creek cricket crown crystal cup curtain cushion cymbal daisy dam desert desk dolphin donkey door dove dragon drawer
drum dune eagle easel elbow ember engine envelope fabric falcon feather fence fern ferry fiddle field finch flag flame
flask flute forest fork fossil fountain fox frame frog fruit funnel garden garlic garment gate geyser ginger glacier
glove goat goose grape gravel grove guitar hammer hammock harbor harp hatch hawk hazel hedge helmet herb heron hill
hinge hive honey hook horn horse hotel island ivy jacket jar jewel jungle kettle key kite knot ladder ladle lagoon
lake lamp lantern lark lawn leaf ledge lemon lever library lily linen lion lizard locket log loom lute magnet mango
mantle maple marble market marsh mask mast meadow medal melon mill mirror mitten moat monsoon moon moose moth mountain
mule museum mushroom needle nest nettle notebook nutmeg oar oasis oat ocean onion orchard otter oven owl oyster paddle
palace panther paper parcel parrot pasture path peach peacock pear pearl pebble pelican pencil pepper piano picture
pigeon pillar pillow pine pirate planet plate plaza plum pocket pond pony poplar porch potato prairie prism pudding
puddle pulley pumpkin puppet puzzle quail quarry quill quilt rabbit raccoon radish raft rail rain raven reed reef
ribbon ridge river road robin rocket roof rope rose rudder saddle saffron sail salmon sandal satchel saucer scarf
school scooter shed sheep shell shelf shore shovel sickle signal sled slipper snail sock sofa spade sparrow spider
spindle spoon spruce squirrel stable stair star station statue steeple stone stool stove straw stream summit swan
table tailor tavern teapot temple tent thimble thistle thorn thread throne thunder ticket tiger timber toad tower
trail train tray treasure tree trellis trumpet trunk tulip tunnel turnip turtle umbrella valley vase veil village
vine violin wagon walnut walrus waterfall wave weasel wharf wheat wheel whistle willow window winter wolf wreath yacht
yarn zebra
""".split()
FIRST_NAMES = """
Ada Agnes Albin Alma Anton Astrid Basil Beatrix Bruno Carla Cecil Clara Conrad Dora Edgar Edith Elias Elsa Emil Erika
Ezra Felix Flora Frida Gideon Greta Gustav Hanna Hector Helga Hugo Ida Igor Ines Jasper Judith Julius Karin Kaspar Lena
Leopold Linus Lotte Ludwig Magda Marius Martha Mika Nadia Nestor Nora Oscar Otto Paula Petra Quentin Ramona Rufus Selma
Silas Stella Tamara Theo Ursula Viktor Wanda Xenia Yara Zeno
""".split()
ROLES = """
baker banker barber brewer carpenter chemist cobbler composer dentist designer dyer farmer florist gardener glazier
hatter joiner lawyer librarian mason miller painter pilot plumber potter printer saddler sailor surveyor tanner teacher
translator weaver
""".split()
ANIMALS = """
badger camel cat crow dog donkey duck falcon ferret finch goat goose hare heron horse lizard parrot pony
""".split()

# One line of five short sentences: the most uniform haystack.
LINE = (
    "Rain fell on the roof.",
    "A boat lay in the bay.",
    "The road led up the hill.",
    "Someone shut the gate.",
    "Then the lamps were lit.",
)


def distinct(n: int, draw: Callable[[int], list[str]], avoid: Sequence[str] = ()) -> list[str]:
    """Draw `n` different strings.

    Args:
        n: Number of strings.
        draw: draw(k) returns k random strings.
        avoid: Strings to leave out.

    Raises:
        ValueError: 64 draws did not give `n` different strings.
    """
    found: dict[str, None] = {}
    banned = set(avoid)
    for _ in range(64):
        found |= dict.fromkeys(string for string in draw(n - len(found) + 8) if string not in banned)
        if len(found) >= n:
            return list(found)[:n]
    raise ValueError(f"there are no {n} different strings of this kind; ask for a smaller length")


def letters(rng: np.random.Generator, n: int, size: int, alphabet: str) -> list[str]:
    """Draw `n` different strings of `size` characters from `alphabet`."""
    characters = np.array(list(alphabet))
    return distinct(n, lambda k: ["".join(row) for row in rng.choice(characters, (k, size))])


def numbers(rng: np.random.Generator, n: int, digits: int) -> list[str]:
    """Draw `n` different numbers with exactly `digits` digits."""
    return distinct(n, lambda k: [str(i) for i in rng.integers(10 ** (digits - 1), 10**digits, k)])


def uuids(rng: np.random.Generator, n: int) -> list[str]:
    """Draw `n` different 128-bit numbers in UUID notation."""
    return ["-".join((s[:8], s[8:12], s[12:16], s[16:20], s[20:])) for s in hexes(rng, n)]


def hexes(rng: np.random.Generator, n: int) -> list[str]:
    """Draw `n` different 128-bit numbers as 32 hexadecimal digits."""
    return distinct(n, lambda k: [rng.bytes(16).hex() for _ in range(k)])


def keys(rng: np.random.Generator, n: int) -> list[str]:
    """Draw `n` different pairs "adjective-noun"; raises ValueError if there are fewer (about 98,000)."""
    total = len(ADJECTIVES) * len(NOUNS)
    if n > total:
        raise ValueError(f"there are {total} different keys, {n} are needed; ask for a smaller length")
    picks = rng.choice(total, n, replace=False)
    return [f"{ADJECTIVES[i // len(NOUNS)]}-{NOUNS[i % len(NOUNS)]}" for i in picks]


def coined(rng: np.random.Generator, n: int, avoid: Sequence[str] = ()) -> list[str]:
    """Draw `n` different invented words of six letters; the common length means that none contains another.

    >>> coined(np.random.default_rng(0), 3)
    ['turubu', 'pibare', 'nolino']
    """
    alphabets = [np.array(list("bdfgklmnprstvz")), np.array(list("aeiou"))] * 3

    def draw(k: int) -> list[str]:
        return ["".join(row) for row in zip(*(rng.choice(a, k) for a in alphabets), strict=True)]

    return distinct(n, draw, avoid)


def vocabulary(rng: np.random.Generator, n: int) -> list[str]:
    """Draw `n` different words in random order, with invented words once the real ones are exhausted."""
    real = sorted({*ADJECTIVES, *NOUNS})
    words = [*real, *coined(rng, max(0, n - len(real)), avoid=real)]
    return [words[i] for i in rng.choice(len(words), n, replace=False)]


def listed(items: Sequence[str]) -> str:
    """Join items with commas and a final "and".

    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b and c', 'a')
    """
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1])))


@functools.cache
def _prose(source: str) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the sentences of a corpus, and the number of words before each, i64[sentences + 1]."""
    found = tuple(corpora.sentences(corpora.text(source) + "\n\n"))
    return found, np.cumsum([0, *(len(sentence.split()) for sentence in found)])


def prose(rng: np.random.Generator, n: int, inserts: Sequence[tuple[float, str]] = (), source: str = "pydoc") -> str:
    """Build prose of `n` words from a corpus, starting at a random sentence and wrapping around at its end.

    Args:
        rng: Random generator.
        n: Number of words, without inserts.
        inserts: (depth, sentence) pairs, depth from 0 to 1.
        source: The corpus.
    """
    found, before = _prose(source)
    i = int(rng.integers(len(found)))
    pieces: list[str] = []
    ends = [0]  # words before each border between pieces
    while ends[-1] < n:
        pieces.append(found[i])
        ends.append(ends[-1] + int(before[i + 1] - before[i]))
        i = (i + 1) % len(found)
    if ends[-1] > n:
        pieces[-1] = " ".join(pieces[-1].split()[: n - ends[-2]]).rstrip(".,:;") + "."
    ends[-1] = n
    # From the back, so that earlier borders keep their index.
    for depth, sentence in sorted(inserts, key=lambda insert: -insert[0]):
        at = int(np.argmin(np.abs(np.array(ends) - depth * n)))
        pieces.insert(at, f"{sentence} ")
    return "".join(piece if piece[-1:].isspace() else f"{piece} " for piece in pieces).strip()


def lines(rng: np.random.Generator, n: int, inserts: Sequence[str] = ()) -> tuple[str, list[float]]:
    """Build `n` sentences of `LINE`, five per line, with inserts on their own lines at random places, in order.

    Returns:
        The text, and the depth of each insert: the share of lines before it.
    """
    filler = [" ".join(LINE[: n - 5 * i]) for i in range(math.ceil(n / 5))]
    places = np.sort(rng.integers(0, len(filler) + 1, len(inserts)))
    for place, insert in reversed(list(zip(places, inserts, strict=True))):
        filler.insert(int(place), insert)
    return "\n".join(filler), [(int(p) + i) / len(filler) for i, p in enumerate(places)]


@dataclass(frozen=True)
class Chain:
    """A number and the variables that hold it: the first is assigned the number, each other one its predecessor."""

    value: str
    names: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        sources = (self.value, *(f"VAR {name}" for name in self.names))
        return [f"VAR {name} = {source}" for name, source in zip(self.names, sources, strict=False)]


def chains(rng: np.random.Generator, n: int, hops: int = 4, size: int = 5) -> list[Chain]:
    """Draw `n` chains of `hops` + 1 variables, named by `size` capitals; numbers and names are all distinct."""
    width = hops + 1
    names = letters(rng, n * width, size, "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    return [Chain(v, tuple(names[i * width : (i + 1) * width])) for i, v in enumerate(numbers(rng, n, 5))]


@dataclass(frozen=True, kw_only=True)
class Person:
    """An invented person. Full names, towns, firms and pets' names are unique."""

    name: str
    town: str
    firm: str
    pet: str
    role: str
    animal: str
    mentor: str

    @property
    def document(self) -> str:
        first = self.name.split()[0]
        return (
            f"{self.name} was born in {self.town} and works as a {self.role} for {self.firm}. "
            f"{first} keeps a {self.animal} called {self.pet}, and was taught by {self.mentor}."
        )


# attribute -> a question about it
ASKED = {
    "town": "In which town was {who} born?",
    "firm": "For which firm does {who} work?",
    "pet": "What is the animal of {who} called?",
}


def people(rng: np.random.Generator, n: int) -> list[Person]:
    """Draw `n` (at least 2) people in random order, in families of four; each was taught by another of them."""
    pool = [word.capitalize() for word in coined(rng, 4 * n)]
    towns, firms, pets = pool[:n], pool[n : 2 * n], pool[2 * n : 3 * n]
    firsts = np.concatenate([rng.choice(FIRST_NAMES, 4, replace=False) for _ in range(math.ceil(n / 4))])
    names = [f"{firsts[i]} {pool[3 * n + i // 4]}" for i in range(n)]
    cycle = rng.permutation(n)  # each person's mentor is the next in the cycle, never oneself
    mentors = dict(zip(cycle.tolist(), np.roll(cycle, -1).tolist(), strict=True))
    found = [
        Person(
            name=names[i],
            town=towns[i],
            firm=firms[i],
            pet=pets[i],
            role=str(rng.choice(ROLES)),
            animal=str(rng.choice(ANIMALS)),
            mentor=names[mentors[i]],
        )
        for i in range(n)
    ]
    return [found[i] for i in rng.permutation(n)]
