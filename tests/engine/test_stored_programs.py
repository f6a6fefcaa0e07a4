"""Programs that a later start finds without tracing them.

Each start is a process of its own: the checks of annotations, which these tests put into the code,
make it another code at each call.
"""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from paged_jax.engine import stored_programs
from paged_jax.engine.stored_programs import Spec, find_place
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

traced, processes, popen = [], [], subprocess.Popen
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, fun_name="", **kwargs: traced.append(fun_name)
)
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
    "is_traced": any("_run" in name.split(" ") for name in traced),
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
    assert first["is_traced"]
    files = list(tmp_path.glob("*.program"))
    assert len(files) == 2
    again = start(checkpoint, tmp_path)
    assert again == first | {"processes": 0, "is_traced": False} and again["is_donated"]
    # Files that were cut off. The other process writes its program again. This one does not: JAX
    # has it in its own cache, and XLA cannot write what it has read.
    cut = {file: file.read_bytes()[:-100] for file in files}
    for file, content in cut.items():
        file.write_bytes(content)
    assert start(checkpoint, tmp_path) == first
    now = {file: file.read_bytes() for file in tmp_path.glob("*.program")}
    assert sorted(now[file] == cut[file] for file in cut) == [False, True]
    assert start(checkpoint, tmp_path)["processes"] == 0


def test_other_code_settings_or_widths_are_other_programs(cache_folder, monkeypatch, checkpoint):
    graphdef = nnx.graphdef(open_model(checkpoint).decoder)
    spec = Spec(graphdef, (1, 4), SHAPES, stored_programs.settings())
    monkeypatch.setattr(stored_programs, "code_digest", lambda: "one")
    places = [find_place(spec)]
    assert find_place(spec) == places[0] is not None
    with jax.default_matmul_precision("bfloat16"):
        places.append(find_place(spec._replace(settings=stored_programs.settings())))
    places.append(find_place(spec._replace(widths=(4,))))
    places.append(find_place(spec._replace(shapes=(jax.ShapeDtypeStruct((4,), "int32"),))))
    half = open_model(checkpoint, "bfloat16").decoder
    places.append(find_place(spec._replace(graphdef=nnx.graphdef(half))))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=true")
    places.append(find_place(spec))
    monkeypatch.setattr(stored_programs, "code_digest", lambda: "other")
    places.append(find_place(spec))
    assert len(set(places)) == len(places)


def test_code_of_others_is_not_stored(cache_folder):
    spec = Spec(nnx.graphdef(ToyDecoder()), (1,), SHAPES, stored_programs.settings())
    place = find_place(spec)
    assert place is None and stored_programs.load(place) is None
    run = jax.jit(lambda x: x + 1)
    assert stored_programs.compile_and_save(spec, run, place)(np.zeros(3, np.int32)).sum() == 3
    assert not list(cache_folder.glob("*.program"))


def test_code_of_others_inside_a_decoder_of_ours_is_not_stored(cache_folder, checkpoint):
    def function():
        pass

    decoder = open_model(checkpoint).decoder
    assert find_place(Spec(nnx.graphdef(decoder), (1,), SHAPES, stored_programs.settings()))
    for foreign in (start, function):
        decoder.extra = foreign
        spec = Spec(nnx.graphdef(decoder), (1,), SHAPES, stored_programs.settings())
        assert find_place(spec) is None


def test_of_many_programs_the_newest_are_kept(cache_folder, checkpoint, monkeypatch):
    monkeypatch.setattr(stored_programs, "MOST", 3)
    monkeypatch.setattr(stored_programs, "code_digest", lambda: "one")
    graphdef = nnx.graphdef(open_model(checkpoint).decoder)
    program = jax.jit(lambda x: x + 1).lower(*SHAPES).compile()
    specs = [Spec(graphdef, (width,), SHAPES, stored_programs.settings()) for width in range(1, 6)]
    places = [find_place(spec) for spec in specs]
    for age, place in enumerate(places):
        stored_programs.save(place, program)
        if place.exists():
            os.utime(place, (age, age))
    assert [place.exists() for place in places] == [False] * 2 + [True] * 3
    assert len(list(cache_folder.glob("paged-jax*"))) == 3  # no parts are left
    assert stored_programs.load(places[-1])(np.zeros(3, np.int32)).tolist() == [1, 1, 1]


def test_what_goes_wrong_in_the_lookup_is_a_miss(cache_folder, checkpoint, monkeypatch):
    graphdef = nnx.graphdef(open_model(checkpoint).decoder)

    def fail():
        raise RecursionError

    monkeypatch.setattr(stored_programs, "code_digest", fail)
    place = find_place(Spec(graphdef, (1,), SHAPES, stored_programs.settings()))
    assert place is None and stored_programs.load(place) is None


def test_without_a_folder_nothing_is_stored(checkpoint):
    graphdef = nnx.graphdef(open_model(checkpoint).decoder)
    assert find_place(Spec(graphdef, (1,), SHAPES, stored_programs.settings())) is None
