"""The three scripts and the sampler, as a user meets them. Run: python -m pytest tests/test_scripts.py

One chain of small runs is made through the command line; everything after it looks at what the chain wrote. Further runs happen
inside this process, by executing the same file with the same arguments, because that saves importing torch each time.
"""

import io
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import minippo
import sample
import train_ppo
import train_rm
import train_sft
from cli import ONE_THREAD, ROOT, command, metrics, run, same_weights, shell
from data import zoo
from minippo import PPOConfig
from plumbing import fast, report, settings, tracing, training, watch
from plumbing.checkpoints import load_checkpoint, save_checkpoint
from plumbing.settings import UserError
from plumbing.text import Tokenizer, load_jsonl
from tiny import assert_equal, tiny_gpt

CPU = ["--device", "cpu"]  # where the same seed gives the same bits
SMALL = [*CPU, "--layers", "1", "--heads", "2", "--channels", "16", "--context", "32", "--batch_size", "16", "--dropout", "0.1"]
PPO = [*CPU, "--steps", "2", "--batch_size", "8", "--minibatches", "2", "--max_new_tokens", "8"]
SFT, RM = [*SMALL, "--warmup", "0", "--epochs", "1"], [*CPU, "--epochs", "1", "--batch_size", "16"]
FLAGS = {"train_sft.py": SFT, "train_rm.py": RM, "train_ppo.py": PPO}
ALL_METRICS = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}
QUESTION = "What does a bee eat?"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The default data, cut down to 100 rows a file and 4 validation prompts."""
    folder = tmp_path_factory.mktemp("data") / "zoo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "ROWS", dict.fromkeys(zoo.ROWS, 100))
        patch.setattr(zoo, "FACTS", zoo.FACTS[:20])
        patch.setattr(zoo, "HELD_OUT", 10)
        zoo.write_data(folder, seed=0)
    prompts = folder / "prompts_val.jsonl"
    prompts.write_bytes(b"".join(prompts.read_bytes().splitlines(True)[:4]))
    return folder


@pytest.fixture(scope="module")
def chain(data, tmp_path_factory):
    """-> the folder that the three scripts wrote, one after the other; what they printed is in SCRIPT.txt."""
    out = tmp_path_factory.mktemp("out")
    for script, flags in FLAGS.items():
        done = shell(script, "--data", data, "--out", out, *flags)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        (out / f"{script}.txt").write_text(done.stdout, encoding="utf-8")
    return out


@pytest.fixture
def copy(chain, tmp_path):
    """A copy of that folder, to be spoilt."""
    return shutil.copytree(chain, tmp_path / "copy")


# What is inside the scripts


def small_gpt():
    torch.manual_seed(0)
    return minippo.GPT(minippo.GPTConfig(300, 32, 1, heads=2, channels=16)).eval()


def test_the_validation_of_sft_counts_the_completion_with_its_end_token_and_nothing_else():
    model, rows = small_gpt(), [([1, 2], [3, 4, 299]), ([5], [299]), ([6, 7, 8], [1, 2])]
    nats = []
    with torch.no_grad():
        for prompt, completion in rows:
            logprobs = model(torch.tensor([prompt + completion]))[0][0].log_softmax(-1)
            nats.append(-sum(logprobs[len(prompt) - 1 + i, token].item() for i, token in enumerate(completion)))
    facts = train_sft.validate(model, rows, "cpu", 0)
    assert facts["val_loss"] == pytest.approx(sum(nats) / 6, rel=1e-5) and facts["val_tokens"] == 6
    # The error of a ratio of two sums, by the delta method: of nats - loss x tokens, over rows.
    rest = torch.tensor([x - facts["val_loss"] * n for x, n in zip(nats, (3, 1, 2), strict=True)])
    assert facts["val_loss_se"] == pytest.approx(rest.std().item() * 3**0.5 / 6, rel=1e-4)
    assert train_sft.validate(model, rows[:1], "cpu", 0)["val_loss_se"] == 0.0
    assert train_sft.validate(model, rows, "cpu", 2) == pytest.approx(facts, rel=1e-5)  # in pieces: the same
    assert model.training  # as the loop needs it


def test_the_validation_of_the_reward_model_is_over_all_pairs():
    model, draw = minippo.RewardModel(small_gpt()).eval(), random.Random(0)
    rows = [tuple([draw.randrange(300) for _ in range(draw.randint(1, 10))] for _ in range(3)) for _ in range(150)]
    with torch.no_grad():
        margins = []
        for prompt, *answers in rows:
            chosen, rejected = (model(torch.tensor([prompt + x]), torch.tensor([len(prompt + x)])) for x in answers)
            margins.append((chosen - rejected).item())
    facts, right = train_rm.validate(model, rows, "cpu", 64), sum((margin > 0) + (margin == 0) / 2 for margin in margins) / 150
    assert facts["val_accuracy"] == pytest.approx(right) and 0 < right < 1
    assert facts["val_accuracy_se"] == pytest.approx((right * (1 - right) / 150) ** 0.5)
    assert facts["val_loss"] == pytest.approx(sum(math.log1p(math.exp(-margin)) for margin in margins) / 150, rel=1e-4)
    assert model.training


@pytest.mark.parametrize("count, expected", [(5, {0, 1, 2, 3, 4}), (4096, set(range(0, 4096, 2)))])
def test_the_scale_of_the_scores_is_set_on_answers_to_prompts_spread_over_all(monkeypatch, count, expected):
    asked, answers = [], []

    def watched(policy, rows, max_new_tokens):
        asked.extend(row[0] for row in rows)
        assert policy == "sft" and max_new_tokens == 7 and len(rows) <= 20
        answers.append(torch.randint(300, (len(rows), 9)))
        return answers[-1], torch.tensor([[False] * 4 + [True] * 3 + [False]] * len(rows))

    monkeypatch.setattr(train_rm, "generate", watched)
    model = minippo.RewardModel(minippo.GPTConfig(300, 32, 1, heads=2, channels=16, dropout=0.5)).eval()
    train_rm.normalise(model, "sft", [[i] for i in range(count)], train_rm.AnswerConfig(max_new_tokens=7), 5)
    assert len(asked) == 2048 and set(asked) == expected
    scores = torch.cat([model(tokens, torch.full((len(tokens),), 8)) for tokens in answers])  # read at the last token
    assert abs(scores.mean()) < 1e-5 and scores.std().item() == pytest.approx(1, abs=1e-5)


def test_ppo_trains_on_what_the_definitions_say(chain, data, tmp_path, monkeypatch):
    update, batches = minippo.ppo_update, []

    def watched(policy, optimizer, batch, *rest):
        batches.append(batch | {"values now": minippo.evaluate_actions(policy, batch["tokens"], batch["mask"])[1].detach()})
        return update(policy, optimizer, batch, *rest)

    monkeypatch.setattr(minippo, "ppo_update", watched)
    flags = ["--temperature", "0.7", "--gamma", "0.9", "--lam", "0.8", "--kl_coef", "0.3", "--lr", "0.01"]
    flags += ["--missing_eos_penalty", "0.5", "--length_penalty", "0.1"]
    assert run("train_ppo.py", "--data", data, "--out", tmp_path, *PPO, "--models", chain, *flags)[0] == 0
    sft, tokenizer, _ = load_checkpoint(chain / "sft.pt", ("sft",))
    scorer, _, _ = load_checkpoint(chain / "rm.pt", ("rm",))
    config = PPOConfig(missing_eos_penalty=0.5, length_penalty=0.1)

    def score(tokens, mask):
        return scorer(tokens, minippo.row_lengths(mask))

    for batch, logged in zip(batches, metrics(tmp_path / "ppo.jsonl"), strict=True):
        tokens, mask = batch["tokens"], batch["mask"]
        with torch.no_grad():
            ref_logprobs, _, _ = minippo.evaluate_actions(sft, tokens, mask, 0.7)
        scores, ended = minippo.score_responses(score, tokens, mask, config, tokenizer.eos)
        rewards = minippo.kl_adjusted_rewards(scores, batch["logprobs"], ref_logprobs, mask, 0.3)
        advantages, returns = minippo.gae(rewards, batch["values"], mask, 0.9, 0.8)
        expected = {"ref_logprobs": ref_logprobs, "returns": returns, "advantages": minippo.whiten(advantages, mask)}
        for name, tensor in (expected | {"values": batch["values now"]}).items():
            torch.testing.assert_close(batch[name], tensor, rtol=1e-4, atol=1e-4)
        k1, k3 = minippo.kl_per_response(batch["logprobs"], ref_logprobs, mask)
        figures = {"score": scores, "kl": k1, "kl_k3": k3, "response_length": mask.sum(1).float(), "eos_rate": ended.float()}
        assert {name: logged[name] for name in figures} == pytest.approx({n: x.mean().item() for n, x in figures.items()}, abs=1e-4)
    assert_equal(batches[0]["logprobs"], batches[0]["ref_logprobs"], 1e-4)  # the first policy is the reference
    assert (batches[1]["logprobs"] - batches[1]["ref_logprobs"]).abs().max() > 1e-3  # the second is not


# The three scripts in order


def test_each_script_leaves_its_checkpoint_its_metrics_and_the_state_to_resume_from(chain):
    names = {path.name for path in chain.iterdir() if path.suffix != ".txt" and path.name != ".lock"}
    made = {f"{kind}{end}" for kind in ("sft", "rm", "ppo") for end in (".pt", ".jsonl", "_state.pt")}
    assert names == made | {"report.json", "report.html", "ppo_traces.jsonl"}


@pytest.mark.parametrize("kind, steps, names", [
    ("sft", 7, set()),
    ("rm", 7, {"accuracy"}),
    ("ppo", 2, {"score", "kl", "kl_coef", "rlhf_reward", "entropy", "policy_loss", "value_loss", "approx_kl", "clip_frac",
                "ratio_max", "explained_variance", "response_length", "eos_rate"}),
])  # fmt: skip
def test_each_step_is_one_line_of_metrics_and_all_of_them_are_finite(chain, kind, steps, names):
    rows = [json.loads(line) for line in (chain / f"{kind}.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row.keys() >= ALL_METRICS | names and all(math.isfinite(x) for x in row.values())


def test_the_validation_figures_stand_in_the_log_at_the_last_step(chain):
    assert metrics(chain / "sft.jsonl")[-1].keys() >= {"val_loss"}
    assert metrics(chain / "rm.jsonl")[-1].keys() >= {"val_loss", "val_accuracy"}


def test_training_lowers_the_loss(chain):
    losses = [row["loss"] for row in metrics(chain / "sft.jsonl")]
    assert losses[-1] < losses[0] - 0.05


def test_ppo_starts_at_the_reference_and_its_reward_is_score_minus_beta_kl(chain):
    first, second = metrics(chain / "ppo.jsonl")
    assert abs(first["kl"]) < 1e-3 and abs(second["kl"]) > 1e-6
    for row in (first, second):
        assert row["rlhf_reward"] == pytest.approx(row["score"] - row["kl_coef"] * row["kl"], abs=1e-6)
        assert 0 <= row["eos_rate"] <= 1 <= row["response_length"] <= 8 and row["kl_coef"] == 0.1


def test_ppo_says_that_ratio_and_kl_were_checked_and_shows_samples(chain):
    printed = (chain / "train_ppo.py.txt").read_text(encoding="utf-8")
    assert "ratio is 1" in printed and "KL to the reference is 0" in printed
    assert "optimality" in printed and "best of 16" in printed


def test_the_report_holds_every_figure_and_its_standard_error(chain):
    report = json.loads((chain / "report.json").read_text(), parse_constant=pytest.fail)
    assert report.keys() >= {"sft", "rm", "ppo", "best_of_n", "best_judge", "beta", "seed", "seconds", "samples"}
    assert report["sft"].keys() >= {"val_loss", "entropy_floor", "judge", "score", "eos_rate", "response_length"}
    assert report["rm"].keys() >= {"val_accuracy", "label_ceiling", "val_loss", "label_loss_floor"}
    assert report["ppo"].keys() >= {"judge", "score", "kl", "eos_rate", "response_length", "win_rate_vs_sft", "optimality"}
    assert report["best_of_n"].keys() == {"4", "16", "64"} and report["seconds"].keys() == {"sft", "rm", "ppo", "report"}
    for row in report["best_of_n"].values():
        assert row.keys() >= {"judge", "score", "kl"}
    for name in ("judge", "score", "kl", "eos_rate", "response_length", "win_rate_vs_sft", "optimality"):
        assert f"{name}_se" in report["ppo"]
    assert report["sft"]["kl"] == 0 and report["beta"] == 0.1 and report["seed"] == 0
    assert len(report["samples"]) == 4 and all(sample.keys() >= {"prompt", "sft", "ppo"} for sample in report["samples"])


def test_the_scores_of_the_reward_model_have_mean_0_and_standard_deviation_1_on_answers_of_the_sft_model(chain, data):
    policy, tokenizer, _ = load_checkpoint(chain / "sft.pt", ("sft",))
    scorer, _, _ = load_checkpoint(chain / "rm.pt", ("rm",))
    torch.manual_seed(1)
    prompts = [tokenizer.encode(prompt) for (prompt,) in load_jsonl(data / "prompts_train.jsonl", ["prompt"])] * 8
    tokens, mask, *_ = minippo.generate(policy, prompts, 48)
    scores = scorer(tokens, minippo.row_lengths(mask))
    assert abs(scores.mean()) < 0.2 and 0.8 < scores.std() < 1.2


def test_the_same_seed_gives_the_same_metrics_and_weights_and_own_data_a_report_without_a_judge(chain, data, tmp_path):
    own, again = tmp_path / "own", tmp_path / "again"
    shutil.copytree(data, own)
    (own / "ceilings.json").unlink()  # what only the default data has
    for script, flags in FLAGS.items():
        assert run(script, "--data", own, "--out", again, *flags)[0] == 0
    for kind in ("sft", "rm", "ppo"):
        assert metrics(again / f"{kind}.jsonl") == metrics(chain / f"{kind}.jsonl")
        assert same_weights(again / f"{kind}.pt", chain / f"{kind}.pt")
    report = json.loads((again / "report.json").read_text(), parse_constant=pytest.fail)
    assert "judge" not in report["sft"] | report["ppo"] | report["best_of_n"]["4"] and "best_judge" not in report
    assert report["ppo"].keys() >= {"score", "kl", "eos_rate", "response_length", "optimality"}


def test_the_seed_decides_the_initial_weights(chain, data, tmp_path):
    for seed in (1, 2):
        assert run("train_sft.py", "--data", data, "--out", tmp_path / str(seed), *SFT, "--lr", 0, "--seed", seed)[0] == 0
    assert not same_weights(tmp_path / "1" / "sft.pt", tmp_path / "2" / "sft.pt")


def test_one_response_per_iteration_is_enough(chain, data, tmp_path):
    flags = [*CPU, "--steps", "2", "--batch_size", "1", "--minibatches", "1", "--max_new_tokens", "4", "--models", chain]
    assert run("train_ppo.py", "--data", data, "--out", tmp_path, *flags)[0] == 0
    metrics(tmp_path / "ppo.jsonl")


def test_fewer_prompts_than_responses_per_iteration_are_enough(chain, data, tmp_path):
    own = shutil.copytree(data, tmp_path / "own")
    (own / "prompts_train.jsonl").write_text(json.dumps({"prompt": QUESTION}) + "\n")
    assert run("train_ppo.py", "--data", own, "--out", tmp_path / "out", *PPO, "--models", chain)[0] == 0


@pytest.mark.parametrize("flags", [
    ["--separate_critic"], ["--kl_coef", "0"], ["--clip_eps", "inf", "--value_clip", "inf", "--max_grad_norm", "inf"],
    ["--kl_horizon", "100", "--kl_target", "1"], ["--ref_update_every", "1"], ["--temperature", "0.7"], ["--micro_batch", "3"],
    ["--dtype", "bfloat16"], ["--grad_checkpoint"], ["--rollout_batch", "3"], ["--report_prompts", "2"],
], ids=" ".join)  # fmt: skip
def test_every_option_of_ppo_runs(chain, data, tmp_path, flags):
    assert run("train_ppo.py", "--data", data, "--out", tmp_path, *PPO, "--models", chain, *flags)[0] == 0
    first, second = metrics(tmp_path / "ppo.jsonl")
    if flags[0] == "--ref_update_every":
        assert abs(second["kl"]) < 1e-3
    elif flags[0] == "--kl_horizon":
        assert second["kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 8 / 100))
    elif flags[0] in ("--micro_batch", "--grad_checkpoint"):
        expected = metrics(chain / "ppo.jsonl")[0]
        assert first == pytest.approx(expected, rel=1e-3, abs=1e-5)
    elif flags[0] == "--separate_critic":
        assert load_checkpoint(tmp_path / "ppo.pt", ("ppo",))[0].critic is not None


REWARDS = """
seen = []
def score(prompts, responses):
    seen.append(list(zip(prompts, responses)))
    return [float("bee" in response) for response in responses]
