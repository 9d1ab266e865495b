"""Engines by name, as in `--engine` and `SortedGRPOTrainer(engine=...)`: the one place that builds them.

    embedded          vllm          vllm-server          sglang          your.module:factory

A factory takes an EngineSpec and returns an engine. Dependencies of an engine are imported only when it is used.
"""

from __future__ import annotations

import difflib
import importlib.util
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Engine, EngineBase, EngineSpec, missing_members, with_defaults
from sortedrl.core.errors import UserError
from sortedrl.core.import_path import fault_in_your_code, import_object
from sortedrl.settings.install_hint import install_hint

CONNECT_SECONDS = 5.0
VLLM_GPU_MEMORY_FRACTION = 0.45  # if learner and engine share a GPU: the learner needs the rest


class EngineKind(NamedTuple):
    make: Callable[[EngineSpec], Engine]
    is_server: bool = False


def make_engine(name: str, spec: EngineSpec) -> EngineBase:
    check_name(name)
    kind = ENGINES.get(name)
    return with_defaults(kind.make(spec) if kind is not None else _from_import_path(name, spec))


def check_name(name: str) -> None:
    if name in ENGINES or ":" in name:
        return
    near = difflib.get_close_matches(name, ENGINES, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise ConfigurationError(
        "engine", name, "no such engine", f"{hint}Use {', '.join(ENGINES)}, or your own as your.module:factory."
    )


def check_available(name: str, urls: Sequence[str]) -> None:
    """Refuse an engine that cannot start: vLLM is not installed, or no server listens. Imports nothing heavy."""
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigurationError(
            "engine", name, f"vLLM is not installed: {install_hint('vllm')}", "Or use the embedded engine."
        )
    for url in urls if name in SERVERS else ():
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            fix = "Start the server first (docs/engines.md has the command), or correct the address."
            raise ConfigurationError("engine_urls", url, "no server answers there", fix) from None
        except (OSError, ValueError):
            continue  # the engine itself explains it


def check_urls(name: str, urls: Sequence[str], slots: int) -> None:
    """Our servers need URLs; an engine of your own may use them."""
    if name in SERVERS and not urls:
        raise ConfigurationError(
            "engine_urls",
            (),
            f"engine {name} is a running server",
            "Set --engine-urls to its address, for example http://127.0.0.1:8000.",
        )
    if urls and name in ENGINES and name not in SERVERS:
        raise ConfigurationError(
            "engine_urls", urls, f"engine {name} has no server", f"Leave it out, or use --engine {SERVERS[0]}."
        )
    if slots < len(urls):
        raise ConfigurationError("slots", slots, f"there are {len(urls)} servers", f"Use --slots {len(urls)} or more.")


def factory_named(path: str) -> Callable[[EngineSpec], Engine]:
    """The factory of an engine of your own."""
    try:
        factory: Callable[[EngineSpec], Engine] = import_object(path)
    except ValueError as error:
        raise ConfigurationError("engine", path, str(error), "See docs/engine_authors.md.") from None
    if not callable(factory):
        raise ConfigurationError(
            "engine", path, "it is not a function", "Name a function that takes an EngineSpec and returns an engine."
        )
    return factory


def _from_import_path(path: str, spec: EngineSpec) -> Engine:
    factory = factory_named(path)
    try:
        engine: Engine = factory(spec)
    except UserError:
        raise
    except Exception as error:
        reason = f"the factory raised {fault_in_your_code(error)}"
        raise ConfigurationError("engine", path, reason, "See docs/engine_authors.md.") from error
    missing = missing_members(engine)
    if missing:
        raise ConfigurationError(
            "engine",
            path,
            f"it returned a {type(engine).__name__} without {', '.join(missing)}",
            "See docs/engine_authors.md.",
        )
    return engine


def _embedded(spec: EngineSpec) -> Engine:
    from sortedrl.engines.embedded.engine import EmbeddedEngine
    from sortedrl.engines.embedded.model import UnsupportedModel

    try:
        return EmbeddedEngine(
            spec.module,
            slots=spec.slots,
            eos_token_ids=spec.eos_token_ids,
            max_length=spec.max_length,
            tokenizer=spec.tokenizer,
        )
    except UnsupportedModel as error:
        raise ConfigurationError("model", spec.model, str(error), "Or use --engine vllm.") from None
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(
            "model", spec.model, str(error), "Lower max_response_tokens or max_prompt_tokens."
        ) from None


def _vllm(spec: EngineSpec) -> Engine:
    """vLLM in this process. The user's options win over what the spec implies."""
    from sortedrl.engines.vllm import VllmEngine

    implied = {
        "dtype": spec.dtype,
        "seed": spec.seed,
        "gpu_memory_utilization": VLLM_GPU_MEMORY_FRACTION if spec.beside_learner else None,
    }
    options = {key: value for key, value in implied.items() if value is not None} | dict(spec.options)
    try:
        return VllmEngine(
            spec.model,
            slots=spec.slots,
            eos_token_ids=spec.eos_token_ids,
            max_length=spec.max_length,
            tokenizer=spec.tokenizer,
            **options,
        )
    except ImportError as error:
        raise ConfigurationError("engine", "vllm", str(error), "Or use the embedded engine.") from None
    except TypeError as error:
        raise ConfigurationError(
            "engine_options", dict(spec.options), str(error), "vLLM's EngineArgs names them."
        ) from None
    except ConfigurationError:
        raise
    except (OSError, ValueError) as error:
        reason = f"vLLM cannot run it: {str(error).strip().splitlines()[0]}"
        raise ConfigurationError("model", spec.model, reason, "See --engine-options and the model's folder.") from None


def _vllm_server(spec: EngineSpec) -> Engine:
    from sortedrl.engines.servers.vllm import VllmServerEngine

    return _server_pool("vllm-server", VllmServerEngine, spec)


def _sglang(spec: EngineSpec) -> Engine:
    from sortedrl.engines.servers.sglang import SglangEngine

    return _server_pool("sglang", SglangEngine, spec)


def _server_pool(name: str, engine_class: Callable[..., Any], spec: EngineSpec) -> Engine:
    """A running server, or a pool of several: one engine for each URL; they share all slots evenly."""
    from sortedrl.engines.servers.base import ServerPool

    check_urls(name, spec.urls, spec.slots)
    count = len(spec.urls)
    engines = []
    with ExitStack() as opened:  # closes the others if one server does not answer
        for place, url in enumerate(spec.urls):
            try:
                engine = engine_class(
                    url,
                    slots=(spec.slots + place) // count,
                    eos_token_ids=spec.eos_token_ids,
                    tokenizer=spec.tokenizer,
                    vocabulary=spec.vocabulary,
                    **spec.options,
                )
            except TypeError as error:
                raise ConfigurationError(
                    "engine_options", dict(spec.options), str(error), "docs/engines.md names them."
                ) from None
            opened.callback(engine.close)
            engines.append(engine)
        opened.pop_all()
    return engines[0] if count == 1 else ServerPool(engines)


ENGINES = {
    "embedded": EngineKind(_embedded),
    "vllm": EngineKind(_vllm),
    "vllm-server": EngineKind(_vllm_server, is_server=True),
    "sglang": EngineKind(_sglang, is_server=True),
}
SERVERS = tuple(name for name, kind in ENGINES.items() if kind.is_server)
