"""Whoever is interrupted, at whatever place, leaves an engine that serves everybody else."""

import gc
import random
import signal
import threading
import time

import jax
import pytest

import engines
from compilations import compilations
from interrupt import run_interrupted
from paged_jax import (
    LLM,
    BeamSearchParams,
    EngineBusyError,
    EngineClosedError,
    InvalidRequestError,
    SamplingParams,
    check_integrity,
)
from toy_decoder import ToyDecoder, random_prompts

MODEL = ToyDecoder(max_model_len=40)
SIZES = dict(block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
NUM_BLOCKS = 30
pytestmark = pytest.mark.usefixtures("no_annotation_checks")


@pytest.fixture(scope="module")
def llm():
    llm = LLM(MODEL, num_blocks=NUM_BLOCKS, enable_prefix_caching=True, **SIZES)
    llm.engine._programs = engines.programs(llm.engine._graphdef, llm.engine.widths)
    return llm


def greedy(count):
    return SamplingParams(temperature=0, max_tokens=count)


class Bystanders:
    """Requests of others: two in rows, four more that wait; two rows are empty soon."""

    def __init__(self, engine):
        self.engine, self.prompts, self.tokens = engine, {}, {}
        for prompt in random_prompts(1, [5, 3, 6, 2, 4, 7, 3, 3, 5]):
            self.add(prompt)
        engine.run(2)
        engine.advance(3)

    def add(self, prompt, **options):
        request_id = self.engine.add_request(prompt, greedy(9), **options)
        self.prompts[request_id], self.tokens[request_id] = prompt, []

    def read(self):
        for request_id in list(self.prompts):
            is_last = self.engine.is_finished(request_id)
            for update in self.engine.take(request_id):
                self.tokens[request_id] += update.token_ids
            if is_last:
                whole = MODEL.continuation(self.prompts.pop(request_id), 9)
                assert self.tokens[request_id] == whole, request_id

    def finish(self):
        while self.prompts:
            self.engine.run(7)
            self.read()


def check_clean(engine):
    """Nothing is left of anybody, and the next request gets its tokens."""
    (prompt,) = random_prompts(9, [6])
    request_id = engine.add_request(prompt, greedy(9))
    while not engine.is_finished(request_id):
        engine.run(32)
    (update,) = engine.take(request_id)
    assert update.token_ids == MODEL.continuation(prompt, 9)
    engine.run(1)
    requests = engine._requests
    assert not engine._lock._is_owned()
    assert not any(map(len, vars(requests).values())), requests
    assert not engine.has_unfinished() and not engine.is_flying()
    assert int(engine.state.cache.pool.num_free) == NUM_BLOCKS - 1
    assert check_integrity(engine.state) == []


def sweep_places(llm, operation, stride=1, *, cleans_up=False):
    """Interrupt an operation at one place after another, among bystanders.

    Returns the number of places, and of those that closed the engine. An operation that cleans up
    leaves no request of its own.
    """
    engine, at, closed, places = llm.engine, 0, 0, set()
    while True:
        others = Bystanders(engine)
        where = run_interrupted(lambda: operation(others), at)  # noqa: B023
        closed += engine.is_closed()
        places.add(where)
        try:
            if cleans_up:
                check_no_others(engine, others)
            if engine.is_closed():
                with pytest.raises(EngineClosedError, match=r"engine\.reset\(\)"):
                    engine.run(1)
                engine.reset()
            others.finish()
            while engine.has_unfinished():
                engine.run(32)
            for request_id in list(engine._requests.done):  # of an interrupted caller
                engine.take(request_id)
            check_clean(engine)
        except BaseException as error:
            error.add_note(f"interrupted at {where}")
            raise
        if where is None:
            break
        at += stride
    return len(places), closed


def check_no_others(engine, others):
    """Whoever was interrupted has left no request."""
    engine.has_unfinished()  # looks at what was abandoned
    requests = engine._requests
    assert {*requests.live, *requests.done, *requests.with_updates} <= {*others.prompts}


def twin(others):
    """A request of the interrupted caller."""
    return others.engine.add_request([7, 8, 9], greedy(9))


def abort_running(others):
    engine = others.engine
    mine = next(iter(others.prompts))
    del others.prompts[mine]
    engine.abort(mine)


def abort_queued(others):
    engine = others.engine
    mine = list(others.prompts)[-1]
    del others.prompts[mine]
    engine.abort(mine)


def take_own(others):
    engine = others.engine
    mine = next(iter(others.prompts))
    del others.prompts[mine]
    engine.take(mine)


OPERATIONS = {
    "add": twin,
    "dispatch": lambda others: others.engine.dispatch(5),
    "collect": lambda others: others.engine.collect(),
    "run": lambda others: others.engine.run(40),
    "abort running": abort_running,
    "abort queued": abort_queued,
    "take": take_own,
    "update": lambda others: others.engine.update_params(others.engine.params),
    "reset cache": lambda others: others.engine.reset_prefix_cache(),
    "reset": lambda others: others.engine.reset(),
}


STRIDES = {"run": 4}  # most of its places are those of dispatch and collect
LONG = ("add", "run", "reset")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.soak] * (n in LONG)) for n in OPERATIONS]
)
def test_an_engine_interrupted_anywhere_serves_all_others(llm, name):
    places, closed = sweep_places(llm, OPERATIONS[name], STRIDES.get(name, 1))
    assert places > 10
    # Only where the donated state is out of our hands; in `reset` it is given up.
    assert name == "reset" or closed <= (24 if name in ("dispatch", "run", "update") else 0)


