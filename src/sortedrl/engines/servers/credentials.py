"""What a server asks of its clients: an API key. No message of ours shows it."""

import json
import os
import re
from urllib.parse import quote

from sortedrl.core.configuration import ConfigurationError
from sortedrl.settings.api_key import VARIABLE

HIDDEN = "(hidden)"
_USER_INFO = re.compile(r"(?<=://)[^/?#]*@")
_LONGEST_REASON = 500


def without_credentials(url: str) -> str:
    return _USER_INFO.sub("", url)


class Credentials:
    """`api_key`, or the one from the environment; without any, none is sent.

    A key with a scheme of its own, such as "Basic dXNl...", is sent as it is.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = without_credentials(url).rstrip("/")
        if without_credentials(url) != url:
            fix = f'Set {VARIABLE}, for example to "Basic dXNlcjpwYXNzd29yZA==".'
            raise ConfigurationError("url", self.url, "it has a user or a password", fix)
        key = (os.environ.get(VARIABLE, "") if api_key is None else api_key).strip()
        if not (key.isascii() and key.isprintable()):
            why = "it has characters that an HTTP header cannot hold"
            raise ConfigurationError("api_key", HIDDEN, why, f"Correct {VARIABLE}.")
        scheme = "" if " " in key else "Bearer "
        self.headers = {"Authorization": f"{scheme}{key}"} if key else {}
        secrets = {key, key.rpartition(" ")[2]} - {""}
        shown = {form for text in secrets for form in (text, repr(text)[1:-1], json.dumps(text)[1:-1], quote(text, ""))}
        self._secrets = sorted(shown, key=len, reverse=True)

    def clean(self, text: str) -> str:
        """The text without what a server may have echoed, and then cut: half a key is a secret, too."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text[:_LONGEST_REASON]

    def refused(self) -> ConfigurationError:
        reason = "the server does not accept this API key" if self.headers else "the server requires an API key"
        fix = f"Set the environment variable {VARIABLE} to the server's key."
        return ConfigurationError("url", self.url, reason, fix)
