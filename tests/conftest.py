"""Settings for every test: strict JAX promotion, 8 CPU devices, reproducible hypothesis."""

import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import hypothesis
import jax
import pytest

# They want torch, which no test needs.
collect_ignore = ["models/huggingface/make.py", "models/smollm2/make.py"]

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)  # for meshes; everything else runs on the first

# Compilation makes the first example slow, and a run must be repeatable: no deadline, fixed seed.
# `pytest --hypothesis-profile=explore` looks further, with a fresh seed each time.
hypothesis.settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=50, database=None
)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("repeatable")


# The dearest files, first, so that no worker is left with one of them at the end.
DEAREST = (
    "test_mosaic_gpu.py",
    "test_notebooks.py",
    "test_xla.py",
    "test_engine.py",
    "test_sharded.py",
    "test_tensor_parallel.py",
    "test_options.py",
    "test_statistics.py",
    "test_sharding_doc.py",
    "test_cli.py",
    "test_greedy.py",
    "test_sample.py",
    "test_lossless.py",
    "test_processors.py",
    "test_grammar.py",
    "test_llama.py",
    "test_scan_layers.py",
    "test_mosaic_gpu_part_draw.py",
    "test_listed.py",
    "test_store.py",
    "test_logprobs.py",
    "test_benchmarks.py",
    "test_huggingface_cli.py",
    "test_serving_doc.py",
    "test_server.py",
)


# Files whose programs take longer to compile than to run: XLA's optimization level 0. Not files
# that share programs with others.
QUICK = (
    "test_abstaining.py",
    "test_benchmarks.py",
    "test_cli.py",
    "test_docs.py",
    "test_derivatives.py",
    "test_draft_model.py",
    "test_empty_batch.py",
    "test_engine.py",
    "test_engine_continuity.py",
    "test_engine_options.py",
    "test_engine_traffic.py",
    "test_errors.py",
    "test_explicit_sharding.py",
    "test_grammar.py",
    "test_grammar_driver.py",
    "test_greedy.py",
    "test_huggingface_cli.py",
    "test_integration_doc.py",
    "test_keys.py",
    "test_lists.py",
    "test_llama.py",
    "test_messages.py",
    "test_options.py",
    "test_pack_drafts.py",
    "test_padded_rows.py",
    "test_processors.py",
    "test_reduced_vocabulary_doc.py",
    "test_server.py",
    "test_serving_doc.py",
    "test_sglang_jax.py",
    "test_sharding_doc.py",
    "test_step_keys.py",
    "test_steps_ahead.py",
    "test_store.py",
    "test_tensor_parallel.py",
    "test_tpu_inference.py",
    "test_types.py",
    "test_x64.py",
)


def compile_quickly(wanted: bool) -> None:
    """Or as users do."""
    on_cpu = jax.default_backend() == "cpu"
    jax.config.update("jax_disable_most_optimizations", wanted and on_cpu)


compile_quickly(True)  # what files compute when they are collected, and docstrings' examples


@pytest.fixture(scope="module", autouse=True)
def optimization(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles the programs of a module quickly, or as users do."""
    compile_quickly(request.path.name in QUICK)
    yield
    compile_quickly(True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files run on one worker each, in this order."""
    order = {name: place for place, name in enumerate(DEAREST)}
    items.sort(key=lambda item: order.get(item.path.name, len(DEAREST)))


ENGINES = (
    "test_engine.py",
    "test_engine_continuity.py",
    "test_engine_options.py",
    "test_engine_traffic.py",
    "test_grammar_driver.py",
    "test_steps_ahead.py",
)


@pytest.hookimpl(optionalhook=True)  # there is none without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes a whole file, or all files that compile the same programs."""
    from xdist.scheduler import LoadFileScheduling

    class ByPrograms(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = PurePosixPath(super()._split_scope(nodeid))
            if file.parts[0] == "jax_specdec":
                return "examples"
            return "engines" if file.name in ENGINES else str(file)

    return ByPrograms(config, log)


@pytest.fixture(autouse=True, scope="module")
def _programs_are_dropped_before_they_are_too_many() -> Iterator[None]:
    """A compiled program maps memory. Linux allows a process 65,530 maps: past them XLA crashes."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > 15_000:
        jax.clear_caches()
        gc.collect()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that was asked for fails where it cannot run: a skip would look like evidence."""
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.fail(f"needs a GPU, but JAX runs on {jax.default_backend()!r}", pytrace=False)
    if item.get_closest_marker("aot") and importlib.util.find_spec("libtpu") is None:
        pytest.fail("needs libtpu, but it is not installed: run `make test-aot`", pytrace=False)
