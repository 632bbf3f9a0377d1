import signal

import pytest
import torch

# The tensors of the tests are tiny: more threads would only wait for each other. And the order of
# sums, so the last bit of a result, depends on their number.
torch.set_num_threads(1)
# What starts the tests may ignore it; a script then does not hear it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """-> a folder named out, with data/, sft.pt, rm.pt and ppo.pt, for reading only."""
    from cli import write_models  # here, because the tests of the mutants import nothing before

    return write_models(tmp_path_factory.mktemp("made") / "out")
