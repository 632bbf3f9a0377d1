import pytest


@pytest.fixture(autouse=True)
def as_written():
    """Not the one of the other tests: here nothing of the project may be imported before it is changed."""