few = lambda prompts, responses: [1.0]
odd = lambda prompts, responses: [float("nan") for _ in prompts]
words = lambda prompts, responses: ["good" for _ in prompts]
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("rewards", None)


def test_any_function_of_prompts_and_responses_serves_as_reward(chain, data, tmp_path, rewards):
    shutil.copy(chain / "sft.pt", tmp_path)  # and no rm.pt
    assert run("train_ppo.py", "--data", data, "--out", tmp_path, *PPO, "--reward", "rewards:score")[0] == 0
    seen = sys.modules["rewards"].seen
    assert {prompt for batch in seen for prompt, _ in batch} <= set(zoo.PROMPTS) and len(seen[0]) == 8
    expected = sum(float("bee" in response) for _, response in seen[0]) / 8
    first = metrics(tmp_path / "ppo.jsonl")[0]
    assert first["score"] == pytest.approx(expected - (1 - first["eos_rate"]))  # less the penalty for not ending
    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert report["rm"] == {} and "judge" in report["ppo"]


@pytest.mark.parametrize("reward, says", [
    ("rewards", "module:function"), ("rewards:none", "module:function"), ("nothing:score", "nothing"), (":", "module:function"),
    ("rewards:few", "8 finite numbers"), ("rewards:odd", "8 finite numbers"), ("rewards:words", "8 finite numbers"),
])  # fmt: skip
def test_a_reward_that_is_no_function_or_gives_no_numbers_is_refused(chain, data, tmp_path, rewards, reward, says):
    flags = ["--data", data, "--out", tmp_path, "--models", chain, *PPO]
    assert_refused("train_ppo.py", *flags, "--reward", reward, says=["--reward", says])