def generate(others, llm):
    prompts = random_prompts(3, [4, 6])
    outputs = llm.generate(prompts, greedy(6), progress=False)
    assert [o.outputs[0].token_ids for o in outputs] == [MODEL.continuation(p, 6) for p in prompts]


def stream(others, llm):
    (prompt,) = random_prompts(4, [5])
    deltas = llm.stream(prompt, greedy(30))
    whole = MODEL.continuation(prompt, 30)
    try:
        for wanted in whole[:2]:
            assert next(deltas).token_ids == [wanted]
    finally:
        deltas.close()


@pytest.mark.soak
@pytest.mark.parametrize("operation", [generate, stream])
def test_a_call_of_llm_interrupted_anywhere_leaves_nothing_behind(llm, operation):
    places, _ = sweep_places(llm, lambda others: operation(others, llm), 5, cleans_up=True)
    assert places > 60


# ---------------------------------------------------------------- real signals


class Alarm(KeyboardInterrupt):
    pass


def run_with_alarm(operation, delay):
    """Run, and let a real signal raise after so many seconds, wherever that may be."""

    def ring(*_):
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        operation()
        signal.setitimer(signal.ITIMER_REAL, 0)
        return False
    except Alarm:
        return True
    except ValueError as error:
        # jax makes this of an interrupt that lands while it compares a program's arguments.
        if "Cache keys should be comparable" not in str(error):
            raise
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer
@pytest.mark.parametrize("operation", [generate, stream])
def test_a_real_signal_at_any_moment_leaves_everybody_else_served(llm, operation):
    draw, engine = random.Random(0), llm.engine
    operation(None, llm)
    start = time.perf_counter()
    operation(None, llm)
    usual, rung = time.perf_counter() - start, 0
    for _ in range(60):
        others = Bystanders(engine)
        rung += run_with_alarm(lambda: operation(None, llm), draw.uniform(0, 1.5 * usual))
        check_no_others(engine, others)
        if engine.is_closed():
            engine.reset()
        others.finish()
        while engine.has_unfinished():
            engine.run(32)
        check_clean(engine)
    assert rung > 20


def test_a_generate_after_a_lost_state_goes_on_by_itself(llm):
    """The next call opens the engine; requests of others are computed again."""
    engine, others = llm.engine, Bystanders(llm.engine)
    run = engine._programs.run

    def lose(*args):
        run(*args)
        raise Alarm  # the signal lands between the call and the assignment

    engine._programs = engine._programs._replace(run=lose)
    with pytest.raises(Alarm):
        llm.generate([1, 2, 3], greedy(5), progress=False)
    engine._programs = engine._programs._replace(run=run)
    assert engine.is_closed()
    generate(None, llm)
    others.finish()
    check_clean(engine)


def test_a_closed_engine_says_so_also_when_only_abandoned_rows_are_left(llm):
    engine = llm.engine
    stream = llm.stream([1, 2, 3], greedy(30))
    next(stream)
    engine.collect_all()
    run = engine._programs.run

    def lose(*args):
        run(*args)
        raise Alarm

    engine._programs = engine._programs._replace(run=lose)
    with pytest.raises(Alarm):
        next(stream)
    engine._programs = engine._programs._replace(run=run)
    for call in (lambda: engine.run(1), engine.collect, engine.step, engine.reset_prefix_cache):
        with pytest.raises(EngineClosedError, match="dispatch"):
            call()
    with pytest.raises(EngineClosedError, match="dispatch"):
        engine.update_params(engine.params)
    assert llm.reset_prefix_cache() and not engine.is_closed()  # `LLM` opens it
    check_clean(engine)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_call_inside_another_one_is_refused_and_harms_neither(llm, when):
    """A signal handler that generates, in the middle of a dispatch."""
    engine, run, errors = llm.engine, llm.engine._programs.run, []

    def handle(*_):
        try:
            llm.generate([9, 8], greedy(4), progress=False)
        except EngineBusyError as error:
            errors.append(error)

    def hooked(*args):
        if when == "before":
            signal.raise_signal(signal.SIGALRM)
        out = run(*args)
        if when == "after":
            signal.raise_signal(signal.SIGALRM)
        return out

    before = signal.signal(signal.SIGALRM, handle)
    try:
        engine._programs = engine._programs._replace(run=hooked)
        generate(None, llm)
    finally:
        engine._programs = engine._programs._replace(run=run)
        signal.signal(signal.SIGALRM, before)
    assert errors and "`abandon` alone" in str(errors[0])
    generate(None, llm)
    check_clean(engine)


