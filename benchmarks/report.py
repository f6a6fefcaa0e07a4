"""Run the benchmarks, one after another, and write their tables into benchmarks/README.md.

Each table stands there as it was printed, with the machine, the versions and the date. A script
that fails or takes too long is said to have done so, and its old table is taken out. Nothing else
should run on the machine meanwhile. The pictures are drawn from a whole run alone.

Usage: python benchmarks/report.py [--only waste,step] [--quick]
"""

import argparse
import datetime
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from script import describe_machine

PLACE = Path(__file__).parent
README = PLACE / "README.md"
BEGIN, END = "<!-- tables: written by report.py -->", "<!-- end of tables -->"
LIMIT = 5400  # seconds a script
PEERS = "vllm,llama,hf,hf-cb,ours,ours-default"
SHORT = {name: ["--quick"] for name in ("waste", "policies", "sharing")} | {
    "peers": ["--repeats", "1"]
}


def scripts(folder: Path) -> dict[str, list[str]]:
    """Return the scripts in order, with their arguments; `folder` is for what they hand on."""
    waste, policies = str(folder / "waste.json"), str(folder / "policies.json")
    return {
        "waste": ["--out", waste],
        "policies": ["--calibrate", "--real", "--out", policies],
        "sharing": [],
        "peers": ["--workloads", "S,W1,W2,W3", "--peers", PEERS],
        "bookkeeping": [],
        "step": ["--quick"],
        "prefix": ["--quick"],
        "pictures": ["--waste", waste, "--policies", policies],
    }


def run(name: str, arguments: list[str]) -> str:
    """Return what a script printed, as a section of the README."""
    command = [sys.executable, str(PLACE / f"{name}.py"), *arguments]
    begin = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        ending = "" if done.returncode == 0 else f"failed: {done.stderr.strip()[-500:]}\n"
        printed = done.stdout
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        printed = out.decode() if isinstance(out, bytes) else out
        ending = f"ended after {LIMIT} s, not done\n"
    seconds = time.perf_counter() - begin
    print(printed + ending, flush=True)
    return f"### {name}.py ({seconds:.0f} s)\n\n```text\n{printed.strip()}\n{ending}```\n"


def write(sections: dict[str, str]) -> None:
    """Put the sections between the marks of the README, and keep those of other scripts."""
    before, _, rest = README.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    kept = {part.split(".py", 1)[0]: f"### {part}" for part in old.split("### ")[1:]}
    whole = {**kept, **sections}
    body = "\n".join(whole[name].rstrip() + "\n" for name in scripts(PLACE) if name in whole)
    README.write_text(f"{before}{BEGIN}\n\n{body}\n{END}{after}")


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="names of scripts, separated by commas")
    parser.add_argument("--quick", action="store_true", help="fewer requests, peers once each")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        chosen = scripts(Path(folder))
        all_of_it = [name for name in chosen if not (args.quick and name == "pictures")]
        names = args.only.split(",") if args.only else all_of_it
        if unknown := set(names) - set(chosen):
            parser.error(f"--only: {', '.join(unknown)}: of {', '.join(chosen)}")
        python = platform.python_version()
        stamp = f"{datetime.date.today()}, {describe_machine()}, Python {python}"
        for name in names:
            print(f"== {name}", flush=True)
            section = run(name, chosen[name] + (SHORT.get(name, []) if args.quick else []))
            title, _, text = section.partition("\n")
            write({name: f"{title}\n\n{stamp}\n{text}"})


if __name__ == "__main__":
    main()
