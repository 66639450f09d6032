# Every target makes its virtual environment and builds what it needs; only the first time takes long.
#   HPKV_VENV=DIR    use another virtual environment than .venv
#   HPKV_PYTHON=EXE  start from another interpreter than python3.11

SHELL := /bin/bash
VENV := $(or $(HPKV_VENV),.venv)
ARGS ?=

.PHONY: help demo test test-fast lint format bench build clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 12

demo: build  ## the main job on the real server, on the CPU: cold, device hit, host hits, one table
	@$(VENV)/bin/python -m demo $(ARGS)

test:  ## every test: C++ (also under sanitizers), Python, the real server; ARGS="-k name" selects
	@scripts/test.sh $(ARGS)

test-fast:  ## the tests that need no server, in under two minutes
	@scripts/test.sh --fast $(ARGS)

lint:  ## ruff, mypy --strict, clang-format
	@scripts/lint.sh

format:  ## rewrite the sources as ruff and clang-format want them
	@scripts/build.sh
	@$(VENV)/bin/ruff format -q . && $(VENV)/bin/ruff check -q --fix .
	@git ls-files -- 'csrc/*.cc' 'csrc/*.h' | xargs $(VENV)/bin/clang-format -i

bench:  ## print the numbers of benchmarks/; ARGS="name..." selects
	@scripts/bench.sh $(ARGS)

build:  ## bring .venv and the C++ extension up to date
	@scripts/build.sh

clean:  ## remove what was built; keeps .venv
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache
