# `make test` and `make demo` set up what they need: Python 3.11+ and make are enough (inductor also wants a C++ compiler).
#
#   make test PYTHON=python3.12 VENV=.venv312               another interpreter, in a venv of its own
#   make test TORCH=torch==2.11.0                           another torch
#   make test INDEX=https://download.pytorch.org/whl/cpu    torch from another index, here without CUDA
#   make test ARGS="-k house -x"                            more arguments for pytest
#   make test WORKERS=8                                     more tests at a time
#   make campaign SECONDS=36000                             a longer look for defects

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
INDEX  ?=
ARGS   ?=
WORKERS ?= 2
SECONDS ?= 3600

PY    := $(VENV)/bin/python
EMPTY :=
# The stamp carries the torch it was made with, so that another TORCH sets up again.
STAMP := $(VENV)/.ready-$(subst /,_,$(subst $(EMPTY) ,_,$(TORCH)))
TYPED := tests demos benchmarks docs/site release

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/build/inductor

.PHONY: help setup test quick campaign lint style types links docs house demo bench release clean distclean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/\1\t\2/p' Makefile | expand -t 12

setup: $(STAMP)  ## make the virtual environment

# torch first and by its pin: a bare requirement would fetch the newest one with gigabytes of CUDA packages.
$(STAMP): pyproject.toml build_backend.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "reroll needs Python 3.11 or newer, '$(PYTHON)' is not: name one with 'make PYTHON=...'." >&2; exit 1; }
	@echo "Setting up $(VENV) with $(TORCH): minutes the first time, nothing afterwards."
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install --quiet $(if $(INDEX),--index-url $(INDEX)) "$(TORCH)"
	$(PY) -m pip install --quiet "$(TORCH)" --editable ".[dev,demos,networks,trainers,docs]"
	@$(PY) -m pip uninstall --quiet --yes torchvision torchaudio  # SpikingJelly brings builds that may not fit TORCH
	@rm -f $(VENV)/.ready-* && touch "$@"

test: lint  ## lint, check types, run all tests
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not campaign" $(ARGS)

# The rules of the house, and everything about numbers, graphs and programs, but for what trains models to see it.
QUICK := tests/project/test_house.py tests/project/test_order.py tests/project/test_rooms.py \
	tests/schedules tests/program tests/planning tests/passes tests/report tests/segment tests/backends/codecs
TRAINS := tests/planning/test_budgets.py tests/planning/test_candidates.py tests/planning/test_segments.py \
	tests/segment/test_kept_for_replay.py tests/segment/test_policy.py tests/report/test_cli.py \
	tests/backends/codecs/test_rounding.py

quick: $(STAMP)  ## a part of the tests, under two minutes: for daily work
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not inductor and not campaign" $(QUICK) \
		$(addprefix --ignore=,$(TRAINS)) $(ARGS)

# The random programs go on where the last run ended; networks and operations, where a row is missing. Each result is
# kept in benchmarks/results/campaign.json. Hours: SECONDS is the share of the random programs.
campaign: $(STAMP)  ## look for defects: random programs, mutants, stacks of blocks, all networks, all operations of torch
	$(PY) benchmarks/campaign/campaign.py --of programs --seconds $(SECONDS) --workers $(WORKERS)
	$(PY) benchmarks/campaign/campaign.py --of mutants --seconds $(SECONDS) --workers $(WORKERS)
	$(PY) benchmarks/campaign/campaign.py --of stacks --seconds $(SECONDS) --workers $(WORKERS)
	$(PY) benchmarks/campaign/campaign.py --of lowered --seconds $(SECONDS) --workers $(WORKERS)
	$(PY) benchmarks/campaign/campaign.py --of sizes --seconds $(SECONDS) --workers $(WORKERS)
	$(PY) benchmarks/campaign/campaign.py --of losses --seconds $(SECONDS) --workers $(WORKERS)
	$(PY) benchmarks/campaign/campaign.py --of updated --seconds $(SECONDS) --workers $(WORKERS)
	$(PY) benchmarks/campaign/campaign.py --of wholes --seconds $(SECONDS) --workers $(WORKERS)
	$(PY) benchmarks/campaign/campaign.py --of kinds --seconds $(SECONDS) --workers $(WORKERS)
	$(PY) benchmarks/campaign/campaign.py --of "kinds lowered" --seconds $(SECONDS) --workers $(WORKERS)
	$(PY) benchmarks/campaign/campaign.py --of truncated --seconds $(SECONDS) --workers $(WORKERS)
	$(PY) benchmarks/campaign/campaign.py --of long --seconds $(SECONDS) --workers $(WORKERS)
	$(PY) benchmarks/campaign/campaign.py --of turns --seconds $(SECONDS) --workers $(WORKERS)
	$(PY) benchmarks/campaign/campaign.py --of "at once" --seconds $(SECONDS) --workers $(WORKERS)
	$(PY) benchmarks/campaign/libraries.py --workers $(WORKERS)
	$(PY) benchmarks/campaign/operations.py --workers $(WORKERS)
	REROLL_CARD=simulated $(PY) -m pytest -n $(WORKERS) --dist worksteal -m gpu tests/backends/card
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m campaign $(ARGS)

lint: style types  ## ruff and mypy --strict

style: $(STAMP)  ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# mypy and the documentation follow the links of the editable install, which are brought up to date, so that a new file is
# never missed.
links: $(STAMP)
	@$(PY) -c "import build_backend; build_backend.link()"

types: links  ## mypy --strict
	$(PY) -m mypy .editable/reroll build_backend.py $(TYPED)

# The reference is read off the same tree of links, without importing anything. Notebooks are run.
docs: links  ## build the documentation as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml
	@echo "Open build/site/index.html, or serve it: $(PY) -m http.server --directory build/site"

house: $(STAMP)  ## a table of long files and functions, many imports and parameters
	@PYTHONPATH=tests/support/project $(PY) tests/support/project/house_table.py

demo: $(STAMP)  ## train a spiking network on handwritten digits
	$(PY) demos/digits.py $(ARGS)

bench: $(STAMP)  ## measure memory and time against plain BPTT
	$(PY) benchmarks/figures.py $(ARGS)

release: $(STAMP)  ## build the wheel and the sdist, and try both with every supported torch
	$(PY) release/check.py $(if $(INDEX),--index $(INDEX)) $(ARGS)

clean:  ## remove build products and caches
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demos/out
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean  ## also remove the virtual environment
	rm -rf $(VENV)
