"""Settings of every test: small programs compile fast, nothing is promoted silently, no compiled program is reused."""

import gc
import os
from importlib.metadata import version

# Tiny models spend their time in the compiler. test_compiled.py looks at programs that are compiled as a user's are.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
QUICK = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
# One LLVM module instead of up to 32, which are for threads that several workers have no cores for.
QUICK.append("--xla_cpu_parallel_codegen_split_count=1")
if version("jaxlib").startswith("0.10."):  # later ones have no other emitters
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *QUICK])
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


def pytest_collection_modifyitems(items):
    """The laws of one composition come one after the other: one worker of several compiles its programs."""
    first: dict[str, int] = {}

    def place(i: int) -> tuple[int, int]:
        case = items[i].callspec.params.get("case") if hasattr(items[i], "callspec") else None
        return (first.setdefault(str(case), i) if type(case).__module__ == "support.rig" else i), i

    items[:] = [items[i] for _, i in sorted(place(i) for i in range(len(items)))]


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Drop compiled programs once they are many: some thousand of them exhaust the memory maps, and XLA then crashes.

    Until then one module's programs serve the next.
    """
    yield
    from jkv.core import compiled

    if compiled.maps() > compiled.MAPS:
        compiled.PROGRAMS.clear()
        jax.clear_caches()
