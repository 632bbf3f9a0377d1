import pytest
import torch

# The tensors of the tests are tiny: more threads would only wait for each other. And the order of
# sums, so the last bit of a result, depends on their number.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def as_written(monkeypatch):
    """Every test begins with the same random numbers, and computes the networks as minippo.py has
    it. A mistake in fast.py shows in the numbers: no test falls back on the plain code."""
    from plumbing import fast

    monkeypatch.setattr(fast, "same_numbers", lambda: True)
    torch.manual_seed(0)
    fast.uninstall()
    yield
    fast.uninstall()
