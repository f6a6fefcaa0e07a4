"""Draw the headline benchmark: waste, latency against the rate of requests, the pool over time.

    python benchmarks/waste.py --out FILE1; python benchmarks/policies.py --out FILE2
    python benchmarks/pictures.py --waste FILE1 --policies FILE2

Without a file its picture is left as it is. The pool's picture needs none: it is made from a run of
the real engine, without a model. SVG and PNG go to benchmarks/pictures/; equal numbers give equal
files. Needs `pip install 'paged-jax[pictures]'`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import matplotlib
import numpy as np
from flax import nnx

from no_pages import NoPages
from paged_jax import Engine, EngineConfig, SamplingParams

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib import colors

PLACE = Path(__file__).parent / "pictures"
PANEL = "#fbfaf7"  # an opaque light panel, so that a dark page does not swallow the text
COLOURS = {
    "static": "#8c8c8c",
    "max": "#c44e52",
    "pow2": "#dd8452",
    "oracle": "#b59a3a",
    "paged": "#2a7f9e",
}
STYLE: Any = {
    "svg.hashsalt": "paged-jax",
    "figure.facecolor": PANEL,
    "axes.facecolor": PANEL,
    "savefig.facecolor": PANEL,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def save(figure: Any, name: str) -> None:
    """Write a picture as SVG and PNG, without a date."""
    PLACE.mkdir(exist_ok=True)
    figure.tight_layout()
    figure.savefig(PLACE / f"{name}.svg", metadata={"Date": None})
    figure.savefig(PLACE / f"{name}.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


def draw_waste(numbers: dict) -> None:
    """Draw the share of the slots held that is empty, a bar for each policy."""
    mixes = list(dict.fromkeys(row["mix"] for row in numbers["rows"]))
    figure, axes = plt.subplots(1, len(mixes), figsize=(8.6, 3.1), sharey=True, squeeze=False)
    for axis, mix in zip(axes[0], mixes, strict=True):
        rows = [row for row in numbers["rows"] if row["mix"] == mix][::-1]
        names = [row["policy"] for row in rows]
        shares = [100 * row["empty"] for row in rows]
        bars = axis.barh(names, shares, color=[COLOURS[name.split()[0]] for name in names])
        axis.bar_label(bars, [f"{share:.1f} %" for share in shares], padding=3)
        axis.set(title=f"{mix} requests", xlabel="reserved KV slots that are empty, %")
        axis.set_xlim(0, 115)
        axis.set_xticks(range(0, 101, 25))
    save(figure, "waste")


def draw_policies(numbers: dict) -> None:
    """Draw normalised latency against the rate of requests, a curve for each policy."""
    cases = numbers["simulated"]
    figure, axes = plt.subplots(1, len(cases), figsize=(8.6, 3.5), squeeze=False)
    for axis, case in zip(axes[0], cases, strict=True):
        for policy, points in case["curves"].items():
            axis.plot(
                [p["rate"] for p in points],
                [p["latency"] for p in points],
                "o-",
                color=COLOURS[policy],
                markersize=3,
                linewidth=2.4 if policy == "paged" else 1.4,
                label=policy,
            )
        lone = case["lone_latency"]
        axis.axhline(5 * lone, color="#999999", linewidth=0.8, linestyle=":")
        axis.set(xlabel="requests a second", ylabel="seconds a token", ylim=(0, 12 * lone))
        axis.set_title(case["name"], fontsize=10)
        kept = [p["rate"] for p in case["curves"]["paged"] if p["latency"] < 8 * lone]
        axis.set_xlim(0, 1.25 * max(kept))
    axes[0][0].legend(frameon=False, loc=(0.31, 0.42), fontsize=9)
    save(figure, "policies")


# ---------------------------------------------------------------- the pool over time


def small_run() -> tuple[np.ndarray, np.ndarray, int]:
    """Serve nine requests from a pool of 40 blocks, step by step.

    Two groups share a prefix of two blocks each. Returns, by block and step, how many requests hold
    the block and the last of them (-1 for none), and the number of preemptions.
    """
    config = EngineConfig(
        41, 96, 8, 64, num_rows=9, block_size=4, enable_prefix_caching=True, watermark=0.0
    )
    engine = Engine(*nnx.split(NoPages(96)), config)
    rng, holders, owners = np.random.default_rng(3), [], []
    for i in range(9):
        prompt = [2 + i % 2] * 8 + rng.integers(0, 8, 3 + i).tolist()
        new = int(rng.integers(14, 44))
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))
    while engine.has_unfinished():
        engine.step()
        lengths = np.asarray(engine.state.seqs.num_prompt_tokens)
        assert np.array_equal(lengths, 11 + np.arange(9))  # rows are filled in order
        tables = np.asarray(engine.state.cache.tables.blocks[0])
        counts, last = np.zeros(41, int), np.full(41, -1)
        for row in range(9):
            held = tables[row][tables[row] > 0]
            counts[held] += 1
            last[held] = row
        assert np.array_equal(counts[1:], np.asarray(engine.state.cache.pool.ref_count)[1:])
        holders.append(counts[1:])
        owners.append(last[1:])
    assert engine.counters is not None and int(jnp.min(engine.state.cache.pool.num_free)) == 40
    return np.array(holders).T, np.array(owners).T, engine.counters.preemptions


def draw_pool() -> None:
    """Draw which request holds which block over the steps."""
    holders, owners, preemptions = small_run()
    colours = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
    image = np.ones((*owners.shape, 3)) * colors.to_rgb("#ecebe6")
    for request in range(9):
        image[owners == request] = colours[request]
    image[holders > 1] = colors.to_rgb("#222222")
    figure, axis = plt.subplots(figsize=(8.6, 4.2))
    extent = (0, image.shape[1], image.shape[0] + 0.5, 0.5)
    axis.imshow(image, aspect="auto", interpolation="nearest", extent=extent)
    axis.set(xlabel="step", ylabel="physical block")
    word = "preemption" if preemptions == 1 else "preemptions"
    axis.set_title(f"A pool of 40 blocks: 9 requests, {preemptions} {word}", fontsize=10)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[i]) for i in range(9)]
    names = [f"request {i}" for i in range(9)] + ["shared", "free"]
    handles += [plt.Rectangle((0, 0), 1, 1, color=c) for c in ("#222222", "#ecebe6")]
    axis.legend(handles, names, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    save(figure, "pool")


def main() -> None:
    """Draw what there are numbers for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--waste", type=Path, help="the JSON of waste.py")
    parser.add_argument("--policies", type=Path, help="the JSON of policies.py")
    args = parser.parse_args()
    with plt.rc_context(STYLE):
        draw_pool()
        for path, draw in ((args.waste, draw_waste), (args.policies, draw_policies)):
            if path is not None:
                draw(json.loads(path.read_text()))
    print("\n".join(str(path.relative_to(PLACE.parent)) for path in sorted(PLACE.iterdir())))


if __name__ == "__main__":
    main()
