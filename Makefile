# Every target makes what it needs, from a machine that has only Python, git and make: with uv where
# uv is on PATH, else with venv and pip. An environment is made once; it is renewed when its lock
# or pyproject.toml changes.
#
#   PYTHON=...   interpreter of the main environment (3.11 to 3.14)
#   ARGS=...     arguments of `make train` and its like, for example ARGS="--strategy one_device"
#   BENCH=...    one benchmark by name; without it, all
#   TESTS=...    what the pytest of `make test` and of the `make test-*` gets, for example TESTS="tests/context -x"

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
PEERS := .venv-peers/.complete
TORCHREC := .venv-torchrec/.complete
TFRA := .venv-tfra/.complete
RAY_DATA := .venv-ray-data/.complete
TPU := .venv-tpu/.complete
GPU := .venv-gpu/.complete
CUDA := .venv-cuda/.complete
THIRD_PARTY := .venv-third-party/.complete
RAY := .venv-ray/.complete
RELEASE := .venv-release/.complete
FUZZ := .venv-fuzz/.complete
DOCS := .venv-docs/.complete

COMPATIBILITY := -m compatibility

# Tests that wait for processes leave cores idle. A file's tests share what is dear to make. Files
# keep their order: sorted by the number of tests, those with one long test would come last.
IN_PARALLEL := --numprocesses 3 --dist loadfile --no-loadscope-reorder
# A test or two for each use of JAX's and Keras's insides. These wait for nothing, and `make test` has
# the runs of two environments at the same time.
VERSIONS := --numprocesses 0 -m "compatibility and not slow"

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

# Makes the environment of folder $(1) with interpreter $(2) hold exactly the lock $(3) and us; $(4)
# are more options of the installer. Nothing is compiled: most modules
# are never imported.
define environment
@test -n "$(2)" || { echo "No Python 3.11 to 3.14 with venv found: install one, or give it with PYTHON=/its/path." >&2; exit 1; }
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
@touch $(1)/.complete
endef

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

$(MAIN): requirements/dev.lock pyproject.toml
	$(call environment,.venv,$(PYTHON),requirements/dev.lock)

$(OLDEST): requirements/oldest.lock pyproject.toml
	$(call environment,.venv-oldest,$(OLDEST_PYTHON),requirements/oldest.lock)

$(NEWEST): requirements/dev.lock pyproject.toml
	$(call environment,.venv-newest,$(NEWEST_PYTHON),requirements/dev.lock)

# dev.lock and a few packages more.
$(TPU) $(GPU) $(FUZZ) $(RAY): .venv-%/.complete: requirements/dev.lock requirements/%.txt pyproject.toml
	$(call environment,.venv-$*,$(PYTHON),requirements/dev.lock)
	@if uv --version >/dev/null 2>&1; then \
		uv pip install --quiet --compile-bytecode --python .venv-$*/bin/python -r requirements/$*.txt; \
	else \
		.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/$*.txt; \
	fi

# The lock is complete, but for what KerasHub asks for and does not use.
$(THIRD_PARTY): requirements/third_party.lock pyproject.toml
	$(call environment,.venv-third-party,$(PYTHON),requirements/third_party.lock,--no-deps)

$(RELEASE): requirements/release.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 to 3.14 with venv found." >&2; exit 1; }
	test -x .venv-release/bin/python || "$(PYTHON)" -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/release.txt
	@touch $@

$(CUDA): requirements/cuda.lock pyproject.toml
	$(call environment,.venv-cuda,$(PYTHON),requirements/cuda.lock)

$(DOCS): requirements/docs.lock pyproject.toml
	$(call environment,.venv-docs,$(PYTHON),requirements/docs.lock)

# torch comes first and by pip: a CPU build on the local disk is seen by pip only, and the build
# that a resolver would choose in its place brings several GB of CUDA.
$(PEERS): requirements/peers.txt
	@test -n "$(OLDEST_PYTHON)" || { echo "No Python 3.11 to 3.14 with venv found." >&2; exit 1; }
	@echo "Making .venv-peers: PyTorch and TensorFlow, minutes and gigabytes"
	test -x .venv-peers/bin/python || "$(OLDEST_PYTHON)" -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/peers.txt
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

