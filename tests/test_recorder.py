"""The specification of plumbing/recorder.py. Run: python -m pytest tests/test_recorder.py"""

import copy
import json

import pytest
import torch

import minippo
from minippo import PPOConfig, evaluate_actions, frozen_copy, gae, kl_adjusted_rewards
from plumbing.recorder import Recorder, recorded, rounded, spaced
from plumbing.rows import pad_completions
from plumbing.tokenizer import Tokenizer, texts_of
from tiny import EOS, inf, nan, tiny_gpt

TOKENIZER = Tokenizer([b"\xe2", b" b", *(bytes([c]) for c in b"cdefghij")])
CONFIG = PPOConfig(
    max_new_tokens=6, gamma=0.9, lam=0.7, temperature=0.8, clip_eps=0.15, epochs=2, minibatches=2
)
SETTINGS = {"algorithm": "PPO", "kl_horizon": inf}
BETA, STEPS = 0.3, 6
PROMPTS = [[1], [2, 3], [4], [5, 6, 7], [8], [1, 2], [3], [4]]


def judge(prompt, text):
    if "j" in prompt:
        raise ValueError("no such prompt")
    return float(len(text))


def train(
    path, steps=STEPS, config=CONFIG, settings=SETTINGS, resume_at=None, prompts=PROMPTS, **more
):
    """A run of tiny models whose reference moves -> for each iteration policy and reference before
    it, the policy after it, and the batch."""
    torch.manual_seed(0)
    policy = tiny_gpt()
    ref, optimizer = frozen_copy(tiny_gpt()), torch.optim.SGD(policy.parameters(), 0.1)

    def recorder(step):
        return Recorder(path, settings, TOKENIZER, judge, policy, ref, config, step, steps)

    def score(tokens, mask):
        return ((tokens[:, 1:] % 3) * mask).sum(1).double()

    seen, records = [], recorder(0)
    for step in range(steps):
        if step == resume_at:
            records = recorder(step)
        before = copy.deepcopy(policy), copy.deepcopy(ref)
        batch, metrics = minippo.ppo_iteration(
            policy, ref, score, prompts, optimizer, config, BETA, **more
        )
        if step == 1:
            ref.load_state_dict(policy.state_dict())
        random = torch.get_rng_state()
        records.record(policy, ref, batch, metrics, config)
        assert torch.equal(torch.get_rng_state(), random)  # recording changes no run
        assert not any(x.requires_grad for row in records.before for x in row.values())
        seen.append((*before, copy.deepcopy(policy), batch))
    return seen


