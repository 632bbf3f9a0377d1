"""What sample.py takes for a prompt. Run: python -m pytest tests/test_sample.py"""

import subprocess

import pytest

from cli import ONE_THREAD, ROOT, command, run
from minippo import GPT, GPTConfig
from plumbing.checkpoints import save_checkpoint
from plumbing.tokenizer import Tokenizer
from tiny import stir


@pytest.fixture
def policy(tmp_path):
    model = stir(GPT(GPTConfig(257, 32, 2, heads=2, channels=16)), 0.2)
    save_checkpoint(tmp_path / "ppo.pt", "ppo", model, Tokenizer.train([], 257))
    return tmp_path / "ppo.pt"


def test_the_sampler_takes_all_of_the_standard_input_for_one_prompt_if_told_to(policy):
    for prompt in ("\n\nHuman: a\n\nAssistant:", "a\n", "a"):
        status, printed, error = run("sample.py", policy, "--whole", stdin=prompt + "\n")
        assert (status, error) == (0, "") and printed == run("sample.py", policy, prompt)[1]
    assert run("sample.py", policy, "--whole") == (0, "", "")
    assert run("sample.py", policy, stdin="a \n\nb")[1].splitlines()[::2] == ["a ", "b"]


def test_a_sampler_without_a_prompt_and_a_standard_input_ends(policy):
    words = ["sh", "-c", '"$@" <&-', "-", *command("sample.py", policy)]
    done = subprocess.run(
        words, cwd=ROOT, env=ONE_THREAD, capture_output=True, encoding="utf-8", timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