# torchrec asks for FBGEMM with CUDA and runs with the one for the CPU, whose series fits torch 2.13.
$(TORCHREC): requirements/torchrec.txt
	@test -n "$(OLDEST_PYTHON)" || { echo "No Python 3.11 to 3.14 with venv found." >&2; exit 1; }
	test -x .venv-torchrec/bin/python || "$(OLDEST_PYTHON)" -m venv .venv-torchrec
	.venv-torchrec/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-torchrec/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/torchrec.txt
	.venv-torchrec/bin/python -m pip install --quiet --disable-pip-version-check --no-deps torchrec==1.8.0
	@touch $@

$(TFRA): requirements/tfra.txt
	@test -n "$(OLDEST_PYTHON)" || { echo "No Python 3.11 to 3.14 with venv found." >&2; exit 1; }
	test -x .venv-tfra/bin/python || "$(OLDEST_PYTHON)" -m venv .venv-tfra
	.venv-tfra/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/tfra.txt
	@touch $@

$(RAY_DATA): requirements/ray_data.txt
	@test -n "$(OLDEST_PYTHON)" || { echo "No Python 3.11 to 3.14 with venv found." >&2; exit 1; }
	test -x .venv-ray-data/bin/python || "$(OLDEST_PYTHON)" -m venv .venv-ray-data
	.venv-ray-data/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/ray_data.txt
	@touch $@

.PHONY: test
test: ## all that CI runs; pytest's own summary comes last
	@$(MAKE) --jobs 2 TOGETHER=yes $(MAIN) $(OLDEST) lint types compatibility
	$(MAIN_QUICKLY) .venv/bin/python -m pytest $(IN_PARALLEL) $(TESTS)

.PHONY: fuzz
fuzz: $(FUZZ) ## FRAMES (1000000) for each parser of a socket, and EXAMPLES (1000) of its property tests
	.venv-fuzz/bin/python -m tests.fuzz --frames $(or $(FRAMES),1000000)
	FUZZ_EXAMPLES=$(or $(EXAMPLES),1000) .venv-fuzz/bin/python -m pytest $(IN_PARALLEL) -m fuzz $(TESTS)

.PHONY: soak
soak: $(MAIN) ## HOURS (4) of training with a kill every two minutes: nothing may grow; plots in runs/soak
	.venv/bin/python -m tests.soak lockstep --hours $(or $(HOURS),4)
	.venv/bin/python -m tests.soak servers --hours $(or $(HOURS),4)

.PHONY: chaos
chaos: $(MAIN) ## N (1000) faults at random times and places, drawn from SEED (7); needs root, tc and iptables
	.venv/bin/python -m tests.chaos --number $(or $(N),1000) --seed $(or $(SEED),7) $(ARGS)

.PHONY: test-slow
test-slow: $(MAIN) ## the tests that take minutes
	.venv/bin/python -m pytest -m slow --numprocesses 2 --dist loadfile $(TESTS)

.PHONY: crds test-crds
crds: $(MAIN) ## definitions of JobSet, TrainJob and KubeRay, from their releases; needs GitHub
	.venv/bin/python -m tests.manifests.download_crds $(ARGS)

test-crds: crds ## rendered manifests and wrong variants of them against these definitions
	.venv/bin/python -m pytest -m "slow or not slow" tests/manifests/test_custom_resources.py $(TESTS)

.PHONY: test-tpu
test-tpu: $(TPU) ## training steps compiled for TPUs of 8 to 256 chips; needs no TPU
	.venv-tpu/bin/python -m pytest tests/programs tests/planning/test_tpu.py --ignore tests/programs/test_gpu.py $(TESTS)

.PHONY: test-gpu
test-gpu: $(GPU) ## the training step compiled for eight H100; needs no GPU
	.venv-gpu/bin/python -m pytest tests/programs/test_gpu.py tests/planning/test_gpu.py

# Where nothing can be installed, an interpreter with JAX for CUDA, Keras and PyTorch will do.
GPU_PYTHON = .venv-cuda/bin/python