@pytest.mark.parametrize("wrong", [5, [1], ["a", None], [[1]]])
def test_what_are_no_ids_are_not_abandoned(llm, wrong):
    others = Bystanders(llm.engine)
    with pytest.raises(InvalidRequestError, match="request_ids: "):
        llm.engine.abandon(wrong)
    others.finish()
    (prompt,) = random_prompts(2, [4])
    others.add(prompt, request_id="mine")
    others.prompts.pop("mine")
    llm.engine.abandon("mine")
    check_clean(llm.engine)


def test_what_the_device_cannot_compute_closes_the_engine_and_reset_opens_it(llm):
    engine, others = llm.engine, Bystanders(llm.engine)
    broken = engine._flying[-1]
    object.__setattr__(broken, "report", jax.tree.map(lambda x: x + 0, broken.report))
    for array in jax.tree.leaves(broken.report):
        array.delete()
    with pytest.raises(RuntimeError):
        engine.collect_all()
    with pytest.raises(EngineClosedError, match="collect"):
        engine.step()
    engine.reset()
    others.finish()
    check_clean(engine)


# ---------------------------------------------------------------- clean-up


@pytest.mark.parametrize("how", ["close", "collected", "interrupt"])
def test_clean_up_runs_nothing_and_compiles_nothing(how):
    """The first request of an engine: nothing but `run` and `add` was ever compiled."""
    llm = LLM(MODEL, num_blocks=NUM_BLOCKS, enable_prefix_caching=True, **SIZES)
    stream = llm.stream([1, 2, 3], greedy(30))
    next(stream)
    # A beam search in the queue would make the next dispatch compile.
    llm.engine.add_request([4, 5], BeamSearchParams(2, max_tokens=3))
    calls, programs = [], llm.engine._programs
    llm.engine._programs = type(programs)(
        *(lambda *_, name=name: calls.append(name) for name in programs._fields)
    )
    with compilations() as compiled:
        if how == "close":
            stream.close()
        elif how == "collected":
            del stream
            gc.collect()
        else:
            with pytest.raises(Alarm):
                stream.throw(Alarm)
    assert calls == [] and compiled == []
    llm.engine._programs = programs
    (beam,) = llm.engine._requests.queue
    llm.engine.abort(beam)
    assert not llm.engine.has_unfinished()


# ---------------------------------------------------------------- threads


def test_eight_threads_share_one_llm_and_each_gets_its_own_tokens(llm):
    """Lists, streams, samples and aborts, all at once."""
    wrong, params = [], greedy(7)

    def work(number):
        draw = random.Random(number)
        try:
            for turn in range(6):
                prompts = random_prompts(100 * number + turn, [draw.randint(1, 12) for _ in "abc"])
                whole = [MODEL.continuation(prompt, 7) for prompt in prompts]
                if (number + turn) % 3 == 0:
                    for prompt, wanted in zip(prompts, whole, strict=True):
                        tokens = [t for d in llm.stream(prompt, params) for t in d.token_ids]
                        if tokens != wanted:
                            wrong.append((number, tokens, wanted))
                elif (number + turn) % 3 == 1:
                    deltas = llm.stream(prompts[0], greedy(20))
                    next(deltas)
                    deltas.close()
                    llm.engine.run(2)
                else:
                    outputs = llm.generate(prompts, params, progress=False)
                    tokens = [output.outputs[0].token_ids for output in outputs]
                    if tokens != whole:
                        wrong.append((number, tokens, whole))
        except BaseException as error:
            wrong.append((number, error))

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads) and wrong == []
    check_clean(llm.engine)


def test_a_reader_of_the_engine_gets_its_tokens_while_somebody_streams(llm):
    (mine, theirs) = random_prompts(5, [4, 6])
    deltas, tokens = llm.stream(mine, greedy(12)), []
    tokens += next(deltas).token_ids
    request_id = llm.engine.add_request(theirs, greedy(3))
    llm.engine.run(3)
    tokens += [token for delta in deltas for token in delta.token_ids]
    assert tokens == MODEL.continuation(mine, 12)
    (update,) = llm.engine.take(request_id)
    assert update.token_ids == MODEL.continuation(theirs, 3)
