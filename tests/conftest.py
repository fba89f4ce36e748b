"""Settings for every test: strict JAX promotion, 8 CPU devices, reproducible hypothesis."""

import gc
import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest
from models.weights import first_layers

from jax_specdec import lm

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "build/programs"

collect_ignore = [
    "formats/gemma4/make.py",  # they want torch, which no test needs
    "formats/huggingface/make.py",
    "formats/published/make.py",
    "models/speculators/make.py",
    "integrations/test_families.py",
    "integrations/test_gemma4.py",
    "integrations/test_real_models.py",  # other projects' packages: `make test-models` names it
]

# Files that take long begin before the others, so that no worker is left with one at the end.
DEAREST = (
    "test_docs test_server test_exact test_tree test_engine_continuity test_backends test_edges "
    "test_mosaic_gpu test_mosaic_gpu_lists test_prefixes test_block test_trees test_sharded "
    "test_integration_doc test_cli test_engine test_listed test_options test_attention "
    "test_cache test_draft_budget test_processors test_huggingface test_weights test_eagle3 "
    "test_sglang_jax test_repository"
).split()

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
if "JAX_NUM_CPU_DEVICES" not in os.environ:
    jax.config.update("jax_num_cpu_devices", 8)  # for meshes; everything else runs on the first

# Compilation makes the first example slow, and a run must be repeatable: no deadline, fixed seed.
# `pytest --hypothesis-profile=explore` looks further, with a fresh seed each time.
hypothesis.settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=50, database=None
)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("repeatable")

# A shell's process in the background ignores interrupts, and so would those that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def optimize(wanted: bool) -> None:
    """Compiles as users do, or at level 0: most programs compile longer than they run."""
    on_cpu = jax.default_backend() == "cpu"
    jax.config.update("jax_disable_most_optimizations", on_cpu and not wanted)


optimize(False)  # what files compute when they are collected
gc.set_threshold(50_000, 20, 50)  # Python looks for cycles after every 700 objects, JAX makes many
if jax.default_backend() == "cpu":
    # Programs are kept for the other worker, the next run, and processes that tests start.
    # Reading a small one takes a sixth of the time of compiling it.
    for name, value in (
        ("jax_compilation_cache_dir", str(PROGRAMS)),
        ("jax_persistent_cache_min_compile_time_secs", 0.0),
    ):
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist, which writes the group into a test's id
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker takes a whole file, or all files that compile the same programs; dear ones first."""
    items.sort(key=lambda item: item.path.stem not in DEAREST)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            path = item.path.relative_to(ROOT)
            group = "examples" if path.parts[0] == "jax_specdec" else str(path)
            item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: a search for cycles passes it over."""
    if session.config.getoption("loadgroup", False):  # else two workers compile every program
        assert all("@" in item.nodeid for item in session.items), "pytest-xdist sees no groups"
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keeps at most 1 GB of programs, those that were read last.

    JAX's own limit looks at every file, under a lock, each time that it keeps a program.
    """
    if hasattr(session.config, "workerinput"):  # a worker; the others may still run
        return
    left = 2**30
    for file in sorted(PROGRAMS.glob("*"), key=lambda x: x.stat().st_atime, reverse=True):
        left -= file.stat().st_size
        if left < 0:
            file.unlink(missing_ok=True)


@pytest.fixture(autouse=True, scope="module")
def _programs_are_dropped_before_they_are_too_many() -> Iterator[None]:
    """A compiled program maps memory. Linux allows a process 65,530 maps: past them XLA crashes."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > 15_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def optimized() -> Iterator[None]:
    """Compiles as users do: for tests that run longer than they compile."""
    optimize(True)
    yield
    optimize(False)


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded pair are their first layers: the same code on programs that compile sooner."""
    pair = tuple(first_layers(one, 1) for one in lm.load_embedded_pair())
    monkeypatch.setattr(lm, "load_embedded_pair", lambda: pair)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that was asked for fails where it cannot run: a skip would look like evidence."""
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.fail(f"needs a GPU, but JAX runs on {jax.default_backend()!r}", pytrace=False)
    if item.get_closest_marker("aot") and importlib.util.find_spec("libtpu") is None:
        pytest.fail("needs libtpu, but it is not installed: run `make test-aot`", pytrace=False)
