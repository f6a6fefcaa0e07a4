"""Imports go one way: a reader of one layer needs none of the layers that stand on it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BASE = ("errors", "unknown_options", "checks", "arrays", "kv_group", "config")
BASE += ("compile_cache", "code_digest")
TARGET = "paged_jax.kernels.target_device"  # a question about JAX, of no kernel
LAYERS = ("cache", "sampling", "scheduling", "engine")
OWN = [*(ROOT / "paged_jax").glob("*.py"), *(ROOT / "models").glob("*.py")]
OWN += [path for layer in LAYERS for path in (ROOT / "paged_jax" / layer).glob("*.py")]
OWN += [*(ROOT / "kernels").rglob("*.py")]


def imported(path):
    """The first part below `paged_jax` of each import of ours, relative ones as `.`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            names.add(".")
        elif isinstance(node, ast.ImportFrom) and node.module == TARGET:
            names.add("target_device")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paged_jax"):
            parts = (node.module or "").split(".")[1:]
            names |= {parts[0]} if parts else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {
                [*alias.name.split("."), ""][1]
                for alias in node.names
                if alias.name.split(".")[0] == "paged_jax"
            }
    return names


@pytest.mark.parametrize("path", OWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_stands_below_it(path):
    place, names = path.relative_to(ROOT).parts, imported(path)
    if place[0] == "kernels":
        assert names <= {"."}
    elif place[0] == "models":
        assert names <= {*BASE, "models", "kernels"}
    elif place[1] == "engine":  # of the kernels what is compiled for, and nothing else
        assert names <= {*BASE, *LAYERS, "target_device"}
    elif place[1] in LAYERS:
        assert names <= {*BASE, *LAYERS[: LAYERS.index(place[1]) + 1]}
    elif path.stem in BASE:
        assert names <= {*BASE[: BASE.index(path.stem)]}
    elif path.stem != "__init__" and "models" in names:
        assert path.stem in ("llm", "llm_parts", "jobs"), "only what makes text knows the models"
