"""What watches PPO besides its log: plumbing/watch.py."""

import math
from types import SimpleNamespace

import pytest
import torch

import minippo
import train_ppo
from minippo import PPOConfig
from plumbing import watch
from plumbing.errors import UserError
from plumbing.tokenizer import Tokenizer
from tiny import tiny_gpt


def test_a_minibatch_of_a_single_response_is_the_smallest():
    watch.check_settings(PPOConfig(minibatches=8), train_ppo.StageConfig(batch_size=8))
    with pytest.raises(UserError, match="--minibatches 9: more than --batch_size 8"):
        watch.check_settings(PPOConfig(minibatches=9), train_ppo.StageConfig(batch_size=8))


def test_prompts_without_room_and_another_length_of_answers_are_warned_of(capsys):
    models = SimpleNamespace(policy=tiny_gpt(), facts={"rm": {"max_new_tokens": 5}})
    prompts = [[1] * n for n in range(8, 15)]  # the context is 16
    watch.warn_about(prompts, models, PPOConfig(max_new_tokens=6))
    room, length = capsys.readouterr().out.splitlines()
    assert "warning: 4 of 7 prompts leave less than 6 tokens of the context of 16" in room
    assert (
        "answers of up to 5 tokens, and PPO writes up to 6; run train_rm.py with --max_new_tokens 6"
        in length
    )
    watch.warn_about(prompts[:3], models, PPOConfig(max_new_tokens=5))
    watch.warn_about(
        prompts[:3],
        SimpleNamespace(policy=tiny_gpt(), facts={"sft": {}}),
        PPOConfig(max_new_tokens=6),
    )
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "accuracy, pairs, loss, warned",
    [
        (0.59, 100, 0.693, ["than chance"]),
        (0.61, 100, 0.693, []),
        (0.61, 100, 0.694, ["guessing"]),
        (1.0, 4, 0.5, ["than chance"]),  # luck once in 16 times
        (1.0, 5, 0.5, []),
    ],
)
def test_a_reward_model_no_better_than_chance_is_warned_of(capsys, accuracy, pairs, loss, warned):
    facts = {"rm": {"val_accuracy": accuracy, "val_pairs": pairs, "val_loss": loss}}
    watch.warn_about(
        [[1]], SimpleNamespace(policy=tiny_gpt(), facts=facts), PPOConfig(max_new_tokens=8)
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(warned) and all(map(str.__contains__, lines, warned))


def checked(
    off=0.0, place="sampler", dtype="float32", score=None, kl_coef=0.1, prompts=32, **flags
):
    """check_start() with a sampler or a reference whose log-probabilities are off by so much."""
    policy, stage = tiny_gpt(), train_ppo.StageConfig(batch_size=16, **flags)
    ref, evaluate, sizes = minippo.frozen_copy(policy), watch.evaluate_actions, []
    score = score or (lambda tokens, mask: torch.linspace(-2, 2, len(mask)))
    config = PPOConfig(6, 0.7, missing_eos_penalty=0.0, kl_coef=kl_coef)

    def shifted(logprobs):
        logprobs[-1, logprobs[-1] != 0] += off  # of one response alone
        return logprobs

    def sampler(policy, prompts, *rest):
        sizes.append(len(prompts))
        tokens, mask, logprobs, values = minippo.generate(policy, prompts, *rest)
        return tokens, mask, shifted(logprobs) if place == "sampler" else logprobs, values

    def scorer(model, *args, **kwargs):
        assert not torch.is_grad_enabled()
        logprobs, *rest = evaluate(model, *args, **kwargs)
        return shifted(logprobs) if place == "reference" and model is ref else logprobs, *rest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "generate", sampler)
        patch.setattr(watch, "evaluate_actions", scorer)
        prompts = ([[1], [2, 3]] * 16)[:prompts]
        watch.check_start(policy, ref, score, prompts, config, stage, dtype)
    return sizes


def test_a_start_that_is_right_is_said_to_be(capsys):
    assert checked() == [16] and checked(rollout_batch=4) == [4]
    sure = "checked: before the first update the ratio is 1 and the KL to the reference is 0\n"
    assert capsys.readouterr().out == sure * 2
    checked(0.1, "reference", policy="last.pt"), checked(0.1, "reference", reference="last.pt")
    assert capsys.readouterr().out == "checked: before the first update the ratio is 1\n" * 2


@pytest.mark.parametrize("off", [0.002, -0.002, math.nan, 1.0])
def test_a_single_response_whose_sampler_or_reference_is_off_is_refused(off):
    with pytest.raises(
        UserError, match=r"before the first update a ratio is .* sampling and scoring"
    ):
        checked(off)
    with pytest.raises(UserError, match=r"a token is .* nats away from the reference, not 0"):
        checked(off, "reference")
    checked(0.0005), checked(0.0005, "reference")


