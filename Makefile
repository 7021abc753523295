# make demo   a real model answers through a real server        make test    all CPU tests
# make check  formatting, lint, types, imports, sizes           make clean   remove what these made
.PHONY: demo test check format docs clean venv

BIN := .venv/bin
QUESTION ?= What is the capital of France?

demo: venv
	@$(BIN)/proa chat demo -p "$(QUESTION)"

test: venv
	@$(BIN)/python -m pytest -q $(ARGS)

check: venv
	@$(BIN)/ruff format --check src tests tools
	@$(BIN)/ruff check src tests tools
	@$(BIN)/mypy
	@$(BIN)/python tools/check_imports.py
	@$(BIN)/python tools/check_sizes.py

format: venv
	@$(BIN)/ruff check --fix -q src tests tools
	@$(BIN)/ruff format -q src tests tools

docs: venv
	@$(BIN)/python tools/make_options_doc.py

venv:
	@sh tools/venv.sh

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
