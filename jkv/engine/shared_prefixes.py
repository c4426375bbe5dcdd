"""Shared prefixes of a job's prompts, and which of them to prefill once. Source: BatchLLM (2412.03594)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Group:
    """Prompts, by index, that share their first `length` tokens."""

    length: int
    members: tuple[int, ...]

    @property
    def saved(self) -> int:
        """Tokens that need not be prefilled again."""
        return (len(self.members) - 1) * self.length


@dataclass
class Node:
    """A node of the compressed trie of prompts.

    Attributes:
        length: tokens that all prompts of the node share.
        own: prompts, by index, that no child node contains.
        below: child nodes, with longer prefixes.
    """

    length: int
    own: list[int] = field(default_factory=list)
    below: list[Node] = field(default_factory=list)


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of i32[n] and i32[m].

    >>> common(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    n = min(len(a), len(b))
    other = np.flatnonzero(a[:n] != b[:n])
    return int(other[0]) if len(other) else n


def trie(prompts: Sequence[np.ndarray]) -> Node:
    """Build the compressed trie of i32 prompts and return its root.

    Prompts are sorted; a node is created where two neighbors diverge.
    """
    # Sort by big-endian bytes, which is the order of the tokens.
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].astype(">u4").tobytes())
    stack = [Node(0)]
    for at, here in enumerate(order):
        shared = common(prompts[here], prompts[order[at + 1]]) if at + 1 < len(order) else 0
        if shared > stack[-1].length:
            stack.append(Node(shared))
        stack[-1].own.append(here)
        while stack[-1].length > shared:
            done = stack.pop()
            if stack[-1].length < shared:
                stack.append(Node(shared))
            stack[-1].below.append(done)
    return stack[0]


def groups(prompts: Sequence[np.ndarray], least: int = 1) -> list[Group]:
    """Choose the groups of prompts whose shared prefixes save the most prefill tokens in all.

    A prefix of L tokens costs L once and saves L for each of its members. A member counts only for its deepest prefix.
    So a node c opens, below the nearest open node a, if it saves more than it costs. With f(c, a) the best of the
    subtree:

        f(c, a) = max(own * L_a + sum f(below, a), own * L_c - L_c + sum f(below, c))

    Args:
        prompts: token ids i32[n]. Each member keeps at least one token after its prefix, which gives the logits.
        least: tokens of the shortest prefix.

    Returns:
        Groups of two members or more; a prompt is in one group or in none.

    >>> head = np.arange(50)
    >>> groups([np.append(head, x) for x in (7, 8, 9)], least=16)
    [Group(length=50, members=(0, 1, 2))]
    """
    order: list[tuple[Node, list[int]]] = []  # node, prefix lengths of its ancestors
    # List the nodes, each before its children, with the prefix lengths of its ancestors.
    todo = [(trie([p[:-1] for p in prompts]), [0])]
    while todo:
        node, above = todo.pop()
        order.append((node, above))
        todo.extend((x, [*above, node.length]) for x in node.below)
    # Assign prompts to their nearest open node, from the root down.
    opens = _opens(order, least)
    found: dict[int, list[int]] = {}
    nearest: dict[int, tuple[int, int]] = {}  # depth and index in `order` of the open node above
    place = {id(node): i for i, (node, _) in enumerate(order)}
    for i, (node, above) in enumerate(order):
        depth, who = nearest.get(i, (0, 0))
        if opens[i][depth]:
            depth, who = len(above), i
        if who:
            found.setdefault(who, []).extend(node.own)
        nearest |= {place[id(x)]: (depth, who) for x in node.below}
    out = (Group(order[who][0].length, tuple(sorted(members))) for who, members in found.items())
    return sorted((g for g in out if len(g.members) > 1), key=lambda g: g.members)


def _opens(order: list[tuple[Node, list[int]]], least: int) -> list[np.ndarray]:
    """Return for each node whether it opens, bool[depth]: one entry per ancestor as the nearest open one."""
    best: dict[int, np.ndarray] = {}
    out = []
    for node, above in reversed(order):
        lengths = np.array([*above, node.length])
        total = len(node.own) * lengths + sum((best.pop(id(x)) for x in node.below), np.zeros(len(lengths), int))
        opened = total[-1] - node.length if node.length >= least else -1
        out.append(opened > total[:-1])
        best[id(node)] = np.maximum(opened, total[:-1])
    return out[::-1]
