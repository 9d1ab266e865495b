"""Engines by name, as in `--engine` and `SortedGRPOTrainer(engine=...)`: the one place that builds them.

    embedded          vllm          vllm-server          sglang          your.module:factory

A factory takes an EngineSpec and returns an engine. Dependencies of an engine are imported only when it is used.
"""

import difflib
import importlib.util
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Engine, EngineBase, EngineSpec, missing_members, with_defaults
from sortedrl.core.errors import UserError
from sortedrl.core.import_path import fault_in_your_code, import_object
from sortedrl.engines.pool_members import even_split
from sortedrl.settings.install_hint import install_hint

CONNECT_SECONDS = 5.0
_HOW_TO = "See docs/engine_authors.md."
VLLM_GPU_MEMORY_FRACTION = 0.45  # if learner and engine share a GPU: the learner needs the rest


def make_engine(name: str, spec: EngineSpec) -> EngineBase:
    check_name(name)
    make = ENGINES.get(name)
    return with_defaults(make(spec) if make is not None else _from_import_path(name, spec))


def check_name(name: str) -> None:
    if name in ENGINES or ":" in name:
        return
    near = difflib.get_close_matches(name, ENGINES, n=1)
    fix = f"Use {', '.join(ENGINES)}, or your own as your.module:factory."
    raise ConfigurationError("engine", name, "no such engine", f"Did you mean {near[0]}? {fix}" if near else fix)


def check_available(name: str, urls: Sequence[str]) -> None:
    """Refuse an engine that cannot start: vLLM is not installed, or no server listens. Imports nothing heavy."""
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        why = f"vLLM is not installed: {install_hint('vllm')}"
        raise ConfigurationError("engine", name, why, "Or use the embedded engine.")
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
        fix = "Set --engine-urls to its address, for example http://127.0.0.1:8000."
        raise ConfigurationError("engine_urls", (), f"engine {name} is a running server", fix)
    if urls and name in ENGINES and name not in SERVERS:
        fix = f"Leave it out, or use --engine {SERVERS[0]}."
        raise ConfigurationError("engine_urls", urls, f"engine {name} has no server", fix)
    if slots < len(urls):
        raise ConfigurationError("slots", slots, f"there are {len(urls)} servers", f"Use --slots {len(urls)} or more.")


def factory_named(path: str) -> Callable[[EngineSpec], Engine]:
    """The factory of an engine of your own."""
    try:
        factory: Callable[[EngineSpec], Engine] = import_object(path)
    except ValueError as error:
        raise ConfigurationError("engine", path, str(error), _HOW_TO) from None
    if not callable(factory):
        fix = "Name a function that takes an EngineSpec and returns an engine."
        raise ConfigurationError("engine", path, "it is not a function", fix)
    return factory


def _from_import_path(path: str, spec: EngineSpec) -> Engine:
    factory = factory_named(path)
    try:
        engine: Engine = factory(spec)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"the factory raised {fault_in_your_code(error)}"
        raise ConfigurationError("engine", path, reason, _HOW_TO) from error
    missing = missing_members(engine)
    if missing:
        reason = f"it returned a {type(engine).__name__} without {', '.join(missing)}"
        raise ConfigurationError("engine", path, reason, _HOW_TO)
    return engine


def _common(spec: EngineSpec) -> dict[str, Any]:
    return {"slots": spec.slots, "eos_token_ids": spec.eos_token_ids, "tokenizer": spec.tokenizer}


def _embedded(spec: EngineSpec) -> Engine:
    from sortedrl.engines.embedded.engine import EmbeddedEngine
    from sortedrl.engines.embedded.model import UnsupportedModel

    try:
        return EmbeddedEngine(spec.module, **_common(spec), max_length=spec.max_length)
    except UnsupportedModel as error:
        raise ConfigurationError("model", spec.model, str(error), "Or use --engine vllm.") from None
    except ConfigurationError:
        raise
    except ValueError as error:
        fix = "Lower max_response_tokens or max_prompt_tokens."
        raise ConfigurationError("model", spec.model, str(error), fix) from None


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
        return VllmEngine(spec.model, **_common(spec), max_length=spec.max_length, **options)
    except ImportError as error:
        raise ConfigurationError("engine", "vllm", str(error), "Or use the embedded engine.") from None
    except TypeError as error:
        fix = "vLLM's EngineArgs names them."
        raise ConfigurationError("engine_options", dict(spec.options), str(error), fix) from None
    except ConfigurationError:
        raise
    except (OSError, ValueError) as error:
        reason = f"vLLM cannot run it: {str(error).strip().splitlines()[0]}"
        raise ConfigurationError("model", spec.model, reason, "See --engine-options and the model's folder.") from None


def _server(name: str, spec: EngineSpec) -> Engine:
    """A running server, or a pool of several: one engine for each URL; they share all slots evenly."""
    from sortedrl.engines.servers.base import ServerPool
    from sortedrl.engines.servers.sglang import SglangEngine
    from sortedrl.engines.servers.vllm import VllmServerEngine

    engine_class = SglangEngine if name == "sglang" else VllmServerEngine
    check_urls(name, spec.urls, spec.slots)
    count = len(spec.urls)
    engines = []
    with ExitStack() as opened:  # closes the others if one server does not answer
        for url, slots in zip(spec.urls, even_split(spec.slots, count), strict=True):
            try:
                given = _common(spec) | {"slots": slots, "vocabulary": spec.vocabulary}
                engine = engine_class(url, **given, **spec.options)
            except TypeError as error:
                fix = "docs/engines.md names them."
                raise ConfigurationError("engine_options", dict(spec.options), str(error), fix) from None
            opened.callback(engine.close)
            engines.append(engine)
        opened.pop_all()
    return engines[0] if count == 1 else ServerPool(engines)


SERVERS = ("vllm-server", "sglang")
ENGINES: dict[str, Callable[[EngineSpec], Engine]] = {
    "embedded": _embedded,
    "vllm": _vllm,
    **{name: partial(_server, name) for name in SERVERS},
}