def read(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_a_few_iterations_and_responses_are_chosen_and_numbers_are_those_of_json():
    steps = [step for step in range(1, 731) if recorded(step, 730)]
    assert steps == [1, 2, 5, 10, 20, 50, 100, 200, 500, 730]
    assert spaced(128, 6) == [0, 25, 50, 76, 101, 127] and spaced(2, 6) == [0, 1]
    assert spaced(7, 6) == [0, 1, 2, 3, 4, 6] and spaced(9, 1) == [0] and spaced(0, 6) == []
    x = {"a": [1, 0.1 + 0.2, inf], "b": (nan, {"c": -123456.789}), "d": "x", "e": True, "f": None}
    assert rounded(x) == x | {"a": [1, 0.1 + 0.2, None], "b": [None, {"c": -123456.789}]}
    assert rounded(x, 3)["a"][1] == 0.3 and rounded(x, 3)["b"][1]["c"] == -123000


@torch.no_grad()
def expected(tokens, mask, scores, policy, ref, after, mean, std):
    """The numbers of responses, (B, T-1) each, from minippo's functions."""
    (old, values), (ref_logprobs, _), (new, _) = (
        evaluate_actions(model, tokens, mask, CONFIG.temperature)[:2]
        for model in (policy, ref, after)
    )
    rewards = kl_adjusted_rewards(scores, old, ref_logprobs, mask, BETA)
    advantages, returns = gae(rewards, values, mask, CONFIG.gamma, CONFIG.lam)
    numbers = {"log_pi": new, "log_old": old, "log_ref": ref_logprobs, "kl": old - ref_logprobs}
    numbers |= {"reward": rewards, "value": values, "return": returns, "advantage": advantages}
    return numbers | {"whitened": (advantages - mean) / std, "ratio": (new - old).exp()}


def test_every_number_is_what_the_functions_of_minippo_give(tmp_path):
    seen, ratios = train(tmp_path / "x"), []
    lines = read(tmp_path / "x")
    assert [line["step"] for line in lines] == [1, 2, 5, 6]
    about = ("prompt_ids", "ids", "score", "ended")
    first = [[x[name] for name in about] for x in lines[0]["sampled"]]
    for line in lines:
        policy, ref, after, batch = seen[line["step"] - 1]
        inside = batch["advantages"][batch["mask"]]
        mean, std = inside.mean().item(), inside.std(correction=0).item()
        assert (line["mean"], line["std"]) == pytest.approx((mean, std), abs=1e-12)
        assert line["kl_coef"] == BETA and line["settings"] == SETTINGS | {"kl_horizon": None}
        assert [[x[name] for name in about] for x in line["tracked"]] == first
        scores = batch["scores"].sort().values.tolist()
        assert [x["score"] for x in line["sampled"]] == [scores[i] for i in (0, 1, 2, 4, 5, 7)]
        texts = [*zip(*texts_of(TOKENIZER, batch["tokens"], batch["mask"]))]
        assert line["judge"] == pytest.approx(sum(judge(*pair) for pair in texts) / 8)
        for x in line["tracked"] + line["sampled"]:
            tokens, mask = pad_completions([(x["prompt_ids"], x["ids"])])
            score = torch.tensor([x["score"]], dtype=torch.float64)
            for name, y in expected(tokens, mask, score, policy, ref, after, mean, std).items():
                assert x[name] == pytest.approx(y[mask].tolist(), abs=1e-9), name
            text = TOKENIZER.decode(x["ids"])
            assert x["prompt"] == TOKENIZER.decode(x["prompt_ids"])
            assert x["tokens"] == [TOKENIZER.spell(i) for i in x["ids"]]
            assert x["ended"] == (x["ids"][-1] == EOS) and x["judge"] == judge(x["prompt"], text)
            assert x in line["tracked"] or (x["prompt"], text) in texts
            ratios += x["ratio"]
    assert max(ratios) > 1.01 and min(ratios) < 0.99


def test_a_run_that_goes_on_leaves_the_same_file(tmp_path):
    train(tmp_path / "whole")
    for step in (1, 3, 4):  # the next iteration is to be recorded, or the one after it
        (tmp_path / "cut").write_text("earlier\n")
        train(tmp_path / "cut", resume_at=step)
        assert (tmp_path / "cut").read_text() == (tmp_path / "whole").read_text()


def test_what_is_beyond_the_step_of_a_resumed_run_goes_and_nothing_before_its_first_line(tmp_path):
    path, policy = tmp_path / "x", tiny_gpt()
    train(path)
    whole = read(path)
    for step, kept in ((0, 0), (1, 1), (3, 2), (4, 2), (5, 3)):
        it = Recorder(path, {}, TOKENIZER, judge, policy, policy, CONFIG, step, STEPS)
        assert it.lines == whole[:kept] and read(path) == whole
        assert it.tracked == (whole[kept - 1]["tracked"] if kept else [])
        assert len(it.before) == 6 * (step in (1, 4, 5))  # the next is to be recorded
    path.write_text('{"step": 1}\n{"step": 2, "trac')  # damaged: new responses are tracked
    assert Recorder(path, {}, TOKENIZER, judge, policy, policy, CONFIG, 2, STEPS).tracked == []


def test_another_algorithm_has_what_it_credits_and_tracks_nothing(tmp_path):
    def compute_advantages(batch, config, kl_coef):
        advantages = batch["scores"][:, None] * batch["mask"]
        return {"advantages": advantages, "whitened": 2 * advantages}

    def loss_of(policy, batch, config):
        loss = policy.value_head.weight.sum()
        return loss, {"loss": loss.item()}

    def line_of(settings, compute_advantages):
        config = PPOConfig(max_new_tokens=400)
        train(
            tmp_path / "x",
            1,
            config,
            settings,
            compute_advantages=compute_advantages,
            loss_of=loss_of,
        )
        return read(tmp_path / "x")[0]

    for settings, tracked in (({"algorithm": "RLOO"}, 0), ({"algorithm": ""}, 2), ({}, 2)):
        line = line_of(settings, compute_advantages)
        assert len(line["tracked"]) == tracked and len(line["sampled"]) == 2  # of up to 400 tokens
        for x in line["sampled"]:
            assert "reward" not in x and "return" not in x and len(x["value"]) == len(x["ids"])
            assert set(x["advantage"]) == {x["score"]} and set(x["whitened"]) == {2 * x["score"]}
    line = line_of({}, lambda *_: {})
    assert line["sampled"] == line["tracked"] == [] and (line["mean"], line["std"]) == (0, 1)
    assert line["settings"] == {} and line["judge"] > 0


def test_what_is_not_whitened_is_left_as_it_is_and_unknown_prompts_have_no_grade(tmp_path):
    def compute_advantages(batch, config, kl_coef):
        zeros = torch.zeros_like(batch["old_values"])
        return {"rewards": zeros, "advantages": zeros, "whitened": zeros, "returns": zeros}

    train(tmp_path / "x", 1, compute_advantages=compute_advantages, prompts=[[9], [1]])
    (line,) = read(tmp_path / "x")
    assert (line["mean"], line["std"], line["judge"]) == (0, 1e-4, None)
    grades = {x["prompt"]: x["judge"] for x in line["sampled"]}
    assert grades["j"] is None and grades[" b"] >= 0
    train(tmp_path / "y", 2, PPOConfig(max_new_tokens=3000, whiten=False))
    for line in read(tmp_path / "y"):
        assert (line["mean"], line["std"]) == (0, 1) and len(line["sampled"]) == 1
        for x in line["tracked"] + line["sampled"]:
            assert x["whitened"] == x["advantage"]


def test_a_damaged_file_begins_anew(tmp_path, capsys):
    train(tmp_path / "x", 1)
    path = tmp_path / "x"
    line = read(path)[0]
    path.write_text(json.dumps(line | {"tracked": [{"ids": [1]}]}) + "\n")
    recorder = Recorder(path, {}, None, None, None, None, PPOConfig(), 3, 9)
    assert recorder.lines == recorder.tracked == [] and "begins anew" in capsys.readouterr().out
