"""The numbers of latent attention."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Latent:
    """The numbers of latent attention: channels of the latent that all heads of a layer share (`rank`) and of that of
    the queries (None: there is none); of a head's query and key without position (`plain`) and with it (`turned`), and
    of its value. paired: what turns together lies side by side.
    """

    rank: int
    queries: int | None
    plain: int
    turned: int
    values: int
    paired: bool
