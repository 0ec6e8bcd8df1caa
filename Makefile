# Every target makes what it needs, from a machine that has only Python, git and make: with uv where
# uv is on PATH, else with venv and pip. An environment is made once; it is renewed when its lock
# or pyproject.toml changes.
#
#   PYTHON=...   interpreter of the main environment (3.11 to 3.14)
#   TESTS=...    what pytest gets, for example TESTS="tests/unit/execution/context -x"
#   ARGS=...     arguments of the program behind train, test-external, bench-compare or release-check
#   BENCH=...    one benchmark by name; without it, all

SHELL := /bin/sh
MAKEFLAGS += --no-print-directory
.DELETE_ON_ERROR:
# Each process would compile all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE
ifndef TOGETHER
.NOTPARALLEL:
endif
.DEFAULT_GOAL := help

# Prints the first of the candidates $(1) that starts and has a version between $(2) and 3.14.
# Each is run and not only looked up, because a shim of pyenv is on PATH whether it works or not.
first_python = $(shell for python in $(1); do \
	"$$python" -c 'import ensurepip, sys; sys.exit(not ($(2)) <= sys.version_info[:2] <= (3, 14))' \
	>/dev/null 2>&1 && { echo "$$python"; break; }; done)
pyenv_pythons = $(wildcard $(foreach root,$(PYENV_ROOT) $(HOME)/.pyenv,$(root)/versions/$(1)*/bin/python))
three_eleven := 3, 11
three_twelve := 3, 12

# Not `:=`: the interpreters are looked for only by a recipe that makes an environment.
ifndef PYTHON
PYTHON = $(call first_python,python3 python3.11 python3.12 python3.13 python3.14 $(call pyenv_pythons,3.11),$(three_eleven))
endif
OLDEST_PYTHON = $(or $(call first_python,python3.11 $(call pyenv_pythons,3.11),$(three_eleven)),$(PYTHON))
NEWEST_PYTHON = $(call first_python,python3.14 $(call pyenv_pythons,3.14) \
	python3.13 $(call pyenv_pythons,3.13) \
	python3.12 $(call pyenv_pythons,3.12),$(three_twelve))

MAIN := .venv/.complete
OLDEST := .venv-oldest/.complete
NEWEST := .venv-newest/.complete
DOCS := .venv-docs/.complete
EXTERNAL := .venv-external/.complete
PEERS := .venv-peers/.complete

# Tests that wait for processes leave cores idle. A file's tests share what is dear to make. Files
# keep their order: sorted by the number of tests, those with one long test would come last.
IN_PARALLEL := --numprocesses 3 --dist loadfile --no-loadscope-reorder

# What the tests run is small: most of their time is XLA's, which here compiles for no speed, and
# each program once for all processes. `make clean` removes the programs.
PROGRAMS := JAX_COMPILATION_CACHE_DIR=$(CURDIR)/build/test-programs \
	JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
NO_SPEED := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
# Keras without the libraries that it imports only if they are there: a process starts in 60 % of the time.
LIGHTLY := PYTHONPATH="$(CURDIR)/tests/startup$(if $(PYTHONPATH),:$(PYTHONPATH))"
QUICKLY := XLA_FLAGS="$(NO_SPEED)" $(PROGRAMS)
# The older emitters of fused operations compile in a third of the time. Only for the main
# environment: the newest JAX has them no more. They miscompute lookups by 8-bit ids: one test of
# these runs in the other environments only.
MAIN_QUICKLY := XLA_FLAGS="$(NO_SPEED) --xla_cpu_use_fusion_emitters=false \
	--xla_cpu_parallel_codegen_split_count=1" $(PROGRAMS) $(LIGHTLY)

define needs_python
@test -n "$(1)" || { echo "No Python 3.11 to 3.14 with venv found: install one, or give it with PYTHON=/its/path." >&2; exit 1; }
endef

# Makes the environment of folder $(1) with interpreter $(2) hold the lock $(3) and us; $(4) are more
# options of the installer. Nothing is compiled: most modules are never imported.
define environment
$(call needs_python,$(2))
@echo "Making $(1) from $(3) ($$($(2) --version))"
@if uv --version >/dev/null 2>&1; then set -e; \
	test -x $(1)/bin/python || uv venv --quiet --no-python-downloads --python "$(2)" $(1); \
	uv pip install --quiet --python $(1)/bin/python --require-hashes $(4) -r $(3); \
	uv pip install --quiet --python $(1)/bin/python --no-deps -e .; \
else set -e; \
	test -x $(1)/bin/python || "$(2)" -m venv $(1); \
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes $(4) -r $(3); \
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .; \
fi
@touch $@
endef

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

.PHONY: setup
setup: $(MAIN) ## makes .venv, the main environment

