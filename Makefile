# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT := build/pycode-3m.dflash

.PHONY: demo test check install install-dev clean

demo: install
	$(BIN)/dflashc build recipes/pycode-3m/pycode-3m-q8_0.gguf --drafter recipes/pycode-3m/pycode-3m-dflash2-q8_0.gguf \
		--target cpu -o $(OUT)
	printf 'def read(self, size=-1):\n        """Read' | $(BIN)/dflashc run $(OUT) --raw -f - --temp 0 --max-tokens 88

test: install-dev
	$(BIN)/python -m pytest
	$(BIN)/python -m pytest -m "slow or realmodel"

check: install-dev
	$(BIN)/ruff check .
	mkdir -p build/types/dflashc
	for package in compiler passes recipes runtime targets; do ln -sfn "$(CURDIR)/$$package" build/types/dflashc/$$package; done
	cd build/types && "$(CURDIR)/$(BIN)/mypy" --config-file "$(CURDIR)/pyproject.toml" -p dflashc.compiler -p dflashc.passes \
		-p dflashc.recipes -p dflashc.runtime -p dflashc.targets

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e .
	mkdir -p build
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e ".[dev,realmodel,vulkan,cuda,rocm]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
