"""Settings for every test: strict JAX promotion, 8 CPU devices, reproducible hypothesis."""

import hypothesis
import jax
import pytest

collect_ignore = ["models/huggingface/make.py"]  # wants torch, which no test needs

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


LONG = (
    "test_notebooks.py",
    "test_benchmarks.py",
    "test_benchmarks_throughput.py",
    "test_cli.py",
    "test_huggingface_cli.py",
    "test_serving_doc.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of few long tests first: a file runs on one worker, and none should end alone."""
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A GPU test that was asked for fails without a GPU: a skip would look like evidence."""
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.fail(f"needs a GPU, but JAX runs on {jax.default_backend()!r}", pytrace=False)