def test_a_small_micro_batch_takes_the_same_steps_in_sft_and_reward_model_training(chain, data, tmp_path):
    for name, more in (("whole", []), ("pieces", ["--micro_batch", "3"])):
        assert run("train_sft.py", "--data", data, "--out", tmp_path / name, *SFT, "--dropout", "0", *more)[0] == 0
        assert run("train_rm.py", "--data", data, "--out", tmp_path / name, *RM, *more)[0] == 0
    for kind in ("sft", "rm"):
        whole, pieces = (metrics(tmp_path / name / f"{kind}.jsonl") for name in ("whole", "pieces"))
        for one, other in zip(whole, pieces, strict=True):
            assert one == pytest.approx(other, rel=2e-3, abs=1e-3)


def rows_at_once(monkeypatch):
    """-> a list that gets the number of rows of every tensor of tokens that a trunk reads."""
    rows, forward = [], fast.forward

    def watched(trunk, tokens, *args, **more):
        rows.append(len(tokens))
        return forward(trunk, tokens, *args, **more)

    monkeypatch.setattr(fast, "forward", watched)
    return rows


@pytest.mark.parametrize("script, most, flags", [
    ("train_sft.py", 2, [*SFT, "--micro_batch", "2"]), ("train_rm.py", 8, [*RM, "--micro_batch", "2"]),
    ("train_ppo.py", 4, [*PPO, "--micro_batch", "2", "--rollout_batch", "4"]),
])  # fmt: skip
def test_no_more_rows_are_in_memory_than_the_flags_allow_also_in_validation_and_report(
    copy, data, tmp_path, monkeypatch, script, most, flags
):
    own = shutil.copytree(data, tmp_path / "own")
    (own / "ceilings.json").unlink()  # with a judge, the report looks at the validation rows of stages 1 and 2 too
    rows = rows_at_once(monkeypatch)
    assert run(script, "--data", own, "--out", copy, *flags)[0] == 0
    assert max(rows) == most


def test_the_report_is_as_large_as_it_is_asked_to_be(chain, data, tmp_path):
    own = shutil.copytree(data, tmp_path / "own")
    prompts = [json.dumps({"prompt": prompt}) for prompt in list(zoo.PROMPTS)[:200]]
    (own / "prompts_val.jsonl").write_text("\n".join(prompts))
    asked = []

    def watched(model, ref, score, prompts, n, *rest, **more):
        asked.append((len(prompts), n))
        return respond(model, ref, score, prompts, n, *rest, **more)

    respond = report.respond
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "respond", watched)
        patch.setattr(report, "MANY", 64)
        for judge, flags, size in ((True, [], 200), (True, ["--report_prompts", "32"], 32), (False, [], 128)):
            if not judge:
                (own / "ceilings.json").unlink()
            asked.clear()
            assert run("train_ppo.py", "--data", own, "--out", tmp_path, *PPO, "--models", chain, *flags)[0] == 0
            few = {200: 128, 32: 4, 128: 16}[size]
            assert asked == [(size, 4), (few, 64), (size, 4), (few, 16)]


def test_a_reference_that_moves_does_not_move_what_the_report_compares_with(chain, data, tmp_path):
    flags = ["--data", data, *PPO, "--models", chain, "--lr", "0.01"]
    for name, more in (("still", []), ("moves", ["--ref_update_every", "1"])):
        assert run("train_ppo.py", "--out", tmp_path / name, *flags, *more)[0] == 0
    still, moves = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("still", "moves"))
    assert moves["sft"] == still["sft"] and abs(moves["ppo"]["kl"]) > 1e-3  # it is 0 to a reference that has moved along


def test_a_second_round_starts_from_a_ppo_checkpoint_and_keeps_the_sft_model_as_reference(chain, data, tmp_path):
    flags = ["--data", data, *PPO, "--models", chain, "--no_report", "--lr", "0"]
    policy = ["--policy", chain / "ppo.pt"]
    for name, more in (("again", policy), ("apart", [*policy, "--reference", chain / "ppo.pt"])):
        status, printed, _ = run("train_ppo.py", "--out", tmp_path / name, *flags, *more)
        assert status == 0 and "the ratio is 1" in printed and "KL to the reference is 0" not in printed
        assert same_weights(tmp_path / name / "ppo.pt", chain / "ppo.pt")
        kl = metrics(tmp_path / name / "ppo.jsonl")[0]["kl_k3"]
        assert (kl > 1e-6) == (name == "again")
    status, printed, _ = run("train_ppo.py", "--out", tmp_path / "from_sft", *flags, "--policy", chain / "sft.pt")
    assert status == 0 and metrics(tmp_path / "from_sft" / "ppo.jsonl")[0]["kl_k3"] == pytest.approx(0, abs=1e-9)


def test_the_separate_critic_has_a_learning_rate_of_its_own(chain, data, tmp_path):
    flags = ["--data", data, *PPO, "--models", chain, "--no_report", "--separate_critic"]
    for name, more in (("start", ["--lr", "0"]), ("critic", ["--lr", "0", "--critic_lr", "0.01"])):
        assert run("train_ppo.py", "--out", tmp_path / name, *flags, *more)[0] == 0
    start, moved = (torch.load(tmp_path / name / "ppo.pt")["model"] for name in ("start", "critic"))
    changed = {name for name, weight in start.items() if not torch.equal(weight, moved[name])}
    assert changed and all(name.startswith(("critic.", "value_head.")) for name in changed)


def test_scores_are_normalised_on_answers_of_the_length_that_was_asked_for_and_ppo_says_when_it_differs(copy, data, tmp_path):
    assert run("train_rm.py", "--data", data, "--out", copy, *RM, "--max_new_tokens", "5")[0] == 0
    scorer, tokenizer, facts = load_checkpoint(copy / "rm.pt", ["rm"])
    assert facts["max_new_tokens"] == 5
    policy = load_checkpoint(copy / "sft.pt", ["sft"])[0]
    prompts = [tokenizer.encode(prompt) for (prompt,) in load_jsonl(data / "prompts_train.jsonl", ["prompt"])] * 8
    tokens, mask, *_ = minippo.generate(policy, prompts, 5)
    scores = scorer(tokens, minippo.row_lengths(mask))
    assert abs(scores.mean()) < 0.2 and 0.8 < scores.std() < 1.2
    says = "answers of up to 5 tokens, and PPO writes up to 8; train_rm.py --max_new_tokens 8"
    assert says in run("train_ppo.py", "--data", data, "--out", copy, *PPO, "--no_report")[1]
    flags = [*PPO, "--no_report", "--max_new_tokens", "5"]
    assert "answers of up to" not in run("train_ppo.py", "--data", data, "--out", copy, *flags)[1]


def test_a_reward_model_no_better_than_chance_is_said_by_its_maker_and_by_ppo(copy, data):
    assert "no better than chance" in run("train_rm.py", "--data", data, "--out", copy, *RM, "--lr", "0")[1]
    for accuracy, error, warned in ((0.59, 0.05, True), (0.61, 0.05, False)):
        model, tokenizer, facts = load_checkpoint(copy / "rm.pt", ["rm"])
        save_checkpoint(copy / "rm.pt", "rm", model, tokenizer, **facts | {"val_accuracy": accuracy, "val_accuracy_se": error})
        printed = run("train_ppo.py", "--data", data, "--out", copy, *PPO, "--no_report")[1]
        assert ("no better than chance" in printed) == warned


