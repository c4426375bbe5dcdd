"""Settings of every test: small programs compile fast, nothing is promoted silently, no compiled program is reused."""

import gc
import os
import sys
import zlib
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

# Tiny models spend their time in the compiler. test_compiled.py looks at programs that are compiled as a user's are.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
QUICK = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
# One LLVM module instead of up to 32, which are for threads that several workers have no cores for.
QUICK.append("--xla_cpu_parallel_codegen_split_count=1")
if version("jaxlib").startswith("0.10."):  # later ones have no other emitters
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *QUICK])
sys.path.append(str(Path(__file__).parents[1]))  # benchmarks/ of the checkout, behind an installed jkv
gc.set_threshold(50_000, 20, 20)  # tracing makes many objects that live on

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

pytest.register_assert_rewrite("support")
from support import shapes  # noqa: E402

# The same examples on every machine: what passes here passes where it is landed. HYPOTHESIS_PROFILE=default draws anew.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

shapes.install()
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_traceback_in_locations_limit", 0)  # a tenth of a compilation: where operations were written
# Programs are compiled anew, unless the caller names a folder for them: what is traced, and how often, is the same.
jax.config.update("jax_enable_compilation_cache", "JAX_COMPILATION_CACHE_DIR" in os.environ)


from support import rig  # noqa: E402  (what it imports has shapes then)

COMMON = {str(case) for case in rig.COMMON}
LEFT_OUT = ("slow", "hardware", "peers")  # of `make test`
FEW = 3  # cases of a test that `make test` runs


def pytest_addoption(parser):
    parser.addoption("--part", help="I/N: of what `make test` leaves out, the I-th of N parts; a composition is in one")


def left_out(item) -> bool:
    return any(item.get_closest_marker(name) for name in LEFT_OUT)


def part_of(item, parts: int) -> int:
    """1 to `parts`: the same on every machine, and for all that is said of a composition."""
    name = composition(item) or item.nodeid
    return zlib.crc32(name.encode()) % parts + 1


def parted(config) -> tuple[int, int]:
    given = config.getoption("--part") or "1/1"
    part, _, parts = given.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"--part is I/N, as 2/3 is the second of three parts, and not {given!r}")
    return int(part), int(parts)


class AtOnce:
    """Says what failed, and why, as it fails: a run that is stopped comes to no summary."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        if report.failed:
            write = self.config.pluginmanager.getplugin("terminalreporter").write_line
            write(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext[-3000:]}")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # of several processes the one that the others tell
        config.pluginmanager.register(AtOnce(config))


def composition(item) -> str:
    """The composition of the catalogue that a test is about, or nothing."""
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    return str(case) if type(case).__module__ == "support.rig" else ""


def few(cases: list) -> list:
    """The first, the last and one between, if there are any."""
    return cases and [cases[i] for i in sorted({round(i * (len(cases) - 1) / (FEW - 1)) for i in range(FEW)})]


@pytest.hookimpl(tryfirst=True)  # what is slow is known before -m chooses
def pytest_collection_modifyitems(config, items):
    """`make test` runs a test with compositions in common use, and with a few of its other cases. All the rest is slow,
    and `make test-all` runs it.

    What is said of one composition comes one after the other: one worker of several compiles its programs, once.
    """
    cases = defaultdict(list)
    for item in items:
        if not left_out(item):
            cases[item.nodeid.split("[")[0]].append(item)
    for test in cases.values():
        common = [item for item in test if composition(item) in COMMON]
        kept = common + few([item for item in test if not composition(item)]) or few(test)
        for item in test:
            if item not in kept:
                item.add_marker(pytest.mark.slow)
    part, parts = parted(config)
    if parts > 1:
        others = {item for item in items if left_out(item) and part_of(item, parts) != part}
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    first: dict[str, int] = {}

    def place(i: int) -> tuple[int, int]:
        name = composition(items[i])
        return first.setdefault(name, i) if name else i, i

    items[:] = [items[i] for _, i in sorted(place(i) for i in range(len(items)))]


def pytest_collection_finish():
    gc.freeze()  # what is imported and collected lives on: nobody need walk it again


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Drop a module's compiled programs: some thousand of them exhaust the memory maps, and XLA then crashes.

    Those of compositions, whatever modules ask for them, stay until they are many. Runs that are shared go with them:
    a law counts what one more run compiles.
    """
    from jkv.core import compilation

    name, following = composition(item), composition(nextitem)
    if name and following:
        drop = name != following and compilation.maps() > compilation.MAPS
    else:
        drop = nextitem is None or item.path != nextitem.path
    if drop:
        compilation.PROGRAMS.clear()
        jax.clear_caches()
        rig.prompted.cache_clear()
        rig.shared.cache_clear()
