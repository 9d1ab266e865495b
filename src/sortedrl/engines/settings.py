"""Which engine generates, and its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field

from sortedrl.core.configuration import ConfigurationError
from sortedrl.engines.registry import check_name, check_urls
from sortedrl.engines.servers.credentials import without_credentials
from sortedrl.settings.base import OptionTexts, literal

Slots = Annotated[
    int,
    Field(
        ge=1,
        le=1_000_000,
        description="requests that the engine decodes at once (vLLM max_num_seqs, SGLang max_running_requests)",
    ),
]
# Options of our engines that are switches: any other text would count as true.
_SWITCHES = {"reuse_kv_cache", "enable_sleep_mode", "seeded", "weights_readable_by_all", "cuda_ipc"}
_OLD_OPTIONS = {"keep_old_keys": "reuse_kv_cache", "rests": "enable_sleep_mode"}


class EngineSettings(BaseModel):
    """Which engine generates."""

    engine: Annotated[
        str,
        Field(
            description="embedded and vllm run in this process; vllm-server and sglang are running servers; "
            "your.module:factory is your own"
        ),
    ] = "embedded"
    engine_urls: Annotated[tuple[str, ...], Field(description="URLs of running servers; several form one pool")] = ()
    engine_options: Annotated[
        OptionTexts, Field(description="options of the engine, such as gpu_memory_utilization 0.5")
    ] = {}
    slots: Slots = 64

    def resolved_engine_options(self) -> dict[str, Any]:
        return {key: literal(value) for key, value in self.engine_options.items()}


def check_engine(settings: EngineSettings) -> None:
    options = settings.engine_options
    check_name(settings.engine)
    for url in settings.engine_urls:
        if without_credentials(url) != url:
            raise ConfigurationError(
                "engine_urls",
                without_credentials(url),
                "it has a user or a password: settings are written to the run folder, and other users can see command "
                "lines",
                'Set the environment variable SORTEDRL_API_KEY, for example to "Basic dXNlcjpwYXNzd29yZA==".',
            )
    _refuse_old_options(options)
    check_urls(settings.engine, settings.engine_urls, settings.slots)
    if "api_key" in options:
        raise ConfigurationError(
            "engine_options",
            "api_key (hidden)",
            "settings are written to the run folder, and other users can see command lines",
            "Set the environment variable SORTEDRL_API_KEY.",
        )
    for key in sorted(_SWITCHES & options.keys()):
        if not isinstance(literal(options[key]), bool):
            raise ConfigurationError(
                "engine_options",
                f"{key} {options[key]}",
                "it is either True or False",
                f"Use {key} True, or leave it out.",
            )
    if options and settings.engine == "embedded":
        raise ConfigurationError(
            "engine_options", options, "the embedded engine has none", "Leave it out, or --engine vllm."
        )


def _refuse_old_options(options: Mapping[str, str]) -> None:
    for key in options:
        if key in _OLD_OPTIONS:
            fix = f"Use {_OLD_OPTIONS[key]} {options[key]}."
            raise ConfigurationError("engine_options", f"{key} {options[key]}", "this option was renamed", fix)
