"""Installation hints for optional dependencies (the extras of pyproject.toml)."""

PACKAGE = "jkv-cache"  # name for pip; on package indexes the name jkv belongs to another project


def install(extra: str) -> str:
    """Return the end of an error message about a missing extra.

    >>> install("plot")
    "run pip install -e '.[plot]' in a checkout of jkv, or pip install 'jkv-cache[plot] @ git+URL' with its URL"
    """
    anywhere = f"pip install '{PACKAGE}[{extra}] @ git+URL' with its URL"
    return f"run pip install -e '.[{extra}]' in a checkout of jkv, or {anywhere}"
