# All there is to learn: `make help`.

PYTHON ?= python3
PORT ?= 8000
BIN := .venv/bin
STAMP := .venv/.installed
# As `lint-imports` does, which would not survive a move of this folder.
LINT_IMPORTS := from importlinter.cli import lint_imports_command as lint; lint()

# The targets share one environment and one _build: one after another, always.
.NOTPARALLEL:
.PHONY: help book test engines machines lint serve clean

help: ## show this help
	@awk 'BEGIN {FS = ":.*## "} /^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile

book: $(STAMP) ## run the chapters and render the book into _build/html
	@$(BIN)/python -m cdopt_tutorial build

# The chapters before the tests, which read their results, whether or not one fails.
test: lint ## lint, chapters in short if they have changed, unit tests, pages in a browser
	@$(BIN)/python -m cdopt_tutorial execute --short; ran=$$?; \
	$(BIN)/python -m pytest -n 3 -m "not engines" && exit $$ran

# Four at a time, since many of them wait for a deadline.
engines: $(STAMP) ## the tests on Ray and torchrun, and of lost workers; hosts need root
	@$(BIN)/python -m pytest -n 4 -m engines

# Both at once, each on a core of its own: chapters on RPC, DDP, torchrun and Ray, in
# which threads and code paths have led to other bits. A figure that moved is a failure.
SENSITIVE := notebooks/01_reinforce.ipynb notebooks/05_ddp_rpc.ipynb notebooks/07_hosts.ipynb
machines: $(STAMP) ## three chapters and the equality tests as on two other machines
	@set -- $$($(BIN)/python -c "import os; print(*sorted(os.sched_getaffinity(0))[-2:])"); \
	as() { PYTHONPATH=tests taskset -c $$1 $(BIN)/python -m matrix --cpu $$2 --threads $$3 --no-engines $(SENSITIVE); }; \
	as $$1 default 1 & one=$$!; as $${2-$$1} avx2 2; two=$$?; wait $$one && exit $$two

lint: $(STAMP) ## check style, formatting, types, who imports whom, and scripts
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m ruff format --check
	@$(BIN)/python -m mypy
	@$(BIN)/python -c "$(LINT_IMPORTS)" --no-logo --no-cache
	@$(BIN)/shellcheck book/jobs/*.s*

# A chapter that failed has its page, too.
serve: $(STAMP) ## make the book and serve it on 127.0.0.1, port $PORT (8000)
	@$(BIN)/python -c "import socket; socket.create_server(('127.0.0.1', $(PORT) or -1))" 2>/dev/null || { echo "port $(PORT) is taken, or none: name another with make serve PORT=..." >&2; exit 1; }
	@$(BIN)/python -m cdopt_tutorial build || test -f _build/html/index.html
	@echo "http://127.0.0.1:$(PORT)"
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory _build/html $(PORT)

clean: ## remove all that make built: .venv, _build, caches
	rm -rf .venv _build cdopt_tutorial.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find cdopt_tutorial tests -name __pycache__ -prune -exec rm -rf {} +

# The stamp names the folder it was made in: an environment does not survive a move, but
# this folder may be reached by other paths.
HERE := [ "$$(cat $(STAMP) 2>/dev/null)" -ef . ]
ifneq ($(shell $(HERE) && echo here),here)
.PHONY: $(STAMP)
endif

# Without a stamp the environment is new, moved or half made: make it afresh. One that
# works keeps its stamp, and so is kept, until an update has succeeded.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11 or newer, or name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) .ci/preflight.py
	@echo "installing into .venv; the first time takes minutes"
	@$(HERE) || $(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[book,ray,test]'
	@pwd -P > $(STAMP)