.PHONY: gpu
gpu: $(if $(filter .venv-cuda/bin/python,$(GPU_PYTHON)),$(CUDA)) ## checks, tests and benchmarks on this machine's GPU, in an hour or two; goes on where it was stopped
	@$(GPU_PYTHON) -c "import jax; print(jax.devices('gpu'))" || { \
		echo "JAX finds no GPU here: see the error above, nvidia-smi, and docs/gpu.md." >&2; exit 1; }
	@mkdir -p runs/gpu; failed=; \
	export KERAS_BACKEND=jax PYTHONPATH=$(CURDIR)/src:$(CURDIR):$$PYTHONPATH; \
	export STRATAGEM_GPU_RESULTS=$(CURDIR)/runs/gpu/checks; \
	run() { echo "== $$*"; $(GPU_PYTHON) -m "$$@" || failed="$$failed $$1"; }; \
	run stratagem doctor; \
	run tests.gpu --resume --processes 4 --limit 900; \
	run tests.gpu --resume --alone --limit 600; \
	run tests.on_gpu --platform gpu_alone --limit-s 1500 --output runs/gpu/suites; \
	run benchmarks.gpu --resume --profile --budget-s 1800 --output runs/gpu/bench; \
	run benchmarks.gpu.report runs/gpu/bench/results.json --output runs/gpu/report; \
	for side in fit scan; do run benchmarks.gpu_profile.gaps $$side resnet50 --output runs/gpu/gaps-$$side.json; done; \
	run benchmarks.gpu_plan --output runs/gpu/plan --parts plan,measure,eight; \
	if test -n "$$failed"; then echo "Failed:$$failed. Results: runs/gpu." >&2; exit 1; fi

.PHONY: test-peers
test-peers: $(PEERS) ## the tests of datasets of TensorFlow, PyTorch and Hugging Face, and of the data service
	.venv-peers/bin/python -m pytest tests/input/sources tests/input/service/test_tf_data_service.py tests/keras/training/test_data_sources.py

.PHONY: test-keras
test-keras: $(MAIN) ## Keras's own tests with each strategy as the current one; ARGS=--record renews the list
	.venv/bin/python -m tests.keras_own $(ARGS)

.PHONY: test-third-party
test-third-party: $(THIRD_PARTY) ## programs of KerasHub, KerasRS, KerasTuner, Optax, Flax, Haiku and Equinox under strategies
	$(QUICKLY) .venv-third-party/bin/python -m pytest $(IN_PARALLEL) tests/third_party $(TESTS)

.PHONY: test-ray
test-ray: $(RAY) ## strategies inside Ray Train, Ray Tune and Ray jobs, on a cluster of one machine
	$(QUICKLY) .venv-ray/bin/python -m pytest tests/on_ray $(TESTS)

# Only root may install packages.
.PHONY: test-r
test-r: $(MAIN) ## the page about R, by R; installs R and reticulate from Debian's packages if they are missing
	@Rscript -e 'library(reticulate)' >/dev/null 2>&1 || { set -e; \
		command -v apt-get >/dev/null || { echo "No R with reticulate found, and no apt-get to install it." >&2; exit 1; }; \
		root=$$(test "$$(id -u)" -eq 0 || echo sudo); \
		$$root apt-get update --quiet; \
		$$root apt-get install --quiet --yes --no-install-recommends r-base-core r-cran-reticulate; }
	$(MAIN_QUICKLY) .venv/bin/python -m pytest -m slow tests/docs/test_r.py tests/multiprocess/test_walk_through.py $(TESTS)

.PHONY: test-slurm
test-slurm: $(MAIN) ## scripts of `stratagem slurm render` on a Slurm of three nodes, which it makes; root on Debian
	$(MAIN_QUICKLY) .venv/bin/python -m tests.slurm_cluster $(TESTS)

.PHONY: lint
lint: $(MAIN) ## ruff (rules and format), layers of packages, codespell
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports --no-cache --no-logo
	.venv/bin/codespell

.PHONY: types
types: $(MAIN) ## pyright, strict on src/
	.venv/bin/pyright

.PHONY: compatibility
compatibility: test-newest test-oldest ## compatibility tests on the oldest and the newest versions

