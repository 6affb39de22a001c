# Holdback: `make demo` shows it, `make test` tests it. Every target does its own set-up; see tools/environment.py.

# The first Python that is new enough; the plain one, to be told so, if none is.
PYTHON ?= $(or $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done),python3)
# Where torch comes from: a URL; `pip` for pip's own configuration; `auto` for pip's own where it names an index, else
# PyTorch's index of CPU builds.
TORCH_INDEX ?= auto
# Folder of the converted model; any place that outlives the checkout saves the conversion.
MODELS ?= .cache/models
# Port of the gateway of `make serve`, the one where `holdback generate` looks for it.
PORT ?= 50051
# Only the tests of one case: make test CASE=B07
CASE ?=
# More arguments of `make lower-neuron`: --all, --model NAME, --text FOLDER
LOWER_ARGS ?=
# More arguments for pytest: make test PYTEST_ARGS="-k codec -x"
PYTEST_ARGS ?=

RUN := .venv/bin
MODEL := $(MODELS)/smollm2-135m
SETUP := $(PYTHON) tools/environment.py --torch-index '$(TORCH_INDEX)' --models '$(MODELS)'
PYTEST := HOLDBACK_TEST_MODEL='$(abspath $(MODEL))' $(RUN)/python -m pytest $(if $(CASE),--case '$(CASE)') $(PYTEST_ARGS)

# On all processors: what neither starts processes nor takes more than one.
SHARED := $(PYTEST) -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help venv model demo serve test test-unit check check-lint check-types check-protos check-layers check-pythons
.PHONY: generate clean lower-neuron typescript helm check-chart check-images

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r name text; do printf '%-24s%s\n' "$$name" "$$text"; done

venv: ## the virtual environment, .venv
	@$(SETUP) venv

helm: venv ## Helm, for the tests of the chart; HOLDBACK_HELM=PROGRAM takes one of your own
	@test -n "$(HOLDBACK_HELM)" || $(SETUP) helm

typescript: venv ## the client of examples/typescript, for its tests
	@$(PYTHON) -m tools.typescript_client

model: ## the model, converted once
	@$(SETUP) model

demo: model ## starts everything, asks two questions, shows the steps, stops
	$(RUN)/holdback demo --model '$(MODEL)'

serve: model ## scheduler, executor and gateway with the real model, until Ctrl-C
	$(RUN)/holdback up --model '$(MODEL)' --port '$(PORT)'

# Those that start processes or take all processors, one after the other, come after the others.
test: model helm typescript ## all tests; CASE=B07 for those of one case
ifeq ($(strip $(CASE)$(PYTEST_ARGS)),)
	$(SHARED) -m 'not (loopback or model)'; status=$$?; $(PYTEST) -m 'loopback or model' && exit $$status
else
	$(PYTEST)
endif

test-unit: venv ## the pure tests but those of the chart, in little more than a minute
	$(SHARED) -m 'not (loopback or model or compiled)' --ignore tests/chart

lower-neuron: venv ## lowers the graphs of the neuron device to StableHLO; LOWER_ARGS=--all for every one
	@$(SETUP) lowering
	.cache/lower-neuron/bin/python tools/lower_neuron.py $(LOWER_ARGS)

check: check-lint check-types check-protos check-layers check-chart check-pythons ## lint, types, protos, layering, chart, other Pythons

check-lint: venv
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

check-types: venv
	$(RUN)/mypy

check-protos: venv
	$(RUN)/buf lint protos
	$(RUN)/python protos/generate.py --check

check-layers: venv
	$(RUN)/lint-imports

check-chart: venv helm
	$(RUN)/python tools/chart_schema.py --check
	$(RUN)/python tools/check_chart.py

check-images: venv ## what of the images can be checked without building them; installs their packages, minutes
	$(RUN)/python tools/check_images.py

check-pythons: venv
	$(RUN)/python tools/other_pythons.py

generate: venv ## the Python stubs of protos/, and the processes' settings in the chart's schema
	$(RUN)/python protos/generate.py
	$(RUN)/python tools/chart_schema.py

clean: ## removes everything that the other targets made
	rm -rf .venv .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
