"""The tables of the comparison with other systems, and what is compared."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import workloads
from peer_runs import names, process_tree, table
from peer_runs.agreement import compare
from peer_runs.make import requirements


def row(peer, speed, **others):
    return {
        "date": "2026-12-02T06:00:00+00:00",
        "machine": {"cpu": "Some CPU", "cores": 2, "flags": ["avx2"]},
        "isa": "native",
        "isa_note": "",
        "workload": "S",
        "peer": peer,
        "tokens_per_second": speed,
        "peak_mib": 100,
        "load_seconds": 2.0,
        "others_cores": 0.01,
    } | others


def test_a_peer_may_have_a_variant():
    assert names.parse("ours") == ("ours", "f32")
    assert names.parse("ours:bf16") == ("ours", "bf16")
    for name, peer in names.PEERS.items():
        for variant in peer.variants:
            assert names.parse(names.label(name, variant)) == (name, variant)
    for wrong in ("theirs", "ours:q4", ""):
        with pytest.raises(ValueError, match="is none of"):
            names.parse(wrong)


def test_an_absent_peer_is_told_how_to_make(tmp_path):
    said = names.missing("llama", "f32", "avx2", tmp_path)
    assert f"make --only llama-avx2 --dir {tmp_path}" in said
    assert names.missing("ours", "f32", "avx2", tmp_path) is None


def test_the_first_difference_is_found():
    assert compare([[1, 2], [3]], [[1, 2], [3]]) == {"equal": 2, "of": 2}
    found = compare([[1], [3, 4, 5]], [[1], [3, 9, 9]])
    assert found == {"equal": 1, "of": 2, "first_difference": {"prompt": 1, "token": 1}}


def test_medians_marks_and_failures():
    rows = [
        row("hf", 10.0),
        row(
            "hf", 12.0, others_cores=0.3, equal=1, of=2, first_difference={"prompt": 0, "token": 7}
        ),
        row("hf", 11.0, equal=2, of=2),
        row("vllm", 20.0, others_cores=None),
    ]
    failed = {k: v for k, v in row("ours", 0).items() if k in ("date", "machine", "isa")}
    rows.append(failed | {"workload": "S", "peer": "ours", "error": "ended with 1: a | b"})
    lines = table.tables(rows).splitlines()
    assert (
        "| hf\\* | 11.0 | 10.0, 12.0\\*, 11.0 | 100 | 2.0 | 1 of 2; prompt 0 from token 7 | 0.30 |"
        in lines
    )
    assert "| vllm | 20.0 | 20.0 | 100 | 2.0 |  | unknown |" in lines
    assert "| ours | failed | ended with 1: a / b |  |  |  |  |" in lines


def test_requirements_without_extras_and_without_torch():
    listed = [
        "regex",
        'torch==2.13.0+cpu; platform_machine == "x86_64"',
        "torchvision",
        "fastapi[standard]<0.137.0",
        'scipy; extra == "audio"',
        'setuptools<81.0.0; python_version > "3.11"',
    ]
    assert requirements(listed) == [listed[0], listed[3], listed[5]]


def test_the_workloads_are_what_they_say():
    totals = {"W1": 4443, "W2": 4096, "W3": 1024, "S": 128}
    for name in workloads.NAMES:
        one, two = workloads.get(name), workloads.get(name)
        assert one == two
        assert len(one.prompts) == len(one.max_new)
        assert sum(one.lengths) == totals[name]
    assert len({tuple(prompt[:512]) for prompt in workloads.get("W3").prompts}) == 1


def test_the_own_process_is_measured():
    watch = process_tree.Watch(interval=0.01)
    assert watch.peak() > 10
    assert process_tree.cpu_seconds() > 0
