"""Start the measurements, each in a fresh process, the peers in turn within each repeat."""

import datetime
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import workloads
from peer_runs import machine, names
from peer_runs.agreement import compare

Row = dict[str, Any]


class Settings(NamedTuple):
    """What all measurements of a run have in common."""

    folder: Path
    isa: str
    repeats: int
    timeout: float
    reference: tuple[str, str] | None
    out: Path | None


def run_all(workload_names: list[str], peers: list[tuple[str, str]], settings: Settings):
    """Measure all, print a line for each, and return the rows."""
    present = []
    for name, variant in peers:
        lacking = names.missing(name, variant, settings.isa, settings.folder)
        if lacking:
            print(f"{names.label(name, variant)}: absent, {lacking}", flush=True)
        else:
            present.append((name, variant))
    reference = settings.reference or next(iter(present), None)
    if reference in present:  # first, so that the others can be compared with it at once
        present.remove(reference)
        present.insert(0, reference)
    rows: list[Row] = []
    for workload in workload_names:
        expected = None
        for repeat in range(settings.repeats):
            for name, variant in present:
                row = measure(workload, name, variant, settings)
                row["repeat"] = repeat
                tokens = row.pop("tokens", None)
                if (name, variant) == reference and expected is None:
                    expected = tokens
                if tokens and expected and reference and workloads.get(workload).temperature == 0:
                    row |= compare(tokens, expected)
                    row["reference"] = names.label(*reference)
                report(row, settings.out)
                rows.append(row)
    return rows


def report(row: Row, out: Path | None) -> None:
    """Print a row's most important figures and add it to the file."""
    what = row.get("error") or (
        f"{row['tokens_per_second']:.1f} tokens/s, ready after {row['load_seconds']:.1f} s, "
        f"{row['peak_mib']} MiB, others {row['others_cores']}"
    )
    print(f"{row['workload']} {row['peer']}: {what}", flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def measure(workload: str, name: str, variant: str, settings: Settings) -> Row:
    """Measure one peer once."""
    module = names.PEERS[name].module
    row: Row = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "isa": settings.isa,
        "isa_note": names.ISA_NOTES[module] if settings.isa == "avx2" else "",
        "workload": workload,
        "peer": names.label(name, variant),
    }
    command = [
        str(names.python_of(name, settings.isa, settings.folder)),
        "-m",
        "peer_runs.measure",
        workload,
        f"{name}:{variant}",
    ]
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryFile("w+") as errors:
        output, ended = run(
            command, names.environment(name, settings.isa, settings.folder), empty, errors, settings
        )
        errors.seek(0)
        said = [line for line in errors.read().splitlines() if line.strip()]
    results = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if results:
        return row | json.loads(results[-1].removeprefix("RESULT "))
    return row | {"error": f"{ended}: {' | '.join(said[-3:])}"}


def run(command, env, folder, errors, settings) -> tuple[str, str]:
    """Return what a process prints, and how it ended; end it and its children after the time."""
    process = subprocess.Popen(
        command,
        env=env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=settings.timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "", f"not done after {settings.timeout:.0f} s"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return output, f"ended with {process.returncode}"
