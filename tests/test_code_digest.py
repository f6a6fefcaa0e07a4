"""The digest of the package's code as it is loaded."""

import subprocess
import sys

import jax

from paged_jax.code_digest import code_digest
from paged_jax.kernels.paged_attention import items
from paged_jax.models import product
from paged_jax.models.llama import MLP, Llama

CHANGES = {
    "a constant": (items, "ROW_CHUNK", 95),
    "a function": (product, "rows_first", lambda x, matrix: x @ matrix.T),
    "a constant of its code": (product, "rows_first", lambda x, matrix: x @ matrix.T + 1),
    "a jitted function": (product, "_product", jax.jit(lambda x, matrix: x @ matrix.T)),
    "a method": (MLP, "__call__", lambda self, x: x),
    "a property": (Llama, "dtype", property(lambda self: "float16")),
}


def test_every_change_of_code_gives_another_one_and_is_undone(monkeypatch):
    before, seen = code_digest(), set()
    for owner, name, value in CHANGES.values():
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            seen.add(code_digest())
        assert code_digest() == before
    assert len(seen | {before}) == len(CHANGES) + 1


def test_a_function_is_also_what_it_closes_over(monkeypatch):
    def multiply(factor):
        return lambda x, matrix: x @ matrix.T * factor

    digests = set()
    for factor in (2, 3):
        monkeypatch.setattr(product, "rows_first", multiply(factor))
        digests.add(code_digest())
    assert len(digests) == 2


def test_it_is_the_same_in_every_process_and_after_some_work():
    code = """
import paged_jax
from paged_jax.code_digest import code_digest
before = code_digest()
paged_jax.init_cache(paged_jax.CacheConfig(4, 2, 2))
print(before if code_digest() == before else "another one")
"""
    command = [sys.executable, "-c", code]
    digests = {
        subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1 and len(digests.pop()) == 65
