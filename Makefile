# Everything runs in .venv; the stamp files in it say what has been installed there. TORCH=2.15.0 and NEWEST=transformers
# take separate environments: one differs from .venv in torch and in what torch brings along, the other has the newest
# transformers that pyproject.toml allows, and the newest packages that transformers is released with.
PYTHON  ?= python3
WORKERS ?= 2
ARGS    ?=
TORCH   ?=
NEWEST  ?=
BASE    ?= main
PART    ?=

VENV    := .venv$(TORCH:%=-torch-%)$(NEWEST:%=-newest-%)
BIN     := $(VENV)/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
PINS    := $(if $(TORCH)$(NEWEST),$(VENV)/)constraints.txt
SCHEMA  := specs/schema.json
INPUTS  := pyproject.toml $(PINS) $(PLUGINS:%=%/pyproject.toml)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(PINS)
# One thread per worker, so that the workers share the cores, and where a test needs more, they sleep while they wait; no
# test may reach for a model hub; bytecode is kept for the many processes that tests start.
PYTEST  := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal -p tools.ledger

# Parts of the tests, for PART=: training, code writing and plugins build on the core, and the core on none of them.
TESTS_train   := tests/run $(wildcard $(addprefix tests/tools/,train eval_ sweep runs solve tokenizer test_tokens.py))
TESTS_code    := tests/tools/eject $(addprefix tests/tools/save/test_,altered_specs.py opened_in_transformers.py sentence_transformers.py transformers.py trained_and_evaluated.py)
TESTS_plugins := plugins
TESTS_core    := tests $(TESTS_train:%=--ignore %) $(TESTS_code:%=--ignore %)
TESTS_around  := $(addprefix tests/,docs/test_around.py docs/test_retention.py tools/trace/test_transformer_lens.py \
                 tools/save/test_trained_and_evaluated.py tools/save/test_sentence_transformers.py run/kinds/test_contrastive.py \
                 run/training/test_float8.py run/training/test_peft.py run/test_harness_tasks.py)
TESTS_all     :=
ifeq ($(filter undefined,$(origin TESTS_$(or $(PART),all))),undefined)
$(error PART must be core, train, code or plugins; got '$(PART)')
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-near test-all test-around test-site proof lint ruff format-check mypy imports format docs release pictures clean
.DELETE_ON_ERROR:

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile
	@echo "  Variables: PYTHON=python3.12  WORKERS=4  ARGS='-k attention' (for pytest)"
	@echo "             PART=core|train|code|plugins (for test and test-all)  BASE=HEAD~3 (for test-near)"
	@echo "             TORCH=2.15.0 (tests with that version of torch, in .venv-torch-2.15.0, without lint)"
	@echo "             NEWEST=transformers (tests with its newest version, in .venv-newest-transformers, without lint)"

demo: $(SCHEMA) ## set up with the base dependencies, build one model, count another
	$(BIN)/tfkit build specs/vaswani_base.yaml
	$(BIN)/tfkit params specs/gpt2.yaml

test: $(if $(TORCH)$(NEWEST),$(VENV)/.dev,lint) $(SCHEMA) ## set up, lint, and run the quick tests, or those of PART=train
	$(PYTEST) $(TESTS_$(or $(PART),all)) $(ARGS)

test-near: $(VENV)/.dev $(SCHEMA) ## run the tests, the slow ones too, that the difference to BASE=main concerns
	$(PYTEST) -m "" -p tools.near --near $(BASE) $(ARGS)

test-all: $(if $(TORCH)$(NEWEST),$(VENV)/.dev,lint) $(VENV)/.pyright $(SCHEMA) ## lint and run all tests, the slow ones too
	$(PYTEST) -m "" -p tools.skips $(TESTS_$(or $(PART),all)) $(ARGS)

test-around: .venv-around/.created ## run the tests that need the tools around tfkit, in .venv-around
	OMP_NUM_THREADS=1 .venv-around/bin/pytest -m "" $(TESTS_around) $(ARGS)