$(MAIN): requirements/dev.lock pyproject.toml
	$(call environment,.venv,$(PYTHON),requirements/dev.lock)

$(OLDEST): requirements/oldest.lock pyproject.toml
	$(call environment,.venv-oldest,$(OLDEST_PYTHON),requirements/oldest.lock)

$(NEWEST): requirements/dev.lock pyproject.toml
	$(call environment,.venv-newest,$(NEWEST_PYTHON),requirements/dev.lock)

$(DOCS): requirements/docs.lock pyproject.toml
	$(call environment,.venv-docs,$(PYTHON),requirements/docs.lock)

# The lock is complete, but for what KerasHub asks for and does not use.
$(EXTERNAL): requirements/external.lock pyproject.toml
	$(call environment,.venv-external,$(PYTHON),requirements/external.lock,--no-deps)

# CUDA 13 with JAX, and PyTorch, beside dev.lock: 7 GB.
.venv/.cuda: requirements/cuda.lock $(MAIN)
	$(call environment,.venv,$(PYTHON),requirements/cuda.lock)

# By pip, which reads groups from 25.1 on: it takes a CPU build of torch where it is told of one, and
# the build that uv would choose brings several GB of CUDA. TorchRec asks for FBGEMM with CUDA, and
# runs with the one for the CPU.
$(PEERS): pyproject.toml
	$(call needs_python,$(OLDEST_PYTHON))
	@echo "Making .venv-peers: PyTorch and TensorFlow, minutes and gigabytes"
	test -x .venv-peers/bin/python || "$(OLDEST_PYTHON)" -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	.venv-peers/bin/python -m pip install --quiet --group peers
	.venv-peers/bin/python -m pip install --quiet --no-deps torchrec==1.8.0 --editable .
	@touch $@

.PHONY: train
train: $(MAIN) ## trains a convolutional network on handwritten digits
	.venv/bin/python examples/01_train_digits.py $(ARGS)

.PHONY: test
test: ## all that CI runs: lint, types, oldest and newest versions, quick tests; pytest's own summary comes last
	@$(MAKE) --jobs 2 TOGETHER=yes TESTS= $(MAIN) $(OLDEST) lint test-compat
	$(MAIN_QUICKLY) .venv/bin/python -m pytest $(IN_PARALLEL) $(TESTS)

.PHONY: test-slow
test-slow: $(MAIN) ## the tests that take minutes
	.venv/bin/python -m pytest -m slow --numprocesses 2 --dist loadfile $(TESTS)

ON_OLDEST = $(QUICKLY) $(LIGHTLY) .venv-oldest/bin/python -m pytest
ON_NEWEST = $(QUICKLY) $(LIGHTLY) .venv-newest/bin/python -m pytest
# Both at the same time, each in one process.
COMPATIBLE := --quiet --numprocesses 0 -m "compatibility and not slow"

# At night all of `make test` on the newest. What is run op by op depends little on versions.
.PHONY: test-compat
.SECONDEXPANSION:
test-compat: $$(if $$(filter newest,$$(ALL)),,$(OLDEST)) $$(if $$(filter oldest,$$(ALL)),,$$(if $$(NEWEST_PYTHON),$(NEWEST))) ## on the oldest and the newest versions; ALL=oldest, ALL=newest: the long runs of the night
	@case "$(ALL)/$(NEWEST_PYTHON)" in \
	oldest/*) $(ON_OLDEST) $(IN_PARALLEL) -m compatibility -k "not eager" $(TESTS);; \
	newest/) echo "No Python 3.12 to 3.14 found: install one." >&2; exit 1;; \
	newest/*) $(ON_NEWEST) $(IN_PARALLEL) $(TESTS);; \
	/) echo "Skipped: the tests on the newest JAX. It needs Python 3.12 to 3.14, and"; \
		echo "none is on PATH or under pyenv. The main environment has the newest for its Python."; \
		$(ON_OLDEST) $(COMPATIBLE) $(TESTS);; \
	*) $(ON_OLDEST) $(COMPATIBLE) $(TESTS) & oldest=$$!; \
		$(ON_NEWEST) $(COMPATIBLE) $(TESTS); newest=$$?; wait $$oldest && exit $$newest;; \
	esac

.PHONY: test-external
test-external: ## checks by NAME: libraries and clusters of others, compilers, faults, hours; without NAME, their list
	$(call needs_python,$(PYTHON))
	@"$(or $(if $(filter latest,$(NAME)),$(NEWEST_PYTHON)),$(PYTHON))" -m validation $(NAME) $(ARGS)

.PHONY: lint
lint: $(MAIN) ## ruff (rules and format), layers of packages, codespell, pyright (strict on src/)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports --no-cache --no-logo
	.venv/bin/codespell
	.venv/bin/pyright

.PHONY: format
format: $(MAIN) ## mends what ruff can mend
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

.PHONY: bench
bench: $(MAIN) $(if $(filter-out allreduce checkpoint first_step fit_peers input_service loop parameter_server recommenders recovery scaling,$(BENCH)),,$(PEERS)) ## benchmarks; tables here, results and plots in runs/bench
	.venv/bin/python -m benchmarks $(BENCH)

.PHONY: bench-compare
bench-compare: $(MAIN) ## this tree beside revision BASE (HEAD), in turns; exits with 1 if slower than BOUND (0.05) allows
	.venv/bin/python -m benchmarks.compare $(or $(BASE),HEAD) $(BENCH) --bound $(or $(BOUND),0.05) $(ARGS)

VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.PHONY: docs
docs: $(DOCS) ## builds the documentation into build/docs/<version>; CHECK=yes opens its pages in Chromium
	@rm -rf build/docs/$(VERSION)
	.venv-docs/bin/sphinx-build --fail-on-warning --keep-going --jobs 2 --quiet \
		--doctree-dir build/docs-cache/doctrees docs build/docs/$(VERSION)
	@if test -n "$(CHECK)"; then set -e; \
		npm install --silent --no-fund --no-audit --prefix build/docs-check axe-core@4.14.1 playwright-core@1.65.1; \
		node docs/check_accessibility.mjs build/docs/$(VERSION); \
	fi
	@echo "Open build/docs/$(VERSION)/index.html"

# Where nothing can be installed, an interpreter with JAX for CUDA, Keras and PyTorch will do.
GPU_PYTHON = .venv/bin/python

.PHONY: gpu
gpu: $(if $(filter .venv/bin/python,$(GPU_PYTHON)),.venv/.cuda) ## checks, tests and benchmarks on this machine's GPU, in an hour or two; goes on where it was stopped
	@$(GPU_PYTHON) -c "import jax; print(jax.devices('gpu'))" || { \
		echo "JAX finds no GPU here: see the error above, nvidia-smi, and docs/gpu.md." >&2; exit 1; }
	@mkdir -p runs/gpu; failed=; \
	export KERAS_BACKEND=jax PYTHONPATH=$(CURDIR)/src:$(CURDIR):$$PYTHONPATH; \
	export STRATAGEM_GPU_RESULTS=$(CURDIR)/runs/gpu/checks; \
	run() { echo "== $$*"; $(GPU_PYTHON) -m "$$@" || failed="$$failed $$1"; }; \
	run stratagem doctor; \
	run validation.gpu --resume --processes 4 --limit 900; \
	run validation.gpu --resume --alone --limit 600; \
	run validation.gpu.suites --platform gpu_alone --limit-s 1500 --output runs/gpu/suites; \
	run benchmarks.gpu --resume --profile --budget-s 1800 --output runs/gpu/bench; \
	run benchmarks checkpoint --devices gpu --gigabytes 10 --peers $(GPU_PYTHON) --output runs/gpu/bench; \
	if test -n "$$failed"; then echo "Failed:$$failed. Results: runs/gpu." >&2; exit 1; fi

.PHONY: release-check
release-check: ## builds the package into dist/ and checks it; ARGS=--audit: the advisories of the locks, too
	$(call needs_python,$(PYTHON))
	@"$(PYTHON)" release/check.py $(ARGS)

# Without --no-header the command, and without --no-emit-index-url the index of whoever runs this,
# would be written into the lock.
LOCK = uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	--no-emit-index-url --no-emit-find-links --upgrade pyproject.toml
SHOWN := --extra checkpoint --extra clusters --extra data --extra observe --extra ray
TESTED := $(SHOWN) --extra migrate
AS_LOCKED := --constraint requirements/dev.lock

.PHONY: lock
lock: ## renews the locks; needs uv
	$(LOCK) $(TESTED) --group dev --output-file requirements/dev.lock
	$(LOCK) $(TESTED) --group test --resolution lowest-direct --output-file requirements/oldest.lock
	$(LOCK) $(SHOWN) --group docs $(AS_LOCKED) --output-file requirements/docs.lock
	$(LOCK) $(TESTED) --group external $(AS_LOCKED) --output-file requirements/external.lock
	$(LOCK) --extra cuda13 --group cuda $(AS_LOCKED) --output-file requirements/cuda.lock

.PHONY: clean
clean: ## removes the environments, caches and builds; runs/ stays
	rm -rf .venv .venv-oldest .venv-newest .venv-docs .venv-external .venv-peers build dist .pytest_cache .ruff_cache .hypothesis
	find src tests validation benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