def test_in_bfloat16_the_mean_of_the_ratio_counts(capsys):
    checked(0.1, dtype="bfloat16")
    with pytest.raises(UserError, match="a ratio is"):
        checked(2.0, dtype="bfloat16")
    with pytest.raises(UserError, match="nats away"):
        checked(0.1, "reference", dtype="bfloat16")


@pytest.mark.parametrize(
    "scale, warned", [(0.01, True), (0.02, False), (15.0, False), (20.0, True)]
)
def test_scores_of_another_scale_than_beta_are_noticed(capsys, scale, warned):
    def score(tokens, mask):
        return scale * torch.linspace(-2, 2, len(mask))  # spread 1.23

    checked(score=score)
    assert ("standard deviation of the first scores is" in capsys.readouterr().out) == warned
    checked(score=score, kl_coef=0.0), checked(score=score, prompts=1)  # nothing to compare
    assert "standard deviation" not in capsys.readouterr().out


def rollout_with_kl(kl):
    """Responses of one token each, with these KLs."""
    kl = torch.tensor(kl)
    tokens = torch.tensor([[65, 66 + i % 9] for i in range(len(kl))])
    zero = torch.zeros(len(kl), 1)
    return {
        "tokens": tokens,
        "mask": zero == 0,
        "old_logprobs": zero + kl[:, None],
        "ref_logprobs": zero,
        "scores": kl,
    }


BYTES = Tokenizer.train([], 257)


@pytest.mark.parametrize(
    "kl, says",
    [
        ([-0.1] * 16, "warning: KL -0.100 ± 0.000 is below 0: sampling and scoring disagree\n"),
        (
            [-0.1, -0.01] * 8,
            "warning: KL -0.055 ± 0.011 is below 0: sampling and scoring disagree\n",
        ),
        ([-0.1, 0.05] * 8, ""),  # the error of the mean is 0.019
        ([-0.1] * 15, ""),
        ([-9e-5] * 16, ""),
        ([1.0] * 16 + [29.9], ""),
        ([1.0] * 16 + [30.1], "warning: 1 of 17 responses went astray. KL 30: 'I'\n"),
        ([2.0] * 16 + [39.9], ""),
    ],
)
def test_a_kl_below_0_and_responses_that_go_astray_are_warned_of(capsys, kl, says):
    watch.check_kl(rollout_with_kl(kl), BYTES)
    assert capsys.readouterr().out == says


def test_the_watch_logs_an_iteration_shows_responses_and_writes_the_page(
    tmp_path, monkeypatch, capsys
):
    written, ended, clock = [], [], iter([0.0, 59.0, 61.0, 61.0, 100.0, 122.0, 122.0])
    made, recorded, recorder = [], [], SimpleNamespace(record=lambda *x: recorded.append(x))
    run_config = SimpleNamespace(out=tmp_path, data="zoo")
    it = SimpleNamespace(run=run_config, settings={"lr": 1}, values={}, step=3, log=1)
    it.end_step = lambda metrics, tokens, show: ended.append((metrics, tokens, show))
    monkeypatch.setattr(watch, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(watch, "write_page", lambda *paths: written.append(paths))
    monkeypatch.setattr(watch, "Recorder", lambda *x: made.append(x) or recorder)
    monkeypatch.setattr(watch, "truth_about", lambda data: (None, f"judge of the {data}", {}))
    models, stage = SimpleNamespace(tokenizer=BYTES, policy="pi"), SimpleNamespace(steps=9)
    stage.models, stage.rollout_batch = "m", 0
    watching = watch.Watch(it, models, "ref", "config", stage)
    facts = {"lr": 1}, BYTES, "judge of the zoo", "pi", "ref", "config", 3, 9
    assert made == [(tmp_path / "ppo_traces.jsonl", *facts)]
    batch = rollout_with_kl([0.5, 1.0, 2.0, 3.0])
    for step, passes in ((0, [{"loss": 1.0}]), (39, [{"loss": 1.0}] * 2), (40, [{}, {}])):
        it.step = step
        watching.end_step(batch, {"kl": 2.0, "passes": passes}, 0.25)
        assert it.values == {"kl_coef": 0.25} and len(written) == (step > 0)
        shown = ["    'AB'  score 0.50  KL 0.50", "    'AD'  score 2.00  KL 2.00"] * (
            step % 40 == 0
        )
        assert capsys.readouterr().out.splitlines() == shown
    assert written == [(tmp_path, "m")]
    assert [x[0].keys() for x in ended] == [{"kl"}, {"kl", "passes"}, {"kl", "passes"}]
    assert ended[0][1:] == (8, ["score", "kl", "entropy", "eos_rate"])
    assert recorded[0] == ("pi", "ref", batch, {"kl": 2.0}, "config") and len(recorded) == 3

    def fail(*paths):
        raise UserError("the disk is full")

    monkeypatch.setattr(watch, "write_page", fail)
    watching.end_step(rollout_with_kl([1.0] * 16 + [99.0]), {"passes": [{}]}, 0.25)
    said = capsys.readouterr().out
    assert "1 of 17 responses went astray" in said and "warning: the disk is full\n" in said
