"""Settings that have no flag, given to a command in a file."""

import json
from pathlib import Path


def config_file(folder: Path, **settings: float | str | bool) -> list[str]:
    """Writes `settings` to a TOML file in `folder`; returns the flag that names it."""
    path = folder / f"{'-'.join(settings)}.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    return ["--config", str(path)]
