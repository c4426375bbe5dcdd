"""How to install the extras of pyproject.toml."""

PACKAGE = "jkv-cache"  # what pip knows jkv as: on package indexes the name jkv is another project's


def install(extra: str) -> str:
    """The end of an error about something that is not installed.

    >>> install("plot")
    "run pip install -e '.[plot]' in a checkout of jkv, or pip install 'jkv-cache[plot] @ git+URL' with its URL"
    """
    anywhere = f"pip install '{PACKAGE}[{extra}] @ git+URL' with its URL"
    return f"run pip install -e '.[{extra}]' in a checkout of jkv, or {anywhere}"
