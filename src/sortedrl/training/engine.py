"""The engine of a run, an evaluation or a measurement, from the settings. engines/registry.py builds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Engine, EngineBase, EngineSpec, ForwardingEngine
from sortedrl.core.rollout import Prompt
from sortedrl.engines.checked_weights import CheckedWeights, LogprobsOf
from sortedrl.engines.registry import ENGINES, make_engine
from sortedrl.engines.settings import EngineSettings
from sortedrl.models import model_named
from sortedrl.settings.install_hint import install_hint
from sortedrl.training.settings import ModelSettings, TrainSettings

if TYPE_CHECKING:
    from sortedrl.training.resources import Resources

COMMON_VOCABULARY = 46  # ids that any model has, the built-in one too: a server may crash on others
PROBES = 4  # at least: prompts whose continuations show after each weight update whether engine and learner agree
PROBE_TOKENS = 16
PROBE_CONTEXT = 1024  # tokens: of a longer prompt the start


def engine_of(
    settings: ModelSettings, resources: Resources, module: Any, *, seed: int | None = None, beside_learner: bool = False
) -> EngineBase:
    """The engine that the settings ask for. `module` is what the embedded one decodes with."""
    spec = EngineSpec(
        model=model_named(settings.model, settings.task),
        slots=settings.slots,
        max_length=settings.longest_context(),
        eos_token_ids=resources.eos_token_ids,
        module=module,
        tokenizer=resources.tokenizer,
        vocabulary=int(module.config.get_text_config().vocab_size),
        urls=settings.engine_urls,
        dtype=str(module.dtype).removeprefix("torch."),
        seed=seed,
        beside_learner=beside_learner,
        options=settings.resolved_engine_options(),
    )
    return make_engine(settings.engine, spec)


def require_own_device(engine: EngineBase, settings: TrainSettings) -> None:
    """Refuse an engine of the user's that would compute at the same time as the learner, on its device. Those that are
    built in are checked with the settings."""
    if settings.engine in ENGINES or engine.has_own_device:
        return
    name = type(engine.inner if type(engine) is ForwardingEngine else engine).__name__
    for key in ("overlap", "stream"):
        if getattr(settings, key):
            raise ConfigurationError(
                key,
                True,
                f"engine {settings.engine} may share the device with the learner: its class {name} does not set "
                "has_own_device",
                "Set has_own_device = True in the class if it generates elsewhere (docs/engine_authors.md), or leave "
                f"{key} out.",
            )


def checked_engine(
    engine: Engine, settings: ModelSettings, prompts: Sequence[Prompt], logprobs_of: LogprobsOf
) -> CheckedWeights:
    """`engine` with the check of its weights. There is a probe for each server of a pool, which shares them evenly."""
    count = max(PROBES, len(settings.engine_urls))
    probes = [list(prompts[i % len(prompts)].tokens[:PROBE_CONTEXT]) for i in range(count)]
    tokens = min(PROBE_TOKENS, settings.max_response_tokens)
    return CheckedWeights(engine, logprobs_of, probes, tokens_per_probe=tokens)


def bare_engine(settings: EngineSettings, model: str, max_length: int) -> tuple[EngineBase, int]:
    """An engine for measurements, with the size of its vocabulary: no task, no tokenizer, no end tokens."""
    spec = EngineSpec(
        model=model_named(model),
        slots=settings.slots,
        max_length=max_length,
        module=_read_module(model) if settings.engine == "embedded" else None,
        urls=settings.engine_urls,
        options=settings.resolved_engine_options(),
    )
    engine = make_engine(settings.engine, spec)
    return engine, engine.info().vocabulary or COMMON_VOCABULARY


def _read_module(name: str) -> Any:
    try:
        from sortedrl.training.resources import read_module
    except ImportError as error:
        reason = f"{error.name} is not installed"
        raise ConfigurationError("engine", "embedded", reason, f"{install_hint('train')}.") from None
    return read_module(name, model_named(name), ModelSettings())
