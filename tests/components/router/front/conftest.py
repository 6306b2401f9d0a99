"""The model that the routers of these tests present."""

from pathlib import Path

import pytest

from tests.support.served_router import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a model in which each word is a token."""
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory
