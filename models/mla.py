"""Sizes of multi-head latent attention (MLA)."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of multi-head latent attention (MLA).

    Attributes:
        rank: Channels of the latent that all heads of a layer share.
        queries: Channels of the query latent, or None if queries have none.
        plain: Channels of a query or key head without RoPE.
        turned: Channels of a query or key head with RoPE.
        values: Channels of a value head.
        paired: Whether the two channels that rotate together are adjacent.
    """

    rank: int
    queries: int | None
    plain: int
    turned: int
    values: int
    paired: bool
