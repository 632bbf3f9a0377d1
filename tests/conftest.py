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
