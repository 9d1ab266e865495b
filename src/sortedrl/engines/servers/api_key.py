"""The API key of a server: sent with every request, and removed from all messages of the engine."""

from __future__ import annotations

import os

from sortedrl.core.configuration import ConfigurationError
from sortedrl.settings.api_key import VARIABLE


class ApiKey:
    """`given`, or the key from the environment; without either, no key is sent."""

    def __init__(self, given: str | None = None) -> None:
        self._value = (os.environ.get(VARIABLE, "") if given is None else given).strip()
        if not (self._value.isascii() and self._value.isprintable()):
            raise ConfigurationError(
                "api_key", "(hidden)", "it has characters that an HTTP header cannot hold", f"Correct {VARIABLE}."
            )

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._value}"} if self._value else {}

    def hidden_in(self, text: str) -> str:
        """The text without the key, in case a server has echoed it."""
        return text.replace(self._value, "(hidden)") if self._value else text

    def refused_by(self, url: str) -> ConfigurationError:
        reason = "the server does not accept this API key" if self._value else "the server requires an API key"
        return ConfigurationError("url", url, reason, f"Set the environment variable {VARIABLE} to the server's key.")
