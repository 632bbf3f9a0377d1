"""What sample.py takes for a prompt. Run: python -m pytest tests/test_sample.py"""

import subprocess

import pytest
import torch

from cli import ONE_THREAD, ROOT, command, run
from minippo import GPT, GPTConfig
from plumbing import fast
from plumbing.checkpoints import save_checkpoint
from plumbing.tokenizer import Tokenizer
from sample import SampleConfig, draw_top_k
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


def test_the_likeliest_tokens_alone_are_drawn_if_asked_for():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]] * 500)
    for k, tokens in ((1, {1}), (2, {1, 3}), (99, {0, 1, 2, 3})):
        assert {*draw_top_k(logits, k).tolist()} == tokens


def test_the_flags_of_the_sampler_reach_it(policy, monkeypatch):
    asked, generate = [], fast.generate
    assert SampleConfig() == SampleConfig(1, 1.0, 0, 64, 0, whole=False)

    def watched(policy, *rest):
        asked[:] = *rest, torch.initial_seed(), fast.OPTIONS["installed"], policy.training
        return generate(policy, *rest)

    monkeypatch.setattr(fast, "generate", watched)
    flags = "--n 2 --temperature 0.5 --max_new_tokens 5 --seed 7".split()
    assert run("sample.py", policy, "a", *flags)[1].count("\n") == 3
    assert asked == [[[97]] * 2, 5, 0.5, None, 7, True, False]
    assert run("sample.py", policy, "a", "--top_k", 3)[0] == 0
    assert asked[3].keywords == {"top_k": 3}


def test_odd_bytes_and_control_characters_do_no_harm(policy):
    printed = run("sample.py", policy, "a\x1bb")[1]
    assert printed.startswith("a\\x1bb\n") and "\x1b" not in printed
    words, given = command("sample.py", policy), {"cwd": ROOT, "env": ONE_THREAD}
    done = subprocess.run(words, input=b"\xff\nb\n", capture_output=True, timeout=120, **given)
    assert (done.returncode, done.stderr) == (0, b"") and done.stdout.count(b"\n") == 4


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
