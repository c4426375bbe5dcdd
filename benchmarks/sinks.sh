#!/bin/sh
# What the exact first token, and what selectors read for sure, are worth: sh benchmarks/sinks.sh
# A killed run goes on where it was. jkv: the command, if it is not .venv/bin/jkv.
set -e
out=results/sinks
mkdir -p $out
for corpus in stdlib pydoc; do
    set -- fidelity --corpus $corpus:test --prefix 1024 --continue 64 --samples 2 --json $out/$corpus.json
    while read -r cache; do
        set -- "$@" --cache "$cache"
    done <benchmarks/sinks.txt
    ${jkv:-.venv/bin/jkv} eval "$@"
done
