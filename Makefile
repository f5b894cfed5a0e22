# Two commands: `make course` and `make test`. Each makes .venv first where that is needed.
# Settings: HOST, PORT, NO_BROWSER=1, PYTHON=<path>, TORCH=<version>, TORCH_INDEX=<address of torch's builds>;
# for grade: SUBMISSIONS=<folder, zip or list>, OUT=<folder>, DUE=<time>, COLUMNS=<toml>, ROSTER=<csv>,
# VARIANT=<csv>, SECRET=<file>, JOBS=<n>, UNSANDBOXED=1; for labs: VARIANT=<csv>, SECRET=<file>, OUT=<folder>;
# for server: MODEL=<checkpoint's folder>.

HOST ?= 127.0.0.1
PORT ?= 8888
BIN := .venv/bin
FOUND := $(firstword $(foreach name,$(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14),$(shell command -v $(name) 2>/dev/null)))
SETUP = $(or $(FOUND),$(error Python 3.11, 3.12, 3.13 or 3.14 is needed and $(or $(PYTHON),python3) was not found: on Debian run "apt install python3-venv" as root)) scripts/setup.py

.PHONY: help course test check coverage book jupyter labs grade slides pdf zip claims bench soak server server-stop test-installed lock matrix clean setup

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1: /p' Makefile

course: setup-course  ## the course: JupyterLab and the book behind one local address
	@$(BIN)/python -m labcore course --host $(HOST) --port $(PORT)

.PHONY: setup-course
setup-course:
	@$(SETUP) --host $(HOST) --port $(PORT)

setup:  ## .venv, or what it lacks since the last time
	@$(SETUP)

test: setup  ## every gate: style, types, imports, tests, chapters, book, browser, wheel
	@$(BIN)/python scripts/gates.py all

check: setup  ## the quick gates: style, types, imports, unit tests
	@$(BIN)/python scripts/gates.py quick

coverage: setup  ## which of the package's lines the quick tests don't run; some 20 minutes
	@$(BIN)/python -m pytest -q -p no:cacheprovider -m "not long" --numprocesses=auto --dist=loadfile \
		--cov=labcore --cov-report=term-missing:skip-covered

book: setup  ## the book and the teaching guide in _build/html, as strictly as the tests build them
	@LABCORE_STRICT_CLAIMS=1 $(BIN)/jupyter-book build . -W -n --keep-going
	@$(BIN)/python -m labcore.book.teaching.guide -W

jupyter: setup  ## JupyterLab alone
	@$(BIN)/jupyter lab --ip $(HOST) --port $(PORT) --allow-root

labs: setup  ## students' notebooks, labs/release, from labs/source; VARIANT=<roster> for each student's own
	@$(BIN)/python -m labcore labs $(if $(VARIANT),--variant "$(VARIANT)") $(if $(SECRET),--secret "$(SECRET)") \
		$(if $(OUT),--out "$(OUT)")

grade: setup  ## grades SUBMISSIONS=<folder, zip or list of repositories>; the last line says where
	@$(BIN)/python -m labcore grade "$(or $(SUBMISSIONS),$(error Name the folder: make grade SUBMISSIONS=<folder>))" \
		$(if $(OUT),--out "$(OUT)") $(if $(DUE),--due "$(DUE)") $(if $(COLUMNS),--columns "$(COLUMNS)") \
		$(if $(ROSTER),--roster "$(ROSTER)") $(if $(VARIANT),--variant "$(VARIANT)") \
		$(if $(SECRET),--secret "$(SECRET)") $(if $(JOBS),--jobs "$(JOBS)") $(if $(UNSANDBOXED),--unsandboxed)

slides: setup  ## a deck a chapter, in _build/slides; SLIDES="lion memory" for some
	@$(BIN)/python -m labcore slides $(SLIDES)

pdf: book  ## the book as _build/course.pdf, printed by Chromium
	@$(BIN)/python -m labcore pdf

zip: book  ## the book as _build/course.zip, to be opened without a network
	@$(BIN)/python -m labcore zip

claims: setup  ## judges the articles' claims anew and writes claims.toml
	@$(BIN)/python -m labcore.claims

bench: setup  ## measures what has no record on this kind of hardware; BENCH="lion --save" for one
	@$(BIN)/python -m benchmarks $(BENCH)

soak: setup  ## what `make test` runs small: 100,000 scheduler steps, 2,000 requests, a class of 200, all notebooks under nbval; minutes
	@LABCORE_SOAK=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -p no:cacheprovider --durations=5 \
		tests/serving/test_scheduler_stateful.py tests/serving/test_soak.py \
		tests/grading/test_generated_class.py tests/exercises/test_every_exercise.py tests/test_chapters.py

server: .venv-triton  ## NVIDIA's Triton Inference Server on loopback, with the shipped model or MODEL=<folder>
	@exec $(BIN)/python -m labcore.serving.triton.server start --model "$(or $(MODEL),target)"

server-stop:  ## stops it
	@$(BIN)/python -m labcore.serving.triton.server stop

# 366 MB to download on first use; does nothing where it is whole.
.PHONY: .venv-triton
.venv-triton: setup
	@$(BIN)/python -m labcore.serving.triton.server install

# An environment that the old versions made will do: they may no longer be what pyproject.toml admits.
.venv:
	@$(SETUP)

lock: .venv  ## constraints.txt from pyproject.toml; LOCK=--upgrade takes today's versions
	@$(BIN)/python scripts/lock.py $(LOCK)

matrix: setup  ## tests on CORNER=<oldest, newest, gpu or colab>, each with its own Python and torch
	@$(BIN)/python scripts/matrix.py $(CORNER)

test-installed: setup  ## builds the wheel, installs it elsewhere, runs a chapter from it
	@$(BIN)/python -m pytest tests/test_installed.py

clean:  ## removes what was built, the matrix's environments too; .venv, my/, records, grades and variants stay
	@if [ -d _build ]; then find _build -mindepth 1 -maxdepth 1 ! -name variants ! -name grades -exec rm -rf {} +; fi
	@rm -rf dist build .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +
