# Every target sets itself up: Python, venv, pip, git and make are all it needs.
# Environments are made again whenever pyproject.toml changes.

PYTHONS = 3.13 3.12 3.11
# A worker that dies ends the run: one started in its place would wait for ever. So does a test that takes longer than
# five minutes, whose threads are printed.
BOUNDED = --max-worker-restart=0 -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true
PYTEST = -m pytest -q -n 2 --dist loadgroup --no-loadscope-reorder $(BOUNDED) $(PYTEST_ARGS)
PYTEST_ARGS =
INSTALL = -m pip install --no-compile --quiet --quiet --disable-pip-version-check
FOR_TESTS = -e ".[serve,grammar]" --group test
PROMPT = def quicksort(items):
export PROMPT

# Everything here runs on the CPU, unless you say `JAX_PLATFORMS=cuda make ...`.
JAX_PLATFORMS ?= cpu
export JAX_PLATFORMS

# Python compiles JAX once for each environment, not in every process that a test starts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-doors test-long test-slow test-oldest test-aot test-aot-all test-models check docs format notebooks bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 21

demo: .venv-demo/installed  ## watch speculative decoding of real text
	@.venv-demo/bin/jax-specdec generate --compare -- "$$PROMPT"

# mypy has one thread, so it runs beside the tests; both are heard.
test: .venv-test/installed  ## lint, type-check, run every test that is not long and needs no GPU
	@echo "test: doctests and tests on the newest JAX"
	@$(MAKE) --no-print-directory check & checks=$$!; \
		.venv-test/bin/python $(PYTEST); tests=$$?; \
		wait $$checks || { echo "test: see above what ruff or mypy found"; exit 1; }; exit $$tests

test-doors: .venv-test/installed  ## start every command as a user does, on tiny models as they are published
	@echo "test-doors: generate, serve and bench by their defaults"
	@.venv-test/bin/python $(PYTEST) tests/doors -m doors

test-long: .venv-test/installed  ## run the long tests that `make test` leaves out
	@echo "test-long: long tests on the newest JAX"
	@.venv-test/bin/python $(PYTEST) tests -m "long and not slow and not gpu and not aot"

test-slow: .venv-test/installed  ## run what is left: more layouts, larger statistics, other projects' weights
	@echo "test-slow: slow tests on the newest JAX"
	@.venv-test/bin/python $(PYTEST) tests -m "slow and not gpu and not aot" -k "not without_end"

test-oldest: .venv-test-oldest/installed  ## the same on Python 3.11 and JAX 0.10.2, without doctests, long runs and what every JAX does alike
	@echo "test-oldest: tests on the oldest JAX"
	@.venv-test-oldest/bin/python $(PYTEST) tests -m "not (long or slow or newest or doors or gpu or aot)"

test-aot: .venv-aot/gpus  ## compile for TPUs and GPUs that are not there, and look at what the programs take
	@echo "test-aot: programs for a TPU v5e, the kernel for H200, B200, B300 and RTX PRO 6000"
	@.venv-aot/bin/python $(PYTEST) -m "aot and not slow" tests/test_ahead_of_time.py

test-aot-all: .venv-aot/gpus  ## the same for every case, written to docs/tpu.md
	@.venv-aot/bin/python $(PYTEST) -m "aot and slow" tests/test_ahead_of_time.py
	@.venv-aot/bin/python benchmarks/ahead_of_time_grid.py

test-models: .venv-models/installed .venv-transformers/installed  ## models of other projects, from their own packages, with tiny random weights
	@echo "test-models: models of other projects"
	@.venv-models/bin/python -m pytest -q $(PYTEST_ARGS) tests/integrations/test_real_models.py
	@.venv-transformers/bin/python -m pytest -q $(PYTEST_ARGS) tests/integrations/test_families.py tests/integrations/test_gemma4.py

check: .venv-test/installed  ## lint and type-check
	@echo "check: ruff, mypy"
	@.venv-test/bin/ruff check --quiet
	@.venv-test/bin/ruff format --check --quiet
	@.venv-test/bin/mypy --no-error-summary

docs: .venv-test/docs  ## build the site into build/docs; a warning is an error
	@echo "docs: the site"
	@.venv-test/bin/sphinx-build -q -n -W --keep-going -E -j 2 -c docs -d build/doctrees . build/docs
	@echo "docs: open build/docs/index.html"

format: .venv-test/installed  ## format and sort imports
	@.venv-test/bin/ruff check --quiet --fix
	@.venv-test/bin/ruff format

notebooks: .venv-test/installed  ## run the notebooks and write their outputs back
	@.venv-test/bin/python tools/run_notebooks.py

bench: .venv-bench/installed  ## run the benchmarks
	@set -e; for file in benchmarks/bench_*.py; do \
		echo "bench: $$file"; .venv-bench/bin/python "$$file"; done

clean:  ## remove the environments made here, and caches
	rm -rf .venv-demo .venv-test .venv-test-oldest .venv-aot .venv-models .venv-transformers .venv-bench
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache

.venv-demo/installed: pyproject.toml tools/make_venv.sh
	@tools/make_venv.sh .venv-demo "$(PYTHONS)" -e ".[lm]"
	@touch $@

.venv-test/installed: pyproject.toml tools/make_venv.sh
	@tools/make_venv.sh .venv-test "$(PYTHONS)" $(FOR_TESTS)
	@touch $@

.venv-test/docs: .venv-test/installed
	@.venv-test/bin/python $(INSTALL) --group docs
	@touch $@

.venv-test-oldest/installed: pyproject.toml tools/make_venv.sh
	@tools/make_venv.sh .venv-test-oldest 3.11 $(FOR_TESTS) jax==0.10.2 jaxlib==0.10.2
	@touch $@

# keras-hub without its dependencies: tensorflow-text is one, and nothing here imports it.
.venv-models/installed: pyproject.toml tools/make_venv.sh
	@tools/make_venv.sh .venv-models "$(PYTHONS)" $(FOR_TESTS) --group models
	@.venv-models/bin/python $(INSTALL) --no-deps keras-hub==0.32.0
	@touch $@

.venv-transformers/installed: pyproject.toml tools/make_venv.sh
	@tools/make_venv.sh .venv-transformers "$(PYTHONS)" $(FOR_TESTS) --group transformers
	@touch $@

.venv-aot/installed: pyproject.toml tools/make_venv.sh
	@tools/make_venv.sh .venv-aot "$(PYTHONS)" -e ".[serve,grammar,tpu]" --group test
	@touch $@

# XLA for NVIDIA GPUs, of jaxlib's version, and ptxas; none of the libraries that running needs.
.venv-aot/gpus: .venv-aot/installed
	@version=$$(.venv-aot/bin/python -c 'import jaxlib; print(jaxlib.__version__)') && \
		.venv-aot/bin/python $(INSTALL) --no-deps "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version" nvidia-cuda-nvcc
	@touch $@

.venv-bench/installed: pyproject.toml tools/make_venv.sh
	@tools/make_venv.sh .venv-bench "$(PYTHONS)" -e ".[lm]" --group bench
	@touch $@
