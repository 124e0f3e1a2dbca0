# Everything a reader, a teacher or a contributor runs. Needs Python 3.11 or newer and make; the rest goes into .venv.

PYTHON ?= python3
VENV ?= .venv
# Exact versions. `CONSTRAINTS=` (empty) takes what pyproject.toml allows instead.
CONSTRAINTS ?= constraints.txt
# `VENV_FLAGS=--system-site-packages` makes the environment see the torch that the machine already has.
VENV_FLAGS ?=
# Test processes side by side.
JOBS ?= 2
# The environment of `make test-colab`, and its torch: Colab's own is older, this one is at hand.
COLAB ?= .venv-colab
COLAB_TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
NOTEBOOKS ?= $(wildcard notebooks/*.ipynb)
# What is linted: not a program that a reader has saved here.
CODE := docs notebooks ringlearn tests tools

STAMP := $(VENV)/.installed
RUN := $(VENV)/bin/python
PYTEST := $(RUN) -m pytest
INSTALL := $(RUN) -m pip install $(if $(CI),--quiet) --disable-pip-version-check $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))

# Torch's threads in a process: tests and notebooks start several processes, and more threads than cores only wait.
course notebooks test test-all: export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help course lab test test-all test-browser test-colab lint format notebooks docs relink clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

course: $(STAMP) ## install, run every notebook and write the course as a web site: build/course/index.html
	@$(RUN) tools/build_site.py --run $(NOTEBOOKS)

lab: $(STAMP) ## install and open the notebooks in JupyterLab (LAB_FLAGS="--no-browser --port 8899" is passed on)
	$(RUN) -m jupyterlab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks $(LAB_FLAGS)

test: $(STAMP) lint ## install and run all checks: lint, unit tests, doctests, gloo processes, notebooks
	$(PYTEST) -n $(JOBS) --dist loadfile -m "not slow and not alone"
	$(PYTEST) -m "alone and not slow" $(alone) || [ $$? -eq 5 ]   # 5: no such test
	$(check-notebooks)

test-all: $(STAMP) lint ## the same with the full matrix: every combination instead of a sample
	$(PYTEST) -n $(JOBS) --dist loadfile -m "not alone"
	$(PYTEST) -m "alone" $(alone) || [ $$? -eq 5 ]
	$(check-notebooks)

test-browser: $(STAMP)-browser ## run the notebooks and their widgets in JupyterLab in a real browser (needs chromium)
	$(PYTEST) tests/browser

test-colab: $(COLAB)/.installed ## run the notebooks and their widgets with the versions that Google Colab has
	$(COLAB)/bin/python -m pytest --disable-warnings tests/colab $(wildcard tests/test_viz*.py)

# The files with tests that run alone: the others take longer to collect than to leave out.
alone = $(shell grep -lr --include='*.py' 'mark\.alone' tests)

# Runs each notebook in a fresh kernel and compares with the outputs stored in it; the last ones take longest.
define check-notebooks
$(if $(NOTEBOOKS),$(PYTEST) -n $(JOBS) --dist loadfile --nbval --nbval-sanitize-with tests/nbval_sanitize.cfg $(shell ls -r $(NOTEBOOKS)),@echo "no notebooks to check")
endef

lint: $(STAMP) ## ruff: lint and format check
	$(RUN) -m ruff check $(CODE)
	$(RUN) -m ruff format --check $(CODE)

format: $(STAMP) ## ruff: format, and fix what can be fixed
	$(RUN) -m ruff check --fix $(CODE)
	$(RUN) -m ruff format $(CODE)

notebooks: $(STAMP) ## run notebooks and store their outputs in place (NOTEBOOKS=notebooks/01*.ipynb for some)
	@$(RUN) tools/execute_notebooks.py $(NOTEBOOKS)

docs: $(STAMP) ## write the same site with the notebooks as they are stored: build/docs/index.html
	@$(RUN) tools/build_site.py

# Standard library only: a fork can be relinked before anything is installed.
relink: ## make a fork's badges, setup cells and links its own: REPOSITORY=https://github.com/you/ringlearn
	@$(PYTHON) tools/relink.py "$(REPOSITORY)"

clean: ## remove what the other targets wrote, except the environment
	rm -rf build .pytest_cache .ruff_cache *.egg-info
	find ringlearn tests tools notebooks -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf

distclean: clean ## remove the environments as well
	[ ! -f $(STAMP) ] || rm -rf $(VENV)
	[ ! -f $(COLAB)/.installed ] || rm -rf $(COLAB)

define check-python
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no '$(PYTHON)' here. Name a Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "ringlearn needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "This Python cannot make virtual environments (ensurepip is missing)." >&2; \
	  echo "On Debian and Ubuntu: apt install python3-venv. Or name another one: PYTHON=..." >&2; exit 1; }
endef

# Made again only when what to install has changed.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(check-python)
	@echo "Installing torch, JupyterLab and the test tools into $(VENV); the first time, this downloads them."
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(INSTALL) --editable '.[tests]'
	@touch $@

$(STAMP)-browser: $(STAMP)
	$(INSTALL) --editable '.[browser]'
	@touch $@

# torch without a constraint: its local label (+cpu, +cu130) is the machine's business.
$(COLAB)/.installed: constraints-colab.txt
	$(check-python)
	@echo "Installing torch and Colab's versions of Jupyter into $(COLAB)."
	$(PYTHON) -m venv $(COLAB)
	$(COLAB)/bin/python -m pip install --quiet --constraint $< pip
	$(COLAB)/bin/python -m pip install $(if $(CI),--quiet) --constraint $< torch==$(COLAB_TORCH) \
	  ipykernel ipython ipywidgets matplotlib nbclient nbformat numpy packaging pytest pytest-timeout
	@touch $@
