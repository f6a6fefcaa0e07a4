"""Write results as tables in Markdown."""

import json
import statistics
from pathlib import Path
from typing import Any

import workloads

Row = dict[str, Any]
NOISY = 0.05  # cores that others used: above it a figure says little
HEADER = ("", "tokens/s", "each run", "peak MiB", "ready after s", "greedy tokens equal", "others")


def read(path: Path) -> list[Row]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def tables(rows: list[Row]) -> str:
    """Return all tables, with the machines and versions that the rows come from."""
    if not rows:
        return "nothing was measured"
    parts = [about(rows)]
    for isa in dict.fromkeys(row["isa"] for row in rows):
        for name in dict.fromkeys(row["workload"] for row in rows):
            chosen = [row for row in rows if row["workload"] == name and row["isa"] == isa]
            if chosen:
                limit = "" if isa == "native" else f", limited to {isa.upper()}"
                parts.append(f"{name}{limit}: {workloads.get(name).title}\n\n{table(chosen)}")
    notes = {row["peer"]: row["isa_note"] for row in rows if row.get("isa_note")}
    if notes:
        lines = [f"- {peer}: {note}" for peer, note in notes.items()]
        parts.append("How each was limited to AVX2:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def about(rows: list[Row]) -> str:
    """Say when and where the rows were measured, and what their marks mean."""
    machines = {
        f"{m['cpu']}, {m['cores']} cores ({' '.join(m['flags']) or 'flags unknown'})"
        for m in (row["machine"] for row in rows)
    }
    versions: dict[str, str] = {}
    for row in rows:
        versions |= row.get("versions", {})
    dates = sorted(row["date"][:10] for row in rows)
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return (
        f"{span}; {'; '.join(sorted(machines))}; "
        + ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        + ". Tokens/s are medians of output tokens, prompts' time included, loading and compiling "
        f"not. \\*: others used more than {NOISY} cores."
    )


def table(rows: list[Row]) -> str:
    """Return the table of one workload, a line for each peer."""
    lines = [HEADER, ("---",) * len(HEADER)]
    for peer in dict.fromkeys(row["peer"] for row in rows):
        lines.append(line([row for row in rows if row["peer"] == peer]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def is_noisy(row: Row) -> bool:
    """Say whether others used the machine; where that is unknown, it is not said."""
    return (row.get("others_cores") or 0) > NOISY


def line(rows: list[Row]) -> tuple[str, ...]:
    """Return the cells of one peer."""
    peer = rows[0]["peer"]
    good = [row for row in rows if "error" not in row]
    errors = [row["error"] for row in rows if "error" in row]
    if not good:
        return (peer, "failed", errors[0].replace("|", "/")[:200], "", "", "", "")
    mark = r"\*" if any(map(is_noisy, good)) else ""
    speeds = [row["tokens_per_second"] for row in good]
    each = [f"{row['tokens_per_second']:.1f}{r'\*' if is_noisy(row) else ''}" for row in good]
    others = [row["others_cores"] for row in good if row["others_cores"] is not None]
    return (
        peer + mark,
        f"{statistics.median(speeds):.1f}",
        ", ".join(each) + (f", {len(errors)} failed" if errors else ""),
        str(max(row["peak_mib"] for row in good)),
        f"{statistics.median(row['load_seconds'] for row in good):.1f}",
        equality(good),
        f"{max(others):.2f}" if others else "unknown",
    )


def equality(rows: list[Row]) -> str:
    """Return how many outputs were as the reference's, in the run with the fewest."""
    compared = [row for row in rows if "equal" in row]
    if not compared:
        return ""
    worst = min(compared, key=lambda row: row["equal"])
    text = f"{worst['equal']} of {worst['of']}"
    if place := worst.get("first_difference"):
        text += f"; prompt {place['prompt']} from token {place['token']}"
    return text
