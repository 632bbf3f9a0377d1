import pytest
import torch

# The tensors are tiny: more threads would wait for each other. The order of sums, so the last
# bit of a result, depends on their number.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_random_numbers():
    torch.manual_seed(0)