def test_prompts_that_leave_too_little_room_are_counted(chain, data, tmp_path):
    own = shutil.copytree(data, tmp_path / "own")
    tokenizer = load_checkpoint(chain / "sft.pt", ["sft"])[1]
    texts = [" ".join(["bee"] * (i + 1)) for i in range(40)]
    (own / "prompts_train.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    lengths = [len(tokenizer.encode(text)) for text in texts]
    short = sum(32 - 8 < n < 32 for n in lengths)
    assert short and 32 - 8 in lengths
    printed = run("train_ppo.py", "--data", own, "--out", tmp_path / "out", *PPO, "--models", chain, "--no_report")[1]
    assert f"warning: {short} of {sum(n < 32 for n in lengths)} prompts leave less than 8 tokens" in printed


@pytest.mark.parametrize("scale, kl_coef, warned", [
    (1.0, 0.1, False), (1000.0, 0.1, True), (0.001, 0.1, True), (1000.0, 0.0, False),
])  # fmt: skip
def test_scores_of_another_scale_than_beta_are_noticed(capsys, scale, kl_coef, warned):
    policy = tiny_gpt()

    def score(tokens, mask):
        return scale * torch.linspace(-1, 1, len(mask))

    config = PPOConfig(kl_coef=kl_coef, missing_eos_penalty=0.0)
    watch.check_start(policy, minippo.frozen_copy(policy), score, [[1]] * 16, config, train_ppo.StageConfig(), "float32")
    assert ("standard deviation of the first scores" in capsys.readouterr().out) == warned


def test_a_reward_that_fails_in_the_middle_loses_no_iteration(chain, data, tmp_path, monkeypatch):
    calls = []
    (tmp_path / "moody.py").write_text("def score(prompts, responses):\n    return grade(prompts)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import moody

    def grade(prompts):
        calls.append(1)
        if len(calls) == 4:  # one call before the first iteration; so this is the third
            raise RuntimeError("the server is gone")
        return [float(len(prompt)) for prompt in prompts]

    moody.grade = grade
    flags = ["--data", data, "--out", tmp_path / "out", *PPO, "--steps", "5", "--models", chain, "--no_report"]
    flags += ["--reward", "moody:score"]
    status, _, error = run("train_ppo.py", *flags)
    assert status == 2 and "RuntimeError: the server is gone" in error and "step 2 is saved, --resume" in error
    moody.grade = lambda prompts: [float(len(prompt)) for prompt in prompts]
    assert run("train_ppo.py", *flags, "--resume")[0] == 0
    assert run("train_ppo.py", *flags, "--out", tmp_path / "whole")[0] == 0
    assert same_weights(tmp_path / "out" / "ppo.pt", tmp_path / "whole" / "ppo.pt")
    sys.modules.pop("moody")


@pytest.mark.parametrize("script, kind", [(train_sft, "sft"), (train_rm, "rm")])
def test_the_model_of_the_lowest_validation_loss_is_the_one_that_is_saved(copy, data, monkeypatch, script, kind):
    validate, losses, seen = script.validate, iter([3.0, 1.0, 2.0, 2.5]), []

    def watched(model, rows, *rest):
        facts = validate(model, rows, *rest)
        seen.append({name: x.clone() for name, x in model.state_dict().items()})
        return facts | {"val_loss": next(losses)}  # at 50, 75 and 80 steps, and at the end for all rows

    monkeypatch.setattr(script, "validate", watched)
    monkeypatch.setattr(settings, "lock", lambda folder: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    more = SMALL if kind == "sft" else [*CPU, "--batch_size", "16", "--answers", "32"]
    monkeypatch.setattr(sys, "argv", ["x", "--data", str(data), "--out", str(copy), *more, "--max_steps", "80", "--lr", "0.01"])
    script.main()
    saved = torch.load(copy / f"{kind}.pt")
    assert len(seen) == 4 and saved["facts"]["val_loss"] == 2.5 and not (copy / f"{kind}_best.pt").exists()
    for name, x in saved["model"].items():
        if name not in ("mean", "std"):
            assert torch.equal(x, seen[1][name]) and torch.equal(x, seen[3][name])
    assert not torch.equal(seen[1]["trunk.norm.weight"], seen[2]["trunk.norm.weight"])


# Samples of a finished model


def test_the_sampler_prints_samples_to_prompts_on_the_command_line(chain):
    done = shell("sample.py", chain / "ppo.pt", QUESTION, "Where do bees live?", "--max_new_tokens", 5, "--n", 2)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith(QUESTION + "\n") and "\nWhere do bees live?\n" in done.stdout
    assert run("sample.py", chain / "ppo.pt", QUESTION, "Where do bees live?", "--max_new_tokens", 5, "--n", 2)[1] == done.stdout


def test_the_sampler_reads_prompts_from_the_standard_input_and_takes_an_sft_checkpoint_too(chain):
    status, printed, error = run("sample.py", chain / "sft.pt", "--top_k", 1, stdin=f"{QUESTION}\nWhere do bees live?\n")
    assert status == 0 and error == "" and printed.startswith(QUESTION + "\n") and "\nWhere do bees live?\n" in printed
    assert run("sample.py", chain / "sft.pt", QUESTION, "Where do bees live?", "--top_k", 1, "--seed", 5)[1] == printed


def test_a_sampler_without_a_standard_input_answers_the_prompts_of_the_command_line(chain):
    done = subprocess.run(["sh", "-c", '"$@" <&-', "-", *command("sample.py", chain / "sft.pt", QUESTION)], cwd=ROOT,
                          env=ONE_THREAD, capture_output=True, encoding="utf-8", timeout=120)  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith(QUESTION) and done.stderr == ""


@pytest.mark.parametrize("place, error, says", [
    ("sampler", 0.1, "a ratio"), ("sampler", math.nan, "a ratio"), ("reference", 0.1, "nats"),
])  # fmt: skip
def test_a_sampler_or_a_reference_that_is_off_before_the_first_update_is_refused(monkeypatch, place, error, says):
    policy, stage = tiny_gpt(), train_ppo.StageConfig()

    def start(off, dtype="float32", stage=stage):
        evaluate = watch.evaluate_actions

        def sampler(*args):
            tokens, mask, logprobs, values = minippo.generate(*args)
            return tokens, mask, logprobs + off * (place == "sampler"), values

        def scorer(model, *args, **kwargs):
            logprobs, *rest = evaluate(model, *args, **kwargs)
            return logprobs + off * (place == "reference" and model is ref), *rest

        with monkeypatch.context() as patch:
            patch.setattr(watch, "generate", sampler)
            patch.setattr(watch, "evaluate_actions", scorer)
            watch.check_start(policy, ref, score, [[1], [2, 3]] * 8, PPOConfig(), stage, dtype)

    def score(tokens, mask):
        return torch.randn(len(mask))

    ref = minippo.frozen_copy(policy)
    start(0.0)
    with pytest.raises(UserError, match=says):
        start(error)
    if place == "sampler" and not math.isnan(error):
        start(0.03, "bfloat16")  # coarser numbers, a coarser check
        with pytest.raises(UserError, match=says):
            start(error, "bfloat16")
    if place == "reference":  # a policy that is not the reference may be apart from it
        for given in ("policy", "reference"):
            start(error, stage=train_ppo.StageConfig(**{given: "x.pt"}))


def test_a_kl_below_0_by_more_than_chance_is_called_a_bug(capsys):
    for rows, level, warned in ((32, -0.5, True), (32, 0.5, False), (4, -0.5, False), (32, -0.05, False)):
        kl = level + torch.linspace(-1, 1, rows)[:, None] / 2
        batch = {"mask": torch.ones(rows, 1, dtype=torch.bool), "logprobs": kl, "ref_logprobs": torch.zeros(rows, 1)}
        watch.look(batch, None, show=False)
        assert ("below 0" in capsys.readouterr().out) == warned


@pytest.mark.parametrize("largest, warned", [(49.0, False), (51.0, True)])
def test_responses_that_went_astray_are_named(largest, warned, capsys):
    # The median is 3 nats, so that 20 + 10 x 3 nats are the limit.
    tokens = torch.tensor([[*b"abcd"], [*b"abxy"], [*b"ef!?"]])
    mask = torch.tensor([[False, True, True]] * 3)
    logprobs = torch.tensor([[9.0, 1.0, 2.0], [9.0, 1.0, 1.0], [9.0, 1.0, largest - 1]])
    batch = {"tokens": tokens, "mask": mask, "logprobs": logprobs, "ref_logprobs": torch.zeros(3, 3)}
    watch.look(batch, Tokenizer.train([], 257), show=False)
    said = "warning: 1 of 3 responses went astray. KL 51: '!?'\n"
    assert capsys.readouterr().out == (said if warned else "")


def test_two_responses_are_shown_with_their_score_and_their_kl(capsys):
    tokenizer = Tokenizer.train([], 257)
    tokens = torch.tensor([[*b"ab", *b"cd"], [*b"ab", *b"xy"], [*b"ef", *b"gh"], [*b"ef", *b"ij"]])
    mask, logprobs = torch.tensor([[False, True, True]] * 4), torch.tensor([[0.0, -1.0, -2.0]] * 4)
    batch = {"tokens": tokens, "mask": mask, "logprobs": logprobs, "ref_logprobs": 2 * logprobs}
    watch.look(batch | {"scores": torch.tensor([1.0, 2.0, 3.5, 4.0])}, tokenizer, show=True)
    assert capsys.readouterr().out == "    'abcd'  score 1.00  KL 3.00\n    'efgh'  score 3.50  KL 3.00\n"


def test_top_k_samples_among_the_likeliest_tokens_only():
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.4, 0.3]] * 2000))
    two = torch.bincount(sample.draw_top_k(logits, 2), minlength=4) / 2000
    assert_equal(two.double(), torch.tensor([0, 0, 4 / 7, 3 / 7], dtype=torch.float64), 0.05)
    assert set(sample.draw_top_k(logits, 1).tolist()) == {2}
    assert set(sample.draw_top_k(logits, 99).tolist()) == {0, 1, 2, 3}


def test_flags_may_stand_between_the_checkpoint_and_the_prompts(chain):
    last, between = ([chain / "sft.pt", QUESTION, "--n", 2], [chain / "sft.pt", "--n", 2, QUESTION])
    assert run("sample.py", *between) == run("sample.py", *last)


@pytest.mark.parametrize("script, classes", [
    ("train_sft.py", (settings.RunConfig, minippo.GPTConfig, training.FitConfig, train_sft.InitConfig)),
    ("train_rm.py", (settings.RunConfig, training.FitConfig, train_rm.AnswerConfig)),
    ("train_ppo.py", (settings.RunConfig, PPOConfig, train_ppo.StageConfig)),
    ("sample.py", (sample.SampleConfig, tracing.TraceConfig)),
])  # fmt: skip
def test_help_explains_every_flag(script, classes):
    status, printed, _ = run(script, "-h")
    words = " ".join(printed.split())
    assert status == 0
    for owner in classes:
        for name, text in settings.explanations(owner).items():
            if (script, name) != ("train_sft.py", "separate_critic"):  # a matter of the third stage
                assert f"--{name} " in words and " ".join(text.split()) in words


# What a user can get wrong: one line, status 2, what to do


def assert_refused(script, *args, says, **more):
    status, _, error = run(script, *args, **more)
    assert status == 2 and error.count("\n") == 1 and error.endswith("\n") and error.startswith(f"{script}: ")
    assert "Traceback" not in error
    for part in says:
        assert str(part) in error


def test_a_mistake_ends_a_script_with_status_2_and_one_line():
    done = shell("train_ppo.py", "--learning_rate", "0.1")
    assert done.returncode == 2 and done.stdout == "" and re.fullmatch(r"train_ppo\.py: .*--learning_rate.*-h.*\n", done.stderr)


@pytest.mark.parametrize("script, args, says", [
    ("train_sft.py", ["--learning_rate", "1"], ["--learning_rate", "-h"]),
    ("train_sft.py", ["--epoch", "1"], ["--epoch", "-h"]),  # no guessing at abbreviations
    ("train_sft.py", ["more"], ["more", "-h"]),
    ("train_sft.py", ["--epochs"], ["--epochs", "-h"]),
    ("train_sft.py", ["--epochs", "many"], ["--epochs", "many"]),
    ("train_sft.py", ["--epochs", "1.5"], ["--epochs", "1.5"]),
    ("train_sft.py", ["--epochs", "-1"], ["--epochs", "-1", "between 0 and"]),
    ("train_sft.py", ["--lr", "-1"], ["--lr", "-1", "between 0 and"]),
    ("train_sft.py", ["--lr", "nan"], ["--lr", "nan", "between 0 and"]),
    ("train_sft.py", ["--vocab_size", "256"], ["--vocab_size", "between 257 and"]),
    ("train_sft.py", ["--seed", "-1"], ["--seed", "between 0 and"]),
    ("train_sft.py", ["--channels", "10", "--heads", "3"], ["channels", "10", "multiple", "heads"]),
    ("train_sft.py", ["--device", "tpu"], ["tpu", "auto, cpu or cuda"]),
    ("train_ppo.py", ["--temperature", "0"], ["--temperature", "between 0.01 and"]),
    ("train_ppo.py", ["--gamma", "1.1"], ["--gamma", "between 0 and 1"]),
    ("train_ppo.py", ["--batch_size", "2"], ["minibatches", "batch_size"]),
    ("sample.py", [], ["CHECKPOINT"]),
    ("sample.py", ["x.pt", "--top_k", "-1"], ["--top_k", "between 0 and"]),
], ids=lambda x: " ".join(x) if isinstance(x, list) else None)  # fmt: skip
def test_a_wrong_flag_is_refused(tmp_path, script, args, says):
    assert_refused(script, *args, *(["--out", tmp_path] if script != "sample.py" else []), says=says)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(tmp_path):
    assert_refused("train_sft.py", "--device", "cuda", "--out", tmp_path, says=["--device cuda", "--device cpu"])


@pytest.mark.parametrize("script, file", [
    ("train_sft.py", "sft_train"), ("train_rm.py", "pref_train"), ("train_ppo.py", "prompts_train"),
])  # fmt: skip
def test_a_missing_data_folder_is_named(chain, tmp_path, script, file):
    models = ["--models", chain, "--out", tmp_path] if script == "train_ppo.py" else ["--out", chain]
    assert_refused(script, "--data", tmp_path / "none", *models, says=[tmp_path / "none" / f"{file}.jsonl", "cannot be read"])


@pytest.mark.parametrize("script, present, missing, maker", [
    ("train_rm.py", [], "sft.pt", "train_sft.py"), ("train_ppo.py", [], "sft.pt", "train_sft.py"),
    ("train_ppo.py", ["sft.pt"], "rm.pt", "train_rm.py"),
])  # fmt: skip
def test_what_is_missing_is_named_together_with_the_script_that_makes_it(chain, data, tmp_path, script, present, missing, maker):
    for name in present:
        shutil.copy(chain / name, tmp_path)
    assert_refused(script, "--data", data, "--out", tmp_path, says=[tmp_path / missing, "not found", maker])


def test_the_sampler_names_the_script_that_makes_a_missing_checkpoint(tmp_path):
    assert_refused("sample.py", tmp_path / "ppo.pt", QUESTION, says=["ppo.pt", "not found", "train_ppo.py"])


@pytest.mark.parametrize("name", ["sft.pt", "rm.pt"])
def test_a_damaged_checkpoint_is_refused(copy, data, name):
    whole = (copy / name).read_bytes()
    (copy / name).write_bytes(whole[: len(whole) // 2])
    assert_refused("train_ppo.py", "--data", data, "--out", copy, says=[copy / name, "damaged"])


@pytest.mark.parametrize("script, name, other, says", [
    ("train_rm.py", "sft.pt", "rm.pt", ["'rm'", "train_sft.py"]), ("train_ppo.py", "rm.pt", "ppo.pt", ["'ppo'", "train_rm.py"]),
])  # fmt: skip
def test_a_checkpoint_of_the_wrong_kind_is_refused(copy, data, script, name, other, says):
    shutil.copy(copy / other, copy / name)
    assert_refused(script, "--data", data, "--out", copy, says=[copy / name, *says])


def test_a_reward_model_of_another_vocabulary_is_refused(copy, data):
    tokenizer = Tokenizer.train([], 257)
    model = minippo.RewardModel(minippo.GPTConfig(257, 32, 1, heads=2, channels=16))
    save_checkpoint(copy / "rm.pt", "rm", model, tokenizer)
    assert_refused("train_ppo.py", "--data", data, "--out", copy, says=["rm.pt was not made from sft.pt", "train_rm.py"])


def test_a_state_of_a_model_of_another_size_is_refused(copy, data):
    flags = [flag if flag != "16" else "8" for flag in SMALL]
    says = ["sft_state.pt", "channels = 16", "batch_size = 16", "--overwrite"]
    assert_refused("train_sft.py", "--data", data, "--out", copy, *flags, "--resume", says=says)


def test_resuming_from_a_model_that_was_trained_anew_is_refused(copy, data):
    for kind, script, flags in (("rm", "train_ppo.py", PPO), ("sft", "train_rm.py", RM)):
        model, tokenizer, facts = load_checkpoint(copy / f"{kind}.pt", [kind])
        save_checkpoint(copy / f"{kind}.pt", kind, model, tokenizer, **facts | {"val_loss": 0.123})
        says = [f"{kind}.pt has been made again", "--overwrite"]
        assert_refused(script, "--data", data, "--out", copy, *flags, "--resume", says=says)
        state = copy / f"{script[6:-3]}_state.pt"
        torch.save({name: x for name, x in torch.load(state).items() if name != "made_from"}, state)  # as an older version saved it
        assert_refused(script, "--data", data, "--out", copy, *flags, "--resume", says=["has been made again"])


def test_resuming_what_was_never_saved_starts_at_the_beginning_and_says_so(chain, data, tmp_path):
    status, printed, _ = run("train_ppo.py", "--data", data, "--out", tmp_path, *PPO, "--models", chain, "--resume")
    assert status == 0 and f"{tmp_path / 'ppo_state.pt'} is not there" in printed
    assert metrics(tmp_path / "ppo.jsonl") == metrics(chain / "ppo.jsonl")


@pytest.mark.parametrize("script, file", [
    ("train_sft.py", "sft_val"), ("train_rm.py", "pref_val"), ("train_ppo.py", "prompts_val"),
])  # fmt: skip
def test_a_bad_row_is_named_by_file_and_line(chain, data, tmp_path, script, file):
    own = shutil.copytree(data, tmp_path / "own")
    with open(own / f"{file}.jsonl", "ab") as rows:
        rows.write(b'{"prompt": 7}\n')
    number = len((own / f"{file}.jsonl").read_bytes().splitlines())
    models = ["--out", tmp_path / "out", *SMALL] if script == "train_sft.py" else ["--out", chain]
    assert_refused(script, "--data", own, *models, says=[own / f"{file}.jsonl", f"line {number}", "'prompt'", "7"])


@pytest.mark.parametrize("script, file", [("train_sft.py", "sft_train"), ("train_ppo.py", "prompts_train")])
def test_prompts_that_are_all_too_long_are_refused(chain, data, tmp_path, script, file):
    own = shutil.copytree(data, tmp_path / "own")
    row = {"prompt": "Why? " * 100, "completion": " Because."}
    (own / f"{file}.jsonl").write_text(json.dumps(row) + "\n")
    models = ["--out", tmp_path / "out", *SMALL] if script == "train_sft.py" else ["--out", tmp_path, "--models", chain]
    assert_refused(script, "--data", own, *models, says=["32 tokens", "--context"])


@pytest.mark.parametrize("prompt", ["", "Why? " * 100])
def test_the_sampler_refuses_a_prompt_that_is_empty_or_too_long(chain, prompt):
    assert_refused("sample.py", chain / "ppo.pt", prompt, says=["prompt", "1 to 31"])


def test_an_output_folder_that_is_a_file_is_refused(data, tmp_path):
    (tmp_path / "out").write_text("")
    assert_refused("train_sft.py", "--data", data, "--out", tmp_path / "out", *SMALL, says=[tmp_path / "out"])


# Ctrl-C


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")
def test_ctrl_c_saves_the_state_and_resume_ends_with_the_weights_of_an_uninterrupted_run(data, tmp_path):
    flags = ["--data", data, *SMALL, "--epochs", "20"]
    process = subprocess.Popen(
        command("train_sft.py", "--out", tmp_path / "stopped", *flags),
        cwd=ROOT, env=ONE_THREAD, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8",
    )  # fmt: skip
    log, deadline = tmp_path / "stopped" / "sft.jsonl", time.monotonic() + 60
    while not (log.exists() and log.read_bytes().count(b"\n") >= 10) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.fullmatch(r"train_sft\.py: stopped; .*--resume.*\n", error)
    done = len(metrics(log))
    assert 10 <= done < 140 and (tmp_path / "stopped" / "sft_state.pt").exists()

    assert run("train_sft.py", "--out", tmp_path / "stopped", *flags, "--resume")[0] == 0
    assert run("train_sft.py", "--out", tmp_path / "whole", *flags)[0] == 0
    assert metrics(log) == metrics(tmp_path / "whole" / "sft.jsonl") and len(metrics(log)) == 140
    assert same_weights(tmp_path / "stopped" / "sft.pt", tmp_path / "whole" / "sft.pt")


@pytest.mark.parametrize("more", [
    [], ["--kl_horizon", "100", "--kl_target", "1"], ["--separate_critic", "--ref_update_every", "1"], ["--dtype", "bfloat16"],
], ids=" ".join)  # fmt: skip
def test_an_interrupted_ppo_run_goes_on_where_it_stopped(chain, data, tmp_path, monkeypatch, more):
    update = minippo.ppo_update

    def press_ctrl_c(*args):
        signal.raise_signal(signal.SIGINT)
        return update(*args)

    flags = ["--data", data, *PPO, "--models", chain, "--no_report", "--steps", "3", *more]
    assert run("train_ppo.py", "--out", tmp_path / "whole", *flags)[0] == 0
    monkeypatch.setattr(minippo, "ppo_update", press_ctrl_c)
    status, _, error = run("train_ppo.py", "--out", tmp_path, *flags)
    assert status == 130 and "step 1 is saved" in error and not (tmp_path / "ppo.pt").exists()
    monkeypatch.setattr(minippo, "ppo_update", update)
    assert run("train_ppo.py", "--out", tmp_path, *flags, "--resume")[0] == 0
    assert metrics(tmp_path / "ppo.jsonl") == metrics(tmp_path / "whole" / "ppo.jsonl")
    assert same_weights(tmp_path / "ppo.pt", tmp_path / "whole" / "ppo.pt")


def test_ctrl_c_before_anything_was_trained_says_so(monkeypatch, capsys):
    def main():
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(SystemExit) as stop:
        settings.run_script(main)
    assert stop.value.code == 130 and re.search(r"stopped; \w+", capsys.readouterr().err)
