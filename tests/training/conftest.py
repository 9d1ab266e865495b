from pathlib import Path

import pytest

import toy


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy model, which no test changes."""
    return toy.make_model(tmp_path_factory.mktemp("model") / "toy")
