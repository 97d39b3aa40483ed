# `make run` shows the product at work, `make test` is everything CI does, `make bench` measures it against its peers.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
STAMP := .venv/.made
EXTRAS := dev,bench,all
# `make run` needs no tools: a fresh clone gets a small environment, and one that has all of it uses that.
RUN_STAMP := .venv/.run
RUN_EXTRAS := http,dashboard,metrics
CODE := $(wildcard src tests tools bench examples)
ARGS ?=
SEEDS ?= 5000
BROKER_SEEDS ?= 1000
LOADS ?= 50
FLOOD ?= 1000000
# Two thirds of a test's time are waiting, for another process or a lock: three tests for each processor keep it busy.
JOBS ?= $(shell echo $$((3 * $$(getconf _NPROCESSORS_ONLN))))
# The files with tests marked `alone`: collecting all others, only to leave them out, takes ten seconds.
ALONE = $(shell grep -rl --include='test_*.py' 'pytest\.mark\.alone' tests)
# A choice by ARGS may leave one of the two steps without a test, which pytest ends with 5.
SOME = $(if $(ARGS),|| test $$? -eq 5)
# The tests of the pure part: core and models.
PURE := tests/unit/core tests/unit/audit/model tests/unit/policy/model tests/unit/queue/model \
	tests/unit/idempotency/test_model.py tests/unit/ingest/test_model.py
# Words for pytest in the first of its two steps: `make test` leaves out what `make coverage` has run.
LESS ?=

# Pyright comes with its wheel; without this it would ask the network whether there is a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# Tests start a thousand processes. Without bytecode each of them would compile all that it imports, for half of its time.
unexport PYTHONDONTWRITEBYTECODE

step = @printf '\n== %s\n' '$(1)'

.PHONY: help venv run test bench flows faults month mutants soak fmt lint house map docs dist release-check spread types collect pytest coverage clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

venv: $(STAMP) ## the environment in .venv; rebuilt only when its inputs change

$(STAMP): pyproject.toml constraints.txt tools/make_venv.sh tools/system_packages.sh
	$(call step,environment)
	@tools/system_packages.sh
	@tools/make_venv.sh $(EXTRAS)
	@touch $(STAMP)

$(RUN_STAMP): pyproject.toml constraints.txt tools/make_venv.sh tools/system_packages.sh
	$(call step,environment)
	@tools/system_packages.sh
	@tools/make_venv.sh $(RUN_EXTRAS)
	@touch $(RUN_STAMP)

run: $(if $(wildcard $(STAMP)),$(STAMP),$(RUN_STAMP)) ## eight short scenes, about 25 seconds; ARGS="--retry" for a tour of retries
	@$(BIN)/python -m reefknot.demo $(ARGS)

# The checks are single processes: two at a time. The tests come after them, because they need all of the machine.
test: $(STAMP) ## everything CI does
	@$(MAKE) --jobs=2 --output-sync=target lint coverage types collect
	@$(MAKE) pytest LESS='$(PURE:%=--ignore=%)'

bench: $(STAMP) ## the benchmarks, side by side with the peers
	@tools/system_packages.sh bench
	@$(BIN)/python -m bench $(ARGS)

flows: $(STAMP) ## how much code six ordinary flows run through, next to the kept figures; ARGS=--write keeps them
	@$(BIN)/python -m tools.flows $(ARGS)

faults: $(STAMP) ## every kill, freeze, power cut and disk error instead of a spread of them, and every story of the commands on NATS; minutes
	@REEFKNOT_FAULT_POINTS=all $(BIN)/python -m pytest tests/faults tests/integration/test_store_moves.py tests/acceptance/test_web_frameworks.py $(ARGS)
	@REEFKNOT_ACCEPTANCE_ON_NATS=all $(BIN)/python -m pytest tests/acceptance -m nats $(ARGS) $(SOME)

month: $(STAMP) ## a system lives for a month in minutes: outages, upgrades, a rollback, kills, growth; ARGS='--days 3' for less
	@$(BIN)/python -m tests.month $(ARGS)

mutants: $(STAMP) ## mutate the core, and count the mutants that no test notices; ARGS='reefknot.core.decide*' for some
	@$(BIN)/mutmut run $(ARGS)
	@$(BIN)/mutmut export-cicd-stats
	@$(BIN)/python tools/mutant_score.py

