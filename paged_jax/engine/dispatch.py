"""The programs that an engine dispatches, and the updates in what they report."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from paged_jax.cache import prefix_directory
from paged_jax.checks import show
from paged_jax.config import EngineConfig
from paged_jax.engine.report import STEPS_PER_DISPATCH, Report, Update, make_report
from paged_jax.engine.requests import Output, Request
from paged_jax.engine.step import EngineState, run
from paged_jax.errors import ConfigError
from paged_jax.sampling.parameters import BeamSearchParams
from paged_jax.scheduling import sequences
from paged_jax.scheduling.beam_search import add_beams
from paged_jax.scheduling.beams import NewBeams
from paged_jax.scheduling.sequences import FINISH_REASONS, FINISHED, NewSequences, Sequences


class Programs(NamedTuple):
    """The jitted functions of an engine; each takes the state, or its rows, donated.

    Attributes:
        run: (params, state, max_steps, whether to abort each row) -> (state, report).
        add: (rows, new rows, new beams or None) -> rows.
        set_roots: (state, a root for each row) -> state.
    """

    run: Callable
    add: Callable
    set_roots: Callable


@dataclass(frozen=True)
class Dispatch:
    """A dispatch on its way: its report, and which output each row made."""

    report: Report
    outputs: dict[int, Output]
    max_steps: int


def compile_programs(graphdef: Any, widths: tuple[int, ...]) -> Programs:
    """Return the programs for one decoder, to be compiled at their first call."""
    return Programs(
        run=jax.jit(partial(_run, graphdef, widths), donate_argnums=1),
        add=jax.jit(_add, donate_argnums=0),
        set_roots=jax.jit(_set_roots, donate_argnums=0),
    )


def run_args(
    config: EngineConfig, max_steps: int, aborted: list[int]
) -> tuple[np.int32, np.ndarray]:
    """Return what a dispatch is told: how many steps at most, and which rows are aborted."""
    is_aborted = np.zeros(config.num_rows, bool)
    is_aborted[aborted] = True
    return np.int32(max_steps), is_aborted


def shapes_of(args: Any) -> Any:
    """Return the shape and dtype of each array of a pytree: enough to compile for it."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)


def _run(
    graphdef: Any,
    widths: tuple[int, ...],
    params: Any,
    state: EngineState,
    max_steps: Int[Array, ""],
    is_aborted: Bool[Array, "R"],
) -> tuple[EngineState, Report]:
    model = nnx.merge(graphdef, params)
    state = state.replace(seqs=sequences.abort(state.seqs, is_aborted))
    state, steps = run(model, state, max_steps, widths=widths)
    return state, make_report(state, steps)


def _add(seqs: Sequences, rows: NewSequences, beams: NewBeams | None) -> Sequences:
    seqs = sequences.add(seqs, rows)
    return seqs if beams is None else add_beams(seqs, beams)


def _set_roots(state: EngineState, roots: Int[Array, "R"]) -> EngineState:
    """Let rows start from new roots.

    Those that run stop registering: their blocks are of the old params and the new.
    """
    cache, seqs = state.cache, state.seqs.replace(root=roots)
    if cache.directory is not None:
        directory = prefix_directory.stop_rows(cache.directory, slice(None))
        cache = cache.replace(directory=directory)
    return state.replace(cache=cache, seqs=seqs)


def read_updates(
    report: Report, outputs: dict[int, Output], seqs: Sequences
) -> Iterator[tuple[Request, Update]]:
    """Yield an update for each output of which the report has something new.

    `outputs` are those that the rows still make. `seqs` are the newest rows: they have what is too
    long for a report.
    """
    arrays = (report.status, report.finish_reason, report.num_tokens, report.num_cached)
    statuses, reasons, totals, num_cached = (array.tolist() for array in arrays)
    for row, output in outputs.items():
        request, is_finished = output.request, statuses[row] == FINISHED
        mailbox = request.mailbox
        if isinstance(request.params, BeamSearchParams) and not is_finished:
            continue  # a live beam may still be dropped
        # An aborted beam, and a row that started again, may have fewer tokens than were seen.
        num_new = max(totals[row] - mailbox.num_seen[output.index], 0)
        if mailbox.has_ended[output.index] or (num_new == 0 and not is_finished):
            continue
        tokens, logprobs = _newest(report, row, num_new, totals[row], seqs)
        reason = FINISH_REASONS[reasons[row]] if is_finished else None
        is_own_stop = reason == "stop" and bool(tokens) and tokens[-1] not in request.eos_ids
        update = Update(
            request.request_id,
            tokens,
            logprobs,
            finish_reason=reason,
            stop_reason=tokens[-1] if is_own_stop else None,
            index=output.index,
            num_cached_tokens=max(num_cached[row], 0),
        )
        yield request, update


def rows_with(status: int, report: Report, outputs: dict[int, Output]) -> list[int]:
    """Return the rows of these outputs that have the status."""
    statuses = report.status.tolist()
    return [row for row in outputs if statuses[row] == status]


def _newest(
    report: Report, row: int, count: int, total: int, seqs: Sequences
) -> tuple[list[int], list[float]]:
    """Return the last `count` of a row's `total` tokens, and their log-probabilities."""
    if count <= STEPS_PER_DISPATCH:
        start = STEPS_PER_DISPATCH - count
        return report.tokens[row, start:].tolist(), report.logprobs[row, start:].tolist()
    # A beam search, or an interrupted reader that left a report unread.
    tokens, logprobs = (
        np.asarray(x[row])[total - count : total] for x in (seqs.tokens, seqs.logprobs)
    )
    return tokens.tolist(), logprobs.tolist()


def check_like(params: Any, old: Any) -> None:
    """Raise ConfigError naming the first param that differs in place, shape or dtype."""
    new, was = (dict(jax.tree.leaves_with_path(tree)) for tree in (params, old))
    for path in [*was, *new]:
        name = jax.tree_util.keystr(path)
        if path not in new or path not in was:
            problem = "is missing" if path in was else "is not of this model"
            raise ConfigError(f"params{name}: {problem}")
        if not _holds_numbers(new[path]):
            raise ConfigError(f"params{name}: {show(new[path])}; an array with numbers is needed")
        shapes = [f"{jnp.result_type(x)}{list(np.shape(x))}" for x in (new[path], was[path])]
        if shapes[0] != shapes[1]:
            raise ConfigError(f"params{name}: {shapes[0]}; the model has {shapes[1]}")


def check_numbers(params: Any) -> None:
    """Raise ConfigError naming the first param that is only a shape."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            name = f"params{jax.tree_util.keystr(path)}"
            raise ConfigError(f"{name}: {show(leaf)}; an array with numbers is needed, or load=")


def _holds_numbers(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        return not leaf.is_deleted()
    return isinstance(leaf, np.ndarray | np.number | bool | int | float)
