"""From settings to an engine: which one a run, a benchmark or a profile uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from sortedrl.core.engine import Engine
from sortedrl.core.install_hint import install_hint
from sortedrl.core.schedule import ConfigurationError
from sortedrl.models import model_named, unreadable_model

COMMON_VOCABULARY = 46  # ids that any model knows, the built-in one too: a server breaks down at one that it does not


class EngineSettings(Protocol):
    @property
    def engine(self) -> str: ...

    @property
    def engine_urls(self) -> tuple[str, ...]: ...

    @property
    def slots(self) -> int: ...

    def resolved_engine_options(self) -> dict[str, Any]: ...


def vllm_engine(
    settings: EngineSettings,
    model: str,
    *,
    eos_token_ids: Iterable[int],
    max_length: int,
    tokenizer: Any = None,
    **defaults: Any,
) -> Any:
    """vLLM in this process. `defaults` are options that the user's own win over."""
    from sortedrl.engines.vllm import VllmEngine

    try:
        return VllmEngine(
            model,
            slots=settings.slots,
            eos_token_ids=eos_token_ids,
            max_length=max_length,
            tokenizer=tokenizer,
            **(defaults | settings.resolved_engine_options()),
        )
    except ImportError as error:
        raise ConfigurationError("engine", "vllm", str(error), "Or leave --engine out: embedded.") from None
    except TypeError as error:
        raise ConfigurationError(
            "engine_options", dict(settings.resolved_engine_options()), str(error), "vLLM's EngineArgs names them."
        ) from None
    except ConfigurationError:
        raise
    except (OSError, ValueError) as error:
        reason = f"vLLM cannot run it: {str(error).strip().splitlines()[0]}"
        raise ConfigurationError("model", model, reason, "See --engine-options and the model's folder.") from None


def server_engine(
    settings: EngineSettings,
    *,
    eos_token_ids: Iterable[int],
    tokenizer: Any = None,
    vocabulary: int | None = None,
) -> Engine:
    """A running server, or a pool of several: one engine for each of `engine_urls`; they share all slots evenly."""
    if not settings.engine_urls:
        raise ConfigurationError(
            "engine_urls", (), f"--engine {settings.engine} needs a server", "--engine-urls http://127.0.0.1:8000"
        )
    from sortedrl.engines.servers.base import ServerPool

    count = len(settings.engine_urls)
    if settings.slots < count:
        raise ConfigurationError("slots", settings.slots, f"there are {count} servers", f"--slots {count} or more.")
    options: Mapping[str, Any] = settings.resolved_engine_options()
    try:
        engines = [
            _server(settings.engine)(
                url,
                slots=(settings.slots + place) // count,
                eos_token_ids=eos_token_ids,
                tokenizer=tokenizer,
                vocabulary=vocabulary,
                **options,
            )
            for place, url in enumerate(settings.engine_urls)
        ]
    except TypeError as error:
        raise ConfigurationError("engine_options", dict(options), str(error), "docs/engines.md names them.") from None
    return engines[0] if count == 1 else ServerPool(engines)


def _server(engine: str) -> Any:
    if engine == "sglang":
        from sortedrl.engines.servers.sglang import SglangEngine

        return SglangEngine
    from sortedrl.engines.servers.vllm import VllmServerEngine

    return VllmServerEngine


def bare_engine(settings: Any, max_length: int) -> tuple[Engine, int]:
    """An engine for measurements, with the size of its vocabulary: no task, no tokenizer, no end tokens."""
    model = model_named(settings.model)
    if settings.engine == "vllm":
        engine = vllm_engine(settings, model, eos_token_ids=(), max_length=max_length)
        return engine, engine.vocabulary
    if settings.engine != "embedded":
        return server_engine(settings, eos_token_ids=()), COMMON_VOCABULARY
    return _bare_embedded(settings, model, max_length)


def _bare_embedded(settings: Any, model: str, max_length: int) -> tuple[Engine, int]:
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        reason = f"{error.name} is not installed"
        raise ConfigurationError("engine", "embedded", reason, f"{install_hint('train')}.") from None

    from sortedrl.engines.embedded.engine import EmbeddedEngine

    on_gpu = torch.cuda.is_available()
    try:
        module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16 if on_gpu else torch.float32)
    except (OSError, ValueError) as error:
        raise unreadable_model(settings.model, error) from None
    module = module.to("cuda" if on_gpu else "cpu").eval()  # type: ignore[arg-type]
    try:
        engine = EmbeddedEngine(module, slots=settings.slots, eos_token_ids=(), max_length=max_length)
    except ValueError as error:
        raise ConfigurationError("model", model, str(error), "Lower the token limits.") from None
    return engine, int(module.config.get_text_config().vocab_size)
