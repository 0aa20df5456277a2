# Needs Python >= 3.11 and make; every target makes its own environment first, from a lock in requirements/. Ray and the
# other sides of the benchmark are not locked.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := -m pip install -qq --disable-pip-version-check
# The locks name every package, so nothing is left to resolve; without --no-deps, pip 23.2 looks up the newest SQLAlchemy for
# an extra that Flower asks for, and then refuses it because the lock pins another version.
PIP_LOCKED := $(PIP_INSTALL) --no-deps --require-hashes --requirement
INSTALLED := .venv/.installed
SIMULATION_INSTALLED := .venv/.installed-simulation
TOOLS := .venv-tools/bin
TOOLS_INSTALLED := .venv-tools/.installed
# One form of the locks for all systems, without the hosts that this machine asks.
COMPILE := UV_CUSTOM_COMPILE_COMMAND='make lock' $(TOOLS)/uv pip compile --quiet --universal --generate-hashes \
	--python-version 3.11 --no-emit-index-url --no-emit-find-links
OTHERS := torch flower fedjax pfl
OTHERS_INSTALLED := $(OTHERS:%=.venv-%/.installed)

.DEFAULT_GOAL := help
.PHONY: help demo test slow digests mutants counts lint format docs bench results reproduce-quick lock licences sbom audit wheel clean

help: ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F '\t' '{printf "  make %-15s %s\n", $$1, $$2}'

demo: $(INSTALLED) ## compare Bayesian and other methods on the embedded digits, write runs/demo/report.html; one minute
	$(BIN)/priory compare local fedavg:step-size=0.1 pfedbayes:zeta=1,optimiser=sgd \
		sfedbayes:zeta=1,optimiser=sgd,stateful=True pooled:step-size=0.1 \
		--data digits --partition dirichlet:0.3 --clients 20 --newcomers 0.2 \
		--rounds 60 --steps 20 --batch-size 20 --step-size 0.03 --momentum 0.9 --out runs/demo --report

test: $(INSTALLED) ## run the fast tests on two workers
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup --no-loadscope-reorder -m "not slow" --budget --durations=10

slow: $(SIMULATION_INSTALLED) ## run the tests that take minutes, on real Flower among them; 45 minutes
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m slow

digests: $(INSTALLED) ## compare what every method computes with the digests in tests/digests, to the bit on a like machine
	$(BIN)/python -m tests.digests.record

mutants: $(INSTALLED) ## count the small faults of tests/mutants that the tests catch, on two cores
	rm -f build/mutants.jsonl
	$(BIN)/python tests/mutants/run.py

counts: $(INSTALLED) ## count the tests again in docs/testing.md
	$(BIN)/python -m tests.counts

lint: $(INSTALLED) ## check formatting, rules and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED) ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED) ## build the documentation with the API reference into build/site, to be read without a network
	$(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

bench: $(INSTALLED) $(OTHERS_INSTALLED) ## measure against PyTorch, Flower, FedJAX and pfl, growth and floor; 20 minutes, idle
	$(BIN)/python bench/run.py $(foreach side,$(OTHERS),--$(side) .venv-$(side)/bin/python)
	$(BIN)/python bench/scaling.py
	$(BIN)/python bench/floor.py
	$(BIN)/python bench/render.py

results: $(INSTALLED) ## write docs/results.md and the README's table from the cells in results/
	$(BIN)/python -m priory.reproduce.document

reproduce-quick: $(INSTALLED) ## the short form of every table, held against the kept one; under 30 minutes, needs PRIORY_DATA
	rm -rf build/quick
	$(BIN)/priory reproduce all --quick --seeds 1 --out build/quick --guard results

lock: $(TOOLS_INSTALLED) ## fit requirements/ to pyproject.toml with uv; LOCK=--upgrade renews every version
	$(COMPILE) --extra dev pyproject.toml --output-file requirements/dev.txt $(LOCK)
	$(COMPILE) --extra flower --extra privacy pyproject.toml --constraint requirements/dev.txt \
		--output-file requirements/deploy.txt $(LOCK)
	$(COMPILE) --group tools --output-file requirements/tools.txt $(LOCK)

licences: $(INSTALLED) ## write docs/licences.md from the installed packages
	$(BIN)/python requirements/licences.py

sbom: $(TOOLS_INSTALLED) ## write build/sbom.json: what a server or node installs, in CycloneDX
	@mkdir -p build
	PYTHONWARNINGS=ignore $(TOOLS)/cyclonedx-py requirements requirements/deploy.txt --pyproject pyproject.toml --validate \
		--output-reproducible --output-format JSON --output-file build/sbom.json

audit: $(TOOLS_INSTALLED) ## ask OSV for known vulnerabilities; "Error 1": found some, "Error 4": no answer, so not audited
	@$(TOOLS)/python requirements/audit.py

wheel: $(INSTALLED) ## build the wheel and the source archive into dist/
	$(BIN)/python -m build --outdir dist .

clean: ## remove what the targets above produced, environments included
	rm -rf .venv .venv-tools $(OTHERS:%=.venv-%) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find priory tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are newer than what they were installed from, so nothing is installed twice.
$(INSTALLED): pyproject.toml requirements/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "$(PYTHON) is missing or older than 3.11; set PYTHON=/path/to/python3.11 or newer."; exit 1; }
	@test -x $(BIN)/python || { echo "making .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing priory and its development tools"
	@$(BIN)/python $(PIP_LOCKED) requirements/dev.txt
	@$(BIN)/python $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

# `pyproject.toml` names the tools and is no reason to install them again: `make lock` must run after it has changed.
$(TOOLS_INSTALLED): requirements/tools.txt
	@test -x $(TOOLS)/python || { echo "making .venv-tools"; $(PYTHON) -m venv .venv-tools; }
	@echo "installing uv, cyclonedx-bom and pip-audit"
	@$(TOOLS)/python $(PIP_LOCKED) requirements/tools.txt
	@touch $@

# Ray is needed by one slow test alone, and is large.
$(SIMULATION_INSTALLED): $(INSTALLED)
	@echo "installing Flower's simulation"
	@$(BIN)/python $(PIP_INSTALL) --editable '.[flower-simulation]'
	@touch $@

# The other sides of the benchmark live apart, so that no library's threads or versions touch another's. FedJAX calls
# functions that JAX has dropped since.
.venv-torch/.installed: PACKAGES := torch==2.13.0 numpy
.venv-flower/.installed: PACKAGES := torch==2.13.0 'flwr[simulation]>=1.40,<1.42'
.venv-fedjax/.installed: PACKAGES := fedjax==0.0.17 jax==0.4.33 jaxlib==0.4.33 dm-haiku==0.0.13 'numpy<2.3'
.venv-pfl/.installed: PACKAGES := torch==2.13.0 pfl==0.6.0
$(OTHERS_INSTALLED): .venv-%/.installed:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "$(PYTHON) is missing or older than 3.11; set PYTHON=/path/to/python3.11 or newer."; exit 1; }
	@test -x .venv-$*/bin/python || { echo "making .venv-$*"; $(PYTHON) -m venv .venv-$*; }
	@echo "installing $(PACKAGES)"
	@.venv-$*/bin/python $(PIP_INSTALL) $(PACKAGES)
	@touch $@
