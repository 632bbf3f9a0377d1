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
    assert run("sample.py", policy) == (0, "", "")


def test_a_prompt_that_is_empty_or_too_long_is_named_and_the_others_are_answered(policy):
    for words, stdin in (([], "a \n\nb\n" + 32 * "x" + "\n" + 31 * "y"), (["a ", "", "b"], "")):
        status, printed, error = run("sample.py", policy, *words, stdin=stdin)
        bad = ["'' has 0 tokens, not 1 to 31", f"'{32 * 'x'}' has 32 tokens"][: 1 + bool(stdin)]
        assert status == 2 and error.count("\n") == len(bad) and all(x in error for x in bad)
        assert printed.splitlines()[::2] == ["a ", "b", 31 * "y"][: 2 + bool(stdin)]
    assert run("sample.py", policy, "--whole")[0] == 2


def test_the_folder_of_a_run_is_no_checkpoint_but_its_ppo_pt_is(policy):
    status, printed, error = run("sample.py", policy.parent, "a")
    assert (status, printed) == (2, "") and f"give its {policy}\n" in error


def test_a_sampler_without_a_prompt_and_a_standard_input_ends(policy):
    words = ["sh", "-c", '"$@" <&-', "-", *command("sample.py", policy)]
    done = subprocess.run(
        words, cwd=ROOT, env=ONE_THREAD, capture_output=True, encoding="utf-8", timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