.PHONY: test-oldest
test-oldest: $(OLDEST) ## compatibility tests on the lowest versions that pyproject.toml allows
	$(QUICKLY) $(LIGHTLY) .venv-oldest/bin/python -m pytest --quiet $(VERSIONS)

.PHONY: test-oldest-all
test-oldest-all: $(OLDEST) ## all compatibility tests on the lowest versions, slow to run
	$(QUICKLY) $(LIGHTLY) .venv-oldest/bin/python -m pytest $(IN_PARALLEL) $(COMPATIBILITY)

.PHONY: test-newest
test-newest: ## compatibility tests on the newest Python, JAX and Keras of the lock
	@if test -n "$(NEWEST_PYTHON)"; then \
		$(MAKE) --silent $(NEWEST) && $(QUICKLY) $(LIGHTLY) .venv-newest/bin/python -m pytest --quiet $(VERSIONS); \
	else \
		echo "Skipped: the tests on the newest JAX. It needs Python 3.12 to 3.14, and"; \
		echo "none is on PATH or under pyenv. The main environment has the newest for its Python."; \
	fi

# JAX's nightly builds and release candidates; pip goes on without an index that it cannot reach.
# `make test-latest JAX_NIGHTLY=` tries the newest release.
JAX_NIGHTLY = https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple/

# Without upper bounds, and with what was built last night: run each night, not by CI. Keras comes as
# keras-nightly, which has the same files. What moved is printed before the tests, which fail then.
.PHONY: test-latest
test-latest: ## what the nightly Keras and JAX moved, and the compatibility tests on them, whatever the lock allows
	@test -n "$(or $(NEWEST_PYTHON),$(PYTHON))" || { echo "No Python 3.11 to 3.14 found." >&2; exit 1; }
	"$(or $(NEWEST_PYTHON),$(PYTHON))" -m venv --clear .venv-latest
	.venv-latest/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	.venv-latest/bin/python -m pip uninstall --quiet --yes keras
	.venv-latest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --pre \
		--retries 1 $(if $(JAX_NIGHTLY),--extra-index-url $(JAX_NIGHTLY)) keras-nightly jax jaxlib orbax-checkpoint
	.venv-latest/bin/python -m pip list | grep -iE "^(jax|jaxlib|keras-nightly|orbax-checkpoint) "
	@.venv-latest/bin/python -m tests.architecture.test_private_names || moved=yes; \
	$(PROGRAMS) .venv-latest/bin/python -m pytest $(IN_PARALLEL) $(COMPATIBILITY) && test -z "$$moved"

.PHONY: release-check
release-check: $(RELEASE) ## builds the package into dist/ and checks all that a release needs
	.venv-release/bin/python release/check.py

.PHONY: test-newest-all
test-newest-all: ## all tests of `make test`, slow to run, on the newest versions; needs Python 3.12 to 3.14
	@test -n "$(NEWEST_PYTHON)" || { echo "No Python 3.12 to 3.14 found: install one." >&2; exit 1; }
	@$(MAKE) --silent $(NEWEST)
	$(QUICKLY) .venv-newest/bin/python -m pytest $(IN_PARALLEL) $(TESTS)

