# Two commands do everything on a fresh machine with Python 3.11 or newer and make:
#
#   make demo           install, fetch the default model, decode with ar, sd and ssd side by side
#   make test           install with test extras, lint, check types, run the tests
#
# One builds the documentation as a site in build/site (open it with a local web server, or with `mkdocs serve`):
#
#   make docs           install with docs extras, build, check every link
#
# One runs the tests of clusters, which need a large extra:
#
#   make test-ray       install with the ray extra, start clusters of two nodes on this machine
#
# And one for machines with few cores, where ssd would not prepare by itself:
#
#   make demo-prepare   the same with the next speculations prepared on a core of its own: hits, and what they cost

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet

PROMPT ?= A shop sells pens at 3 dollars each and notebooks at 7 dollars. How much do 4 pens and 2 notebooks cost?

N_MUTANTS ?= 300

.PHONY: demo demo-prepare test test-ray docs mutants clean

demo: $(VENV)/.installed
	$(BIN)/saguaro compare --prompt "$(PROMPT)" --methods sd,ssd --temperature 0 --max-tokens 128
	@echo "make demo-prepare shows preparing on a core of its own, whether that pays or not"

demo-prepare: $(VENV)/.installed
	$(BIN)/saguaro compare --prompt "$(PROMPT)" --methods sd,ssd --lookahead 3 --link process --prepare always --temperature 0 --max-tokens 128

# Bytecode is written whatever the environment says: the tests start hundreds of processes.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n auto --dist loadfile

test-ray: export PYTHONDONTWRITEBYTECODE =
test-ray: $(VENV)/.installed-ray
	$(BIN)/pytest tests/cluster

# Nothing is fetched while the site is built, and the built pages load nothing from other hosts.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# Which small mistakes the tests miss (docs/testing.md). It takes long, and continues where it was interrupted.
mutants: $(VENV)/.installed-test
	$(BIN)/python -m bench.mutants --sample $(N_MUTANTS)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing Saguaro into $(VENV) (torch is large; the first time takes a few minutes)"
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	@echo "installing Saguaro and its test tools into $(VENV)"
	$(PIP) -e '.[test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-ray: pyproject.toml | $(BIN)/python
	@echo "installing Saguaro, its test tools and Ray into $(VENV)"
	$(PIP) -e '.[test,ray]'
	@touch $@ $(VENV)/.installed-test $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	@echo "installing Saguaro and what builds its documentation into $(VENV)"
	$(PIP) -e '.[docs]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build/site .mypy_cache .ruff_cache .pytest_cache .hypothesis
