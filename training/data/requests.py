"""Synthetic chat requests without answers, which a model continues itself."""

from __future__ import annotations

import numpy as np

from jkv.eval.tasks.words import ADJECTIVES, FIRST_NAMES, NOUNS, ROLES

FORMS = (
    "Tell me a story about a {role} named {name} who finds a {adjective} {noun}.",
    "Write a short story in which {name} and {other} travel to a {adjective} {noun}.",
    "Explain {topic} to a {role}.",
    "What is {topic}, and why does it matter?",
    "Give me ten tips about {topic}.",
    "Write a Python class for a {noun} with methods to add, find and remove parts of it.",
    "Write a Python function that {job}, with a docstring and a test.",
    "Write a JSON list of eight people with their name, age, job and city.",
    "Write a friendly letter from {name}, a {role}, to {other} about {topic}.",
    "Compare {topic} with {second}.",
    "Describe a {adjective} {noun} for a catalogue.",
    "Write an essay about {topic}.",
)
TOPICS = """
photosynthesis; the water cycle; gravity; the French revolution; saving money; healthy breakfasts; how computers store
numbers; learning a language; the moon; vaccines; climate change; chess openings; baking bread; the history of paper;
electric cars; good sleep; public speaking; volcanoes; how bees make honey; databases; the immune system; gardening on a
balcony; the Roman empire; probability; machine learning; black holes; time management; recycling; music theory;
how bridges stand; the human heart; writing clear emails; renewable energy; evolution; the internet; first aid
""".replace("\n", " ").split(";")
JOBS = """
counts the words of a text; sorts a list of dates; finds the largest prime below n; reads a CSV file; reverses a linked
list; merges two dictionaries; checks whether a text is a palindrome; computes the average of a list; removes duplicates
from a list; converts Celsius to Fahrenheit; finds the shortest path in a grid; validates an email address
""".replace("\n", " ").split(";")


def request(rng: np.random.Generator) -> str:
    """Draw a request.

    >>> request(np.random.default_rng(0)) == request(np.random.default_rng(0))
    True
    """
    form = FORMS[int(rng.integers(len(FORMS)))]
    lists = dict(
        role=ROLES, name=FIRST_NAMES, other=FIRST_NAMES, adjective=ADJECTIVES, noun=NOUNS, topic=TOPICS, second=TOPICS,
        job=JOBS,
    )  # fmt: skip
    return form.format(**{key: words[int(rng.integers(len(words)))].strip() for key, words in lists.items()})