.PHONY: audit
audit: $(RELEASE) ## compares the locks with the advisories of PyPI; needs the network
	@for lock in $(filter-out requirements/oldest.lock,$(wildcard requirements/*.lock)); do \
		.venv-release/bin/pip-audit --disable-pip --require-hashes --strict -r $$lock || failed=yes; \
	done; test -z "$$failed"

.PHONY: train
train: $(MAIN) ## trains a convolutional network on handwritten digits
	.venv/bin/python examples/01_train_digits.py $(ARGS)

.PHONY: train-clicks
train-clicks: $(MAIN) ## trains a factorisation machine on parameter servers: a table too large for any process
	.venv/bin/python -m examples.clicks --model factorisation --loop fit $(ARGS)

.PHONY: clicks-loop
clicks-loop: $(MAIN) ## the same by a ClusterCoordinator
	.venv/bin/python -m examples.clicks --model factorisation --loop coordinator $(ARGS)

.PHONY: clicks-wide
clicks-wide: $(MAIN) ## a wide and deep model, likewise by fit
	.venv/bin/python -m examples.clicks --model wide_and_deep --loop fit $(ARGS)

.PHONY: clicks-wide-loop
clicks-wide-loop: $(MAIN) ## the same by a ClusterCoordinator
	.venv/bin/python -m examples.clicks --model wide_and_deep --loop coordinator $(ARGS)

.PHONY: clicks-compare
clicks-compare: $(MAIN) ## the same AUC on one device, by one worker, and by four that wait for nobody
	.venv/bin/python -m examples.clicks.compare $(ARGS)

.PHONY: bench
bench: $(MAIN) $(if $(filter recommenders,$(BENCH)),$(TORCHREC) $(TFRA)) $(if $(filter input_service,$(BENCH)),$(RAY_DATA)) $(if $(filter-out allreduce checkpoint first_step files fit_peers loop parameter_server plan recommenders recovery scaling,$(BENCH)),,$(PEERS)) $(if $(filter published_scaling,$(BENCH)),$(GPU)) ## benchmarks; tables here, results and plots in runs/bench
	.venv/bin/python -m benchmarks $(BENCH)

.PHONY: bench-compare
bench-compare: $(MAIN) ## this tree beside revision BASE (HEAD), in turns; exits with 1 if slower than BOUND (0.05) allows
	.venv/bin/python -m benchmarks.compare $(or $(BASE),HEAD) $(BENCH) --bound $(or $(BOUND),0.05) $(ARGS)

.PHONY: peers
peers: $(PEERS) ## environment with the frameworks that we compare ourselves with

.PHONY: peers-recommenders
peers-recommenders: $(PEERS) $(TORCHREC) $(TFRA) ## the same with TorchRec, and with TensorFlow's recommenders-addons

.PHONY: peers-input
peers-input: $(PEERS) $(RAY_DATA) ## the same with Ray Data, for the benchmark of the input service

VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.PHONY: docs
docs: $(DOCS) ## builds the documentation into build/docs/<version>, which opens without a server
	@rm -rf build/docs/$(VERSION)
	.venv-docs/bin/sphinx-build --fail-on-warning --keep-going --jobs 2 --quiet \
		--doctree-dir build/docs-cache/doctrees docs build/docs/$(VERSION)
	@echo "Open build/docs/$(VERSION)/index.html"

.PHONY: docs-check
docs-check: docs ## opens pages of the documentation in Chromium: search, and accessibility by axe
	@if command -v node >/dev/null && command -v npm >/dev/null; then set -e; \
		npm install --silent --no-fund --no-audit --prefix build/docs-check axe-core@4.14.1 playwright-core@1.65.1; \
		node docs/check_accessibility.mjs build/docs/$(VERSION); \
	else \
		echo "Skipped: the check of the pages. It needs node and npm on PATH."; \
	fi

.PHONY: format
format: $(MAIN) ## mends what ruff can mend
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

# Without --no-header the command, and without --no-emit-index-url the index of whoever runs this,
# would be written into the lock.
LOCK = uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	--no-emit-index-url --no-emit-find-links --upgrade pyproject.toml

.PHONY: lock
lock: ## renews the locks; needs uv
	$(LOCK) --extra dev --output-file requirements/dev.lock
	$(LOCK) --extra test --resolution lowest-direct --output-file requirements/oldest.lock
	$(LOCK) --extra docs --constraint requirements/dev.lock --output-file requirements/docs.lock
	$(LOCK) requirements/third_party.txt --constraint requirements/dev.lock \
		--override requirements/third_party_overrides.txt --output-file requirements/third_party.lock
	$(LOCK) requirements/cuda.txt --extra test --extra plots --extra cuda13 --constraint requirements/dev.lock \
		--output-file requirements/cuda.lock

.PHONY: clean
clean: ## removes the environments, caches and builds; runs/ stays
	rm -rf .venv .venv-oldest .venv-newest .venv-peers .venv-torchrec .venv-tfra .venv-ray-data .venv-tpu .venv-gpu .venv-cuda .venv-third-party .venv-ray .venv-docs .venv-release .venv-latest build dist .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