test-site: $(VENV)/.docs ## build the site, and test it in chromium
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "" tests/docs/test_site.py tests/docs/test_browser.py $(ARGS)

proof: $(VENV)/.dev $(VENV)/.pyright $(SCHEMA) ## run all tests, but those that are green for the current files
	$(PYTEST) -m "" --unproved $(ARGS)

lint: $(VENV)/.dev ## run all checks that are not tests
	@$(MAKE) --no-print-directory --jobs=2 mypy ruff format-check imports

format: $(VENV)/.dev ## let ruff mend and format the code
	$(BIN)/ruff check --quiet --fix-only .
	$(BIN)/ruff format .

docs: $(VENV)/.docs ## build the site, out/docs/site/index.html, offline
	$(BIN)/python -m tools.docs.build

release: $(VENV)/.release ## build the distributions in dist/, install them in an empty environment, run README and commands
	$(BIN)/python tools/release.py $(ARGS)

pictures: $(VENV)/.dev ## draw docs/pictures again, and all specs to out/pictures
	$(BIN)/python tools/draw_all.py

clean: ## remove the environments, caches and build outputs
	rm -rf .venv .venv-torch-* .venv-newest-* .venv-around $(SCHEMA) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The four checks of lint: three run next to mypy, which takes the longest. At a commit, pre-commit calls each of them.

ruff: $(VENV)/.dev
	$(BIN)/ruff check .

format-check: $(VENV)/.dev
	$(BIN)/ruff format --check .

mypy: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports --no-cache --no-logo

# What editors complete specs with: made again when the code has changed, with the plugins that the specs need.

$(SCHEMA): $(shell find tfkit plugins -name '*.py') | $(VENV)/.base
	$(BIN)/tfkit schema --no-plugins --plugin-dir plugins/tfkit-moe --plugin-dir plugins/tfkit-mla \
	  --plugin-dir plugins/tfkit-recurrent --plugin-dir plugins/tfkit-media --plugin-dir plugins/tfkit-streams \
	  --plugin-dir plugins/tfkit-encoders -o $@

# Set-up. The stamp .dev implies .base: `make demo` after `make test` installs nothing.

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "tfkit needs Python 3.11 or newer; '$(PYTHON)' is older or missing. Try: make PYTHON=python3.12" >&2; \
	  exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# Under TORCH= and NEWEST=: the pins of .venv, except for these packages. Each torch has its own range of setuptools.
$(VENV)/constraints.txt: constraints.txt | $(VENV)/.created
	sed $(TORCH:%=-e 's/^torch==.*/torch==%/' -e '/^setuptools==/d') $(NEWEST:%=-e '/^%==/d' -e '/^tokenizers==/d' -e '/^huggingface_hub==/d') $< >$@

$(VENV)/.base: pyproject.toml $(PINS) | $(VENV)/.created
	$(INSTALL) --editable .
	@touch $@

# Without pins: the tools of the group ask for versions of their own.
.venv-around/.created: pyproject.toml
	$(PYTHON) -m venv --clear .venv-around
	.venv-around/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	.venv-around/bin/python -m pip install --quiet --disable-pip-version-check --group test --group around --editable . \
	  --editable plugins/tfkit-additive --editable plugins/tfkit-moe --editable plugins/tfkit-mla
	@touch $@

$(VENV)/.pyright: $(VENV)/.dev
	$(INSTALL) --group pyright
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(INSTALL) --group docs
	@touch $@

$(VENV)/.release: $(VENV)/.dev
	$(INSTALL) --group release
	@touch $@

# The pip of a new environment is as old as its Python and may not install groups: `pip` is pinned as well.
$(VENV)/.dev: $(INPUTS) | $(VENV)/.created
	$(INSTALL) pip
	$(INSTALL) --group test --group lint --editable ".[all]" $(PLUGINS:%=--editable ./%)
	@touch $(VENV)/.base $@
