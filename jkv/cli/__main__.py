"""`python -m jkv.cli`: the `jkv` command without its console script."""

from jkv.cli.app import main

main()
