"""`python -m jkv.cli`: the command where its script is not on the path."""

from jkv.cli.app import main

main()
