"""Which engine generates, and its options."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from sortedrl.core.configuration import ConfigurationError
from sortedrl.engines.registry import check_name, check_urls
from sortedrl.engines.servers.credentials import without_credentials
from sortedrl.settings.api_key import VARIABLE
from sortedrl.settings.base import OptionTexts, SettingsGroup, literal

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
_SEEN_BY_OTHERS = "settings are written to the run folder, and other users can see command lines"


class EngineSettings(SettingsGroup):
    """Which engine generates."""

    help_group: ClassVar[str] = "engine"

    engine: str = "embedded"
    """embedded and vllm run in this process; vllm-server and sglang are running servers; your.module:factory is your
    own"""
    engine_urls: tuple[str, ...] = ()
    """URLs of running servers; several form one pool"""
    engine_options: OptionTexts = {}  # noqa: RUF012 (pydantic copies it)
    """options of the engine, such as gpu_memory_utilization 0.5"""
    slots: Slots = 64

    def resolved_engine_options(self) -> dict[str, Any]:
        return {key: literal(value) for key, value in self.engine_options.items()}


def check_engine(settings: EngineSettings) -> None:
    options = settings.engine_options
    check_name(settings.engine)
    for url in settings.engine_urls:
        if without_credentials(url) != url:
            why = f"it has a user or a password: {_SEEN_BY_OTHERS}"
            fix = f'Set {VARIABLE}, for example to "Basic dXNlcjpwYXNzd29yZA==".'
            raise ConfigurationError("engine_urls", without_credentials(url), why, fix)
    check_urls(settings.engine, settings.engine_urls, settings.slots)
    if "api_key" in options:
        fix = f"Set the environment variable {VARIABLE}."
        raise ConfigurationError("engine_options", "api_key (hidden)", _SEEN_BY_OTHERS, fix)
    for key in sorted(_SWITCHES & options.keys()):
        if not isinstance(literal(options[key]), bool):
            fix = f"Use {key} True, or leave it out."
            raise ConfigurationError("engine_options", f"{key} {options[key]}", "it is either True or False", fix)
    if options and settings.engine == "embedded":
        fix = "Leave it out, or --engine vllm."
        raise ConfigurationError("engine_options", options, "the embedded engine has none", fix)