soak: $(STAMP) ## many seeds of the whole-system simulation (SEEDS=5000) and of overload (LOADS=50); FLOOD=1000000 keys
	@SIMULATION_SEEDS=$(SEEDS) $(BIN)/python -m pytest -q -n logical --dist worksteal tests/simulation/test_whole_system.py -k every_promise $(ARGS)
	@BROKER_SEEDS=$(BROKER_SEEDS) $(BIN)/python -m pytest -q -n logical --dist worksteal tests/simulation/test_whole_broker.py -k every_promise $(ARGS)
	@FLEET_WORKERS=1000 $(BIN)/python -m pytest -q -n0 tests/simulation/test_many_workers.py $(ARGS)
	@LOAD_SEEDS=$(LOADS) $(BIN)/python -m pytest -q -n logical --dist worksteal tests/simulation/test_overload.py $(ARGS)
	@FLOOD_KEYS=$(FLOOD) $(BIN)/python -m pytest -q -s tests/security/test_key_flood.py $(ARGS)
	@OUTAGE_SECONDS=180 $(BIN)/python -m pytest -q -n0 tests/acceptance/test_outage_at_ordinary_rates.py tests/acceptance/test_outage_of_a_real_server.py $(ARGS)

fmt: $(STAMP) ## format, and fix what can be fixed
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/ruff check --fix $(CODE)

lint: $(STAMP) ## format, lint, import order, house rules, words
	$(call step,format)
	@$(BIN)/ruff format --check $(CODE)
	$(call step,lint)
	@$(BIN)/ruff check $(CODE)
	$(call step,import order)
	@$(BIN)/lint-imports --no-logo --no-cache
	$(call step,house rules)
	@$(BIN)/python -m tools.check_house
	$(call step,words)
	@$(BIN)/python tools/check_words.py

house: $(STAMP) ## the rules for sizes, names, docstrings and import cycles; ARGS=--summary counts them by package
	$(call step,house rules)
	@$(BIN)/python -m tools.check_house $(ARGS)

map: $(STAMP) ## redraw the tree of modules and the graph of imports in docs/architecture.md
	@$(BIN)/python -m tools.draw_map

docs: $(STAMP) ## the documents as a site in site/; a broken link is an error
	@$(BIN)/mkdocs build --strict

dist: $(STAMP) ## wheel and sdist in dist/, tried in fresh environments, with each extra alone too; three minutes
	@$(BIN)/python -m tools.make_dist $(ARGS)

release-check: $(STAMP) ## whether this commit can be tagged: version, changelog, clean tree, tag; ARGS=0.1.0 for that version
	@$(BIN)/python -m tools.release_check $(ARGS)

spread: $(STAMP) ## a short spread of the tests on Python 3.12, 3.13 and 3.14, where they are installed; ARGS=3.13 for one
	@$(BIN)/python tools/spread.py $(ARGS)

types: $(STAMP) ## mypy strict, and pyright on tests/typing
	$(call step,types: mypy)
	@$(BIN)/mypy $(CODE)
	$(call step,types: pyright)
	@if [ -d tests/typing ]; then $(BIN)/pyright; else echo 'tests/typing is not there yet'; fi

# The bytecode of a test module takes three times as long as its import. One process makes it for all that follow.
collect: $(STAMP)
	$(call step,collection of the tests)
	@found=$$($(BIN)/python -m pytest --collect-only -q) || { tail -n 50 <<<"$$found"; exit 1; }; tail -n 1 <<<"$$found"

pytest: $(STAMP) ## the tests, snippets of the documents and examples among them; ARGS='-k breaker' for some
	$(call step,tests)
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'not alone' $(LESS) $(ARGS) $(SOME)
	$(call step,tests that need the machine for themselves)
	@$(BIN)/python -m pytest -m alone $(or $(ARGS),$(ALONE)) $(SOME)

coverage: $(STAMP) ## the branch coverage of the core by its own tests
	$(call step,branch coverage of the core)
	@$(BIN)/coverage run -m pytest -q --durations=0 --durations-min=1 $(PURE)
	@$(BIN)/coverage report

clean: ## remove what was made, .venv too
	@rm -rf .venv build dist site htmlcov mutants .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find src tests tools bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
