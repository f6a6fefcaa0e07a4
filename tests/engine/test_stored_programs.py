"""Programs that a later start finds without tracing them.

Each start is a process of its own: the checks of annotations, which these tests put into the code,
make it another code at each call.
"""

import json
import os
import subprocess
import sys

import jax
import pytest
from flax import nnx

from paged_jax.engine import stored_programs
from paged_jax.engine.stored_programs import Spec
from paged_jax.models.load import open_model
from small_checkpoint import llama
from toy_decoder import ToyDecoder

SHAPES = (jax.ShapeDtypeStruct((3,), "int32"),)

START = """
import json, subprocess, sys
import jax
from flax import nnx
from paged_jax import EngineConfig, SamplingParams
from paged_jax.compile_cache import use_compile_cache
from paged_jax.engine.engine import Engine
from paged_jax.models.load import open_model

processes, popen = [], subprocess.Popen
subprocess.Popen = lambda *args, **kwargs: processes.append(args) or popen(*args, **kwargs)
use_compile_cache()
opened = open_model(sys.argv[1])
config = EngineConfig(30, 40, 4, 4, block_size=4)
load, ladder = opened.read_params, (1, 4)
engine = Engine(*nnx.split(opened.decoder), config, widths=(4,), later_widths=ladder, load=load)
pages = jax.tree.leaves(engine.state.cache.kv)
request_id = engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=9))
engine.run(1)
problem = engine.finish_compiling()
engine.run(100)
print(json.dumps({
    "processes": len(processes),
    "problem": problem,
    "compiled": engine._programs.run._cache_size(),
    "is_donated": all(page.is_deleted() for page in pages),
    "tokens": [token for update in engine.take(request_id) for token in update.token_ids],
}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("checkpoint"))


def start(checkpoint, folder):
    env = os.environ | {"PAGED_JAX_CACHE": str(folder), "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", START, str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_next_start_finds_both_programs_and_compiles_nothing(checkpoint, tmp_path):
    first = start(checkpoint, tmp_path)
    assert first["processes"] == 1 and first["problem"] is None and len(first["tokens"]) == 9
    files = list(tmp_path.glob("*.program"))
    assert len(files) == 2
    again = start(checkpoint, tmp_path)
    assert again == first | {"processes": 0, "compiled": 0} and again["is_donated"]
    # Files that were cut off. JAX has the programs in its own cache; those are not written again.
    cut = {file: file.read_bytes()[:-100] for file in files}
    for file, content in cut.items():
        file.write_bytes(content)
    assert start(checkpoint, tmp_path) == first
    assert {file: file.read_bytes() for file in tmp_path.glob("*.program")} == cut


def test_other_code_settings_or_widths_are_other_programs(cache_folder, monkeypatch, checkpoint):
    def path(spec):
        return stored_programs._path(spec)

    graphdef = nnx.graphdef(open_model(checkpoint).decoder)
    spec = Spec(graphdef, (1, 4), SHAPES, stored_programs.settings())
    monkeypatch.setattr(stored_programs, "code_digest", lambda: "one")
    paths = [path(spec)]
    assert path(spec) == paths[0] is not None
    with jax.default_matmul_precision("bfloat16"):
        paths.append(path(spec._replace(settings=stored_programs.settings())))
    paths.append(path(spec._replace(widths=(4,))))
    paths.append(path(spec._replace(shapes=(jax.ShapeDtypeStruct((4,), "int32"),))))
    half = open_model(checkpoint, "bfloat16").decoder
    paths.append(path(spec._replace(graphdef=nnx.graphdef(half))))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=true")
    paths.append(path(spec))
    monkeypatch.setattr(stored_programs, "code_digest", lambda: "other")
    paths.append(path(spec))
    assert len(set(paths)) == len(paths)


def test_code_of_others_is_not_stored(cache_folder):
    spec = Spec(nnx.graphdef(ToyDecoder()), (1,), SHAPES, {})
    assert stored_programs._path(spec) is None and stored_programs.load(spec) is None
    stored_programs.save(spec, jax.jit(lambda x: x + 1).lower(*SHAPES).compile())
    assert not list(cache_folder.glob("*.program"))


def test_without_a_folder_nothing_is_stored(checkpoint):
    graphdef = nnx.graphdef(open_model(checkpoint).decoder)
    assert stored_programs._path(Spec(graphdef, (1,), SHAPES, {})) is None
