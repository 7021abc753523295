# make demo   a real model answers through a real server        make native    build csrc, beside the Python package
# make test   all CPU tests; make test-gpu: those of a GPU      make sanitize  csrc's tests under ASan, UBSan and TSan
# make check  formatting, lint, types, sizes, pages, kernels    make qemu      csrc's tests here and on emulated older CPUs
# make wheel  one wheel for x86-64 Linux, in dist/; make test-wheel installs it in an empty environment
# make format, make docs, make clean                            make sanitize-gpu  the doorbell under compute-sanitizer
# Another environment than .venv: make native BIN=/path/to/venv/bin
.PHONY: demo wheel test-wheel test test-all test-gpu check native sanitize sanitize-gpu qemu format docs clean venv

OWN := .venv/bin
BIN ?= $(OWN)
SUITE = $(BIN)/python -m pytest -q -n auto --dist worksteal --durations=10
SEED ?= any
QUESTION ?= What is the capital of France?
CSRC = $(shell find csrc -name '*.cc' -o -name '*.h')
export BIN

# Many containers ask Python to write no bytecode. Each engine that a test starts in full would then compile torch's
# modules anew, which is 2 of the 3 s of CPU time that importing torch takes. Here bytecode is written, under build/.
ifdef PYTHONDONTWRITEBYTECODE
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache
endif

demo: native
	@$(BIN)/proa chat demo --set temperature=0 -p "$(QUESTION)"

test: native
	@$(SUITE) --sample=$(SEED) $(ARGS)

test-all: native
	@$(SUITE) $(ARGS)

wheel: venv
	@sh tools/wheel.sh

test-wheel: venv
	@$(BIN)/python -m pytest -q -rs tests/e2e/test_wheel.py

test-gpu: native
	@$(BIN)/python tools/need_gpu.py
	@$(BIN)/python -m pytest -q -m gpu $(ARGS)

check: venv
	@sh tools/native.sh compile
	@$(BIN)/ruff format --check src tests tools
	@$(BIN)/ruff check src tests tools
	@$(BIN)/mypy
	@$(BIN)/python tools/check_imports.py
	@$(BIN)/python tools/check_sizes.py
	@$(BIN)/python tools/check_docs.py
	@$(BIN)/python tools/charts.py --check
	@$(BIN)/python tools/check_native.py
	@$(BIN)/python tools/check_kernels.py

native: venv
	@sh tools/native.sh build

sanitize: venv
	@sh tools/native.sh sanitize

sanitize-gpu: native
	@sh tools/sanitize_gpu.sh

qemu: venv
	@sh tools/native.sh qemu

format: venv
	@$(BIN)/ruff check --fix -q src tests tools
	@$(BIN)/ruff format -q src tests tools
	@$(BIN)/clang-format -i $(CSRC)

docs: venv
	@$(BIN)/python tools/make_options_doc.py
	@$(BIN)/python tools/charts.py

venv:
ifeq ($(BIN),$(OWN))
	@sh tools/venv.sh
endif

clean:
	rm -rf .venv build src/proa/native/libproa_native.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
