#!/bin/sh
# Codes with evictions, below a sixth of the full cache's bytes: sh benchmarks/compositions.sh [prose|code|later|needles ...]
# A killed run goes on where it was. jkv: the command, if it is not .venv/bin/jkv.
set -e
out=results/compositions
mkdir -p $out

asked() {
    case $1 in
    prose) set -- fidelity --prefix 2048 --continue 64 --samples 4 --json $out/prose.json ;;
    code) set -- fidelity --corpus stdlib --prefix 2048 --continue 64 --samples 4 --json $out/code.json ;;
    later) set -- multiturn --tasks needles --mode reused --length 1024 --samples 3 --json $out/later.json ;;
    needles)
        set -- ruler --tasks niah_single_2 --tasks niah_multikey_1 --tasks niah_multivalue --length 1024 --samples 4 \
            --json $out/needles.json
        ;;
    *) echo "compositions: $1 is none of prose, code, later, needles" >&2 && exit 1 ;;
    esac
    while read -r cache; do
        set -- "$@" --cache "$cache"
    done <benchmarks/compositions.txt
    ${jkv:-.venv/bin/jkv} eval "$@"
}

for task in ${*:-prose code later needles}; do
    asked "$task"
done
