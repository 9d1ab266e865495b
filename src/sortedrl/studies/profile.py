"""Measures how fast this engine is on this machine, to calibrate the simulator to your hardware.

Each cell of the profile runs `running` requests, all but one with contexts of equal length. The engine may prefill them
over many steps and, if it is a server, in another order than that of submission. So two short requests follow when the
first of the others has ended, and serve as the clock: they come last in the engine's queue. When one of them finishes
after a few tokens, all others are decoding; the second finishes `steps` tokens later, and no other request finishes in
between. That interval gives the step time; the time before it, minus its decode steps, is the prefill. The remaining
requests are aborted. This works with any engine, even if it delivers tokens in large chunks.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import Field

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Engine, EngineBase, Request, RequestFailed, RequestFinished
from sortedrl.core.rollout import Prompt
from sortedrl.core.wording import counted
from sortedrl.engines.lengths import ForcedLengths
from sortedrl.engines.settings import EngineSettings, Slots, check_engine
from sortedrl.engines.speculative import WITHOUT_WEIGHTS, DraftCounts, RepeatLast
from sortedrl.models import model_named
from sortedrl.settings.base import Settings
from sortedrl.studies.measurements import Log, check_is_no_folder, machine, make_folder, random_prompts, warm_up
from sortedrl.studies.profile_file import Cell, Profile, heaviest
from sortedrl.training.engine import bare_engine

_LEAD_TOKENS = 8  # until the batch is in steady state
_TOKENS_AFTER_RETURN = 2
_SMALLEST_PREFILL_STEP = 512  # tokens that every engine can prefill in one step
SHORT_CONTEXT = 32
_CONTEXTS_OF_A_RETURN = 8  # context and new tokens of a measured return fit so many times in the longest context
FIRST_PLACE_OF_RETURNS = 1_000_000  # no place of the warm-up or of a cell: no prefix cache hits
FIRST_PLACE_OF_DRAFTS = 100_000  # nor of a cell without drafts


class ProfileSettings(Settings, EngineSettings):
    """Measure an engine's step time, prefill, KV cache capacity and weight update, for `simulate --step-time FILE`."""

    model: Annotated[
        str, Field(description="as in bench; for a server, the folder that it serves, whose weights are sent again")
    ] = "built-in"
    slots: Annotated[Slots, Field(ge=3)] = 64
    max_context_tokens: Annotated[int, Field(ge=64, description="longest prompt plus response, in tokens")] = 1024
    steps: Annotated[int, Field(ge=1, description="decode steps per measurement")] = 48
    repeats: Annotated[int, Field(ge=1, description="repeats of each measurement; the median is used")] = 3
    observation_tokens: Annotated[
        int | None,
        Field(
            ge=0,
            description="for responses of several turns: also time a response that returns with this many new tokens; "
            "default: with a server of SGLang, which stops decoding to prefill, at most 64, else 0",
        ),
    ] = None
    out: Annotated[Path, Field(description="file to write")] = Path("profile.json")

    @property
    def observed(self) -> int:
        """New tokens of the return that is timed; 0: none is."""
        if self.observation_tokens is None and self.engine == "sglang" and len(self.engine_urls) == 1:
            return min(64, self.max_context_tokens // _CONTEXTS_OF_A_RETURN)
        return self.observation_tokens or 0

    def check(self) -> None:
        check_engine(self)
        check_is_no_folder("out", self.out, "profile.json")
        cells = cells_for(self.slots, self.max_context_tokens, math.inf, self.steps)
        longest, observed = self.max_context_tokens, self.observed
        if len({running for running, _ in cells}) < 2 or len({context for _, context in cells}) < 2:
            why = f"measurements of {self.steps} steps at two context lengths and two batch sizes do not fit in it"
            fix = "Set it higher, or --steps or --slots lower."
            raise ConfigurationError("max_context_tokens", longest, why, fix)
        if observed and self.engine == "embedded":
            why = "the embedded engine has no prefix cache: a return is an ordinary prefill, which is always measured"
            fix = "Leave it out, or choose another --engine."
            raise ConfigurationError("observation_tokens", observed, why, fix)
        if observed > (most := longest // _CONTEXTS_OF_A_RETURN):
            why = f"of max_context_tokens = {longest} it has room for {most}"
            fix = "Set it lower, or --max-context-tokens higher."
            raise ConfigurationError("observation_tokens", observed, why, fix)


def run_profile(settings: ProfileSettings, log: Log) -> Profile:
    make_folder("out", settings.out.parent)
    engine, vocabulary = bare_engine(settings, settings.model, settings.max_context_tokens)
    log(f"engine {settings.engine} of {counted(engine.slots, 'slot')} on {machine()}, model {settings.model}")
    warm_up(engine, vocabulary, settings.max_context_tokens)
    kv_tokens = engine.info().kv_tokens
    room = kv_tokens or engine.slots * settings.max_context_tokens

    def log_cell(cell: Cell) -> None:
        step, prefill = 1e3 * cell.step_seconds, 1e6 * cell.prefill_seconds_per_token
        sizes = f"{cell.running:4d} running, contexts of {cell.context:5d}"
        log(f"{sizes}: {step:8.3f} ms per step, prefill {prefill:6.2f} us per token")

    wanted = cells_for(engine.slots, settings.max_context_tokens, room, settings.steps)
    measured = partial(measure, steps=settings.steps, repeats=settings.repeats, on_cell=log_cell)
    counts, draft_tokens = drafts_to_measure(engine, settings.resolved_engine_options())
    drafter, draft_cells = getattr(engine, "drafter", None), list[Cell]()
    if counts is not None:
        log(f"with {counted(draft_tokens, 'drafted token')} per request and step")
        draft_cells = measured(engine, wanted, vocabulary, first_place=FIRST_PLACE_OF_DRAFTS, counts=counts)
    if isinstance(drafter, RepeatLast):
        log("without drafts")
        drafter.most_running = 0
    always_drafts = counts is not None and not isinstance(drafter, RepeatLast)
    cells = draft_cells if always_drafts else measured(engine, wanted, vocabulary)
    per_token = prefill_of(cells)
    per_return = _measured_return(engine, settings, vocabulary, room, per_token, log)
    found = Profile(
        engine=settings.engine,
        model=settings.model,
        slots=engine.slots,
        cells=tuple(cells),
        prefill_seconds_per_token=per_token,
        prefill_tokens_per_step=engine.info().prefill_tokens_per_step,
        kv_tokens=kv_tokens,
        weight_update_seconds=_measured_weight_update(engine, settings, log),
        machine=machine(),
        prefill_step_seconds=per_return,
        prefill_step_tokens=settings.observed,
        draft_tokens=draft_tokens,
        draft_cells=tuple(draft_cells),
    )
    found.write(settings.out)
    for cell in found.disturbed():
        sizes = f"{cell.running} running, contexts of {cell.context}"
        log(f"disturbed: {sizes} took longer than a larger measurement, whose step time is used instead")
    fitted = found.step_time()
    log(
        f"fit: {1e3 * fitted.at(1):.3f} ms with 1 running, {1e3 * fitted.at(engine.slots):.3f} ms with all, "
        f"{1e9 * fitted.per_cached_token:.3g} ns per cached token, worst error {found.fit_error():.1%}"
    )
    return found


def _measured_return(
    engine: Engine, settings: ProfileSettings, vocabulary: int, room: int, per_token: float, log: Log
) -> float:
    if not (observed := settings.observed):
        return 0.0
    longest = min(settings.max_context_tokens, room // engine.slots)  # all slots fit in memory
    context, steps = longest // _CONTEXTS_OF_A_RETURN, max(8, min(128, longest // 16))
    places = [(2 + repeat) * FIRST_PLACE_OF_RETURNS for repeat in range(settings.repeats)]
    found = median(
        prefill_step_seconds(engine, context, observed, vocabulary, per_token, steps=steps, first_place=place)
        for place in places
    )
    log(f"a return with {observed} tokens makes a decode step {1e3 * found:.3f} ms longer")
    return found


def _measured_weight_update(engine: EngineBase, settings: ProfileSettings, log: Log) -> float | None:
    """Seconds to load new weights, the second time: the first one allocates. None where there is nothing to load."""
    seconds = 0.0
    for version in (1, 2):
        if (weights := _weights_for(settings)) is None:
            return None
        began = engine.now()
        engine.update_weights(weights, version)
        seconds = engine.now() - began
    log(f"weights load in {seconds:.2f} s")
    return seconds


def _weights_for(settings: ProfileSettings) -> Any:
    """What a learner would hand over: on the engine's device in process, and to a server the weights that it serves.

    The embedded engine runs the learner's own module, and a server's folder must have been named: it keeps them.
    """
    if settings.engine == "vllm":
        return _zeros(model_named(settings.model))
    files = sorted(Path(settings.model).glob("*.safetensors"))
    if settings.engine == "embedded" or not files:
        return None
    from safetensors.torch import load_file

    return {name: weight for file in files for name, weight in load_file(file).items()}


def _zeros(model: str) -> Iterator[tuple[str, Any]]:
    """A weight of each of the model's shapes, under its Hugging Face name, made when it is asked for."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, shape in shapes.items():
        yield name, torch.zeros(shape.shape, dtype=shape.dtype, device=device)


def cells_for(slots: int, longest_context: int, cached_tokens_at_most: float, steps: int = 48) -> list[tuple[int, int]]:
    """(running, context) pairs to measure: few to all slots, short to long contexts, as far as they fit in memory."""
    levels = sorted({1, max(1, slots // 8), max(1, slots // 4), max(1, slots // 2), max(1, slots - 1)})
    contexts = [SHORT_CONTEXT, *(c for c in (longest_context // 4, longest_context // 2) if c > 2 * SHORT_CONTEXT)]
    return [
        (r, c)
        for c in contexts
        for r in levels
        if r < slots and (r + 1) * (c + 128) <= cached_tokens_at_most and c + _room_for(r, c, steps) <= longest_context
    ]


def _room_for(running: int, context: int, steps: int) -> int:
    """Upper bound on the tokens that a request of the cell may generate."""
    return 3 * _LEAD_TOKENS + max(128, steps) + running + (running + 1) * context // _SMALLEST_PREFILL_STEP


def measure(
    engine: Engine,
    cells: Sequence[tuple[int, int]],
    vocabulary: int,
    *,
    steps: int,
    repeats: int,
    on_cell: Callable[[Cell], None] = lambda cell: None,
    first_place: int = 0,
    counts: DraftCounts | None = None,  # of an engine that drafts meanwhile
) -> list[Cell]:
    found = []
    fresh = count(first_place + engine.slots)  # not used by the warm-up or another cell: no prefix cache hits
    for running, context in cells:
        runs = []
        for _ in range(repeats):
            # Made before timing starts.
            prompts = random_prompts(islice(fresh, running), context, vocabulary)
            clocks = random_prompts(islice(fresh, 2), SHORT_CONTEXT, vocabulary)
            runs.append(_measured(engine, prompts, clocks, context, steps, counts))
        step = median(run.step_seconds for run in runs)
        prefill = median(run.prefill_seconds_per_token for run in runs)
        found.append(Cell(running, context, runs[0].cached_tokens, step, prefill))
        on_cell(found[-1])
    return found


def _measured(
    engine: Engine,
    prompts: Sequence[Prompt],
    clocks: Sequence[Prompt],
    context: int,
    steps: int,
    counts: DraftCounts | None = None,
) -> Cell:
    """The step time with all but one of the prompts and one clock, between the ends of the two clocks.

    The last of the prompts has one token; the clocks follow at its end. A step is one token, unless drafts are counted.
    """
    running, prefill_tokens = len(prompts), len(prompts) * context
    gate, first, second = running - 1, running, running + 1
    # No other request may finish before the second clock: those prefilled first are ahead by at most this many steps.
    ahead = _LEAD_TOKENS + running + prefill_tokens // _SMALLEST_PREFILL_STEP
    longest = _LEAD_TOKENS + steps + ahead
    lengths = {gate: 1, first: _LEAD_TOKENS, second: _LEAD_TOKENS + steps}
    forced = ForcedLengths(engine, lambda request: lengths.get(request.id, longest))

    def submit(prompts: Sequence[Prompt], first_id: int) -> None:
        forced.submit([Request(id, prompt, (), longest, id) for id, prompt in enumerate(prompts, start=first_id)])

    ended: dict[int, float] = {}
    counted_steps: dict[int, int] = {}  # at the end of each request

    def wait_for(*ids: int) -> None:
        while not ended.keys() >= set(ids):
            for end in _ends_of_poll(forced):
                ended[end.id] = end.at
                counted_steps[end.id] = 0 if counts is None else sum(counts.steps.values())

    began = engine.now()
    submit(prompts, 0)
    wait_for(gate)
    submit(clocks, first)
    wait_for(first, second)
    forced.abort([id for id in range(running + 2) if id not in ended])
    passed = steps if counts is None else max(1, counted_steps[second] - counted_steps[first])
    step = (ended[second] - ended[first]) / passed
    prefill = max(0.0, (ended[first] - began - (1 + _LEAD_TOKENS) * step) / prefill_tokens)
    tokens = _LEAD_TOKENS + steps / 2
    return Cell(running, context, (running - 1) * (context + tokens) + SHORT_CONTEXT + tokens, step, prefill)


def drafts_to_measure(engine: Engine, options: Mapping[str, Any]) -> tuple[DraftCounts | None, int]:
    """What counts the steps of an engine with drafts, and how many tokens it drafts. It must draft in every step: a
    draft model does, and ours for measurements can be switched off as well."""
    if not (config := options.get("speculative_config")):
        return None, 0
    if config.get("method") in WITHOUT_WEIGHTS and not isinstance(getattr(engine, "drafter", None), RepeatLast):
        why = "a profile times steps with drafts, and this drafter does not draft in each of them"
        ours = f'"method": "custom_class", "model": "{RepeatLast.__module__}.{RepeatLast.__name__}"'
        raise ConfigurationError("engine_options", "speculative_config", why, f"Use a draft model, or {ours}.")
    return getattr(engine, "draft_counts", None), int(config["num_speculative_tokens"])


def prefill_of(cells: Sequence[Cell]) -> float:
    return median(cell.prefill_seconds_per_token for cell in heaviest(cells))


def prefill_step_seconds(
    engine: Engine,
    context: int,
    observed: int,
    vocabulary: int,
    prefill_seconds_per_token: float,
    *,
    steps: int = 64,
    first_place: int = FIRST_PLACE_OF_RETURNS,
) -> float:
    """How much longer a decode step of all slots takes if a request also returns with `observed` new tokens.

    What these tokens cost at the rate of a large prefill is not included.

    One slot is the clock: a request that decodes `steps` tokens. One slot is for the returns. The others decode all the
    time. In the first interval of the clock the second slot decodes, too; in the next, requests of two tokens follow
    each other there, behind a context that the prefix cache of the engine holds by then; in the last it decodes again,
    because contexts have grown. The time between the end of a request and the start of the next one does not count: the
    clock's steps go on without it.
    """
    others = engine.slots - 2
    *prompts, shared = random_prompts(range(first_place, first_place + others + 1), context, vocabulary)
    new = random_prompts(range(first_place - steps, first_place), observed, vocabulary)
    longest = 4 * steps + context * engine.slots // _SMALLEST_PREFILL_STEP
    lengths: dict[int, int] = {}
    forced = ForcedLengths(engine, lambda request: lengths.get(request.id, longest))
    ids, ends = count(), chain.from_iterable(_ends_of_poll(forced) for _ in count())

    def request(prompt: Prompt, length: int = longest) -> Request:
        id = next(ids)
        lengths[id] = length
        return Request(id, prompt, (), longest, id)

    def timed(beside: Iterator[Request]) -> tuple[float, int]:
        """The clock's seconds, and how many requests of `beside` started and ended meanwhile, one after another."""
        clock, other = request(shared, steps), next(beside)
        began, ended = engine.now(), 0
        forced.submit([clock, other])
        while (end := next(ends)).id != clock.id:
            if end.id == other.id:  # else it ended together with the last clock
                ended += 1
                other = next(beside)
                forced.submit([other])
        forced.abort([other.id])
        return end.at - began, ended

    background = [request(prompt) for prompt in prompts]
    lead = request(shared, _LEAD_TOKENS)
    forced.submit([*background, lead])
    next(ends)
    returning = (request(Prompt(prompt.id, [*shared.tokens, *prompt.tokens]), _TOKENS_AFTER_RETURN) for prompt in new)
    before, _ = timed(iter([request(shared)]))
    between, returns = timed(returning)
    after, _ = timed(iter([request(shared)]))
    forced.abort([one.id for one in background])
    if not returns:
        raise RuntimeError(f"no request of {_TOKENS_AFTER_RETURN} tokens ended within {steps} decode steps of another")
    return max(0.0, (between - (before + after) / 2) / returns - observed * prefill_seconds_per_token)


def _ends_of_poll(engine: Engine) -> Iterator[RequestFinished]:
    for change in engine.poll():
        if isinstance(change, RequestFailed):
            raise RuntimeError(f"the engine refused a request: {change.reason}")
        if isinstance(change, RequestFinished):
            yield change
