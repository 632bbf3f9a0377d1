"""The report: what PPO is measured against, and what is printed of it (plumbing/report.py)."""

import itertools
import json
import math
import random
from types import SimpleNamespace

import pytest
import torch

import train_ppo
from cli import write_data, write_rows
from data import zoo
from minippo import PPOConfig, evaluate_actions, frozen_copy, row_lengths
from plumbing import fast, report
from plumbing.errors import UserError
from plumbing.models import Models
from plumbing.report import best_of_n, best_of_n_kl, estimate, optima, optimal_objective, optimum
from plumbing.settings import RunConfig
from plumbing.tokenizer import Tokenizer
from tiny import EOS, assert_equal, biased, f64, noise, stir, tiny_gpt, tiny_reward_model

SEEDS = pytest.mark.parametrize("seed", range(5))


def seeded(seed):
    torch.manual_seed(seed)
    return random.Random(seed)


# The best possible


@SEEDS
def test_the_optimal_objective_is_that_of_the_optimum_and_no_policy_has_more(seed):
    beta = 10 ** seeded(seed).uniform(-1.5, 1.5)
    measured, weights = {"score": noise(3, 5), "judge": noise(3, 5)}, torch.rand(3).double()
    best = optimal_objective(measured["score"], beta)

    def objective(policy, x=measured["score"]):  # the reference: 5 answers, equally likely
        return (policy * (x - beta * (policy * 5).log())).sum(1)

    policy = (measured["score"] / beta).exp()
    policy /= policy.sum(1, keepdim=True)
    assert_equal(objective(policy), best, 1e-9)
    for _ in range(50):
        assert (objective(noise(3, 5).mul(3).softmax(1)) <= best + 1e-9).all()
    found = optimum(measured, beta, weights)
    share = weights / weights.sum()
    expected = {name: ((policy * x).sum(1) * share).sum().item() for name, x in measured.items()}
    assert found == pytest.approx(expected | {"kl": found["kl"]})
    assert found["score"] - beta * found["kl"] == pytest.approx((best * share).sum().item())
    assert 0 <= found["kl"] <= math.log(5)


def test_far_from_the_spread_of_the_scores_the_optimum_is_the_mean_or_the_best_answer():
    scores = f64([[1.0, 2.0, 6.0]])
    assert optimal_objective(scores.float(), 1e6).item() == pytest.approx(3.0, abs=1e-4)
    assert optimal_objective(scores, 1e-3).item() == pytest.approx(6.0, abs=2e-3)
    assert optimum({"score": f64([[0, 9]])}, 1e-3)["kl"] == pytest.approx(math.log(2))


def test_the_optima_are_those_at_beta_and_around_the_spread_of_the_scores():
    measured, weights = {"score": f64([[-3, 3], [3, -3]])}, f64([1, 2])
    rows = optima(measured, 0.7, weights)
    shares = [0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0]
    assert [row["beta"] for row in rows] == pytest.approx(sorted([0.7, *(3 * x for x in shares)]))
    for row in rows:
        assert row == {"beta": row["beta"]} | optimum(measured, row["beta"], weights)
    assert len(optima(measured, 0.0)) == 10
    assert [row["beta"] for row in optima({"score": f64([[1, 1]])}, 0.7)] == [0.7]


@SEEDS
def test_best_of_n_is_the_mean_over_all_subsets_of_n(seed):
    M = seeded(seed).randint(3, 6)
    scores, values = noise(2, M), noise(2, M)
    for n in range(1, M + 1):
        for row in range(2):
            subsets = itertools.combinations(range(M), n)
            best = [values[row, max(x, key=lambda i: scores[row, i])] for x in subsets]
            assert_equal(best_of_n(scores, values, n)[row], torch.stack(best).mean(), 1e-6)


def test_the_kl_of_best_of_n():
    """By its definition, for answers without ties: of M, the k-th from below is best in
    C(k-1, n-1) of C(M, n) subsets; the KL of these shares to 1 / M tends to the formula."""
    M, n = 5000, 4
    shares = f64([math.comb(k - 1, n - 1) / math.comb(M, n) for k in range(n, M + 1)])
    assert best_of_n_kl(n) == pytest.approx((shares * (shares * M).log()).sum().item(), abs=2e-3)
    assert best_of_n_kl(1) == 0


# Means and their errors


@SEEDS
def test_an_estimate_is_a_weighted_mean_over_prompts_with_its_error(seed):
    seeded(seed)
    x, weights = noise(50, 4), torch.rand(50).double() + 0.1
    prompts = x.mean(1)
    plain = {"a": prompts.mean().item(), "a_se": (prompts.std() / 50**0.5).item()}
    assert estimate("a", x) == pytest.approx(plain) == estimate("a", x, torch.full((50,), 7.0))
    got, mean = estimate("a", x, weights), (weights * prompts).sum() / weights.sum()
    parts = weights / weights.sum() * (prompts - mean)
    assert got["a"] == pytest.approx(mean.item())
    assert got["a_se"] == pytest.approx(((parts**2).sum() * 50 / 49).sqrt().item())
    assert estimate("a", f64([[1, 2, 3]])) == {"a": 2.0, "a_se": None}
    figures = {"ended": x, "length": x, "kl": x}
    found = report.means(figures, weights)
    assert found["eos_rate"] == found["response_length"] == found["kl"] == got["a"]
    assert found["eos_rate_se"] == found["kl_se"] == got["a_se"] and len(found) == 6


def test_the_error_of_optimality_is_that_of_repeated_measurements():
    torch.manual_seed(0)
    J_sft, J_best = noise(8000), noise(8000) + 5
    J = J_sft + 0.8 * (J_best - J_sft) + 0.5 * noise(8000) + 0.2 * (J_best - 5)
    got = report.optimality(J, J_sft, J_best)
    ratio = (J - J_sft).mean() / (J_best - J_sft).mean()
    assert got["optimality"] == pytest.approx(ratio.item())
    parts = [
        report.optimality(*(x[i : i + 40] for x in (J, J_sft, J_best))) for i in range(0, 8000, 40)
    ]
    spread = torch.tensor([x["optimality"] for x in parts]).std().item()
    assert spread == pytest.approx(parts[7]["optimality_se"], rel=0.4)
    assert spread == pytest.approx(got["optimality_se"] * 200**0.5, rel=0.15)
    weights = torch.rand(40).double()
    got = report.optimality(J[:40, None], J_sft[:40].expand(3, 40).T, J_best[:40], weights)
    means = [(weights * x[:40]).sum() for x in (J - J_sft, J_best - J_sft)]
    assert got["optimality"] == pytest.approx((means[0] / means[1]).item())
    assert report.optimality(f64([2]), f64([1]), f64([3])) == {
        "optimality": 0.5,
        "optimality_se": None,
    }


@pytest.mark.parametrize("seed", range(20))
def test_up_to_half_of_the_prompts_looked_at_closely_are_unseen_and_the_weights_make_up(seed):
    rng = random.Random(seed)
    count, n = rng.randint(2, 40), rng.randint(2, 50)
    prompts = [[i] for i in range(count)]
    seen = {(i,) for i in rng.sample(range(count), rng.randint(0, count))} | {(99,)}
    new = report.unseen(prompts, seen)
    assert new == [(i,) not in seen for i in range(count)]
    chosen, weights = report.spread_out(prompts, seen, n)
    assert len(chosen) == len(weights) == min(n, count) == len({tuple(x) for x in chosen})
    kinds = torch.tensor(report.unseen(chosen, seen))
    few, many = sorted((sum(new), count - sum(new)))
    assert few == 0 or 0 < kinds.sum() < len(kinds)
    assert abs(2 * kinds.sum() - len(kinds)) <= 1 or len(kinds) - few in (
        kinds.sum(),
        (~kinds).sum(),
    )
    assert weights[kinds].sum().item() == pytest.approx(sum(new))
    assert weights[~kinds].sum().item() == pytest.approx(count - sum(new))
    assert len(set(weights[kinds].tolist())) <= 1


def test_an_answer_is_suspect_that_scores_above_all_of_the_reference_and_is_far_from_it():
    M, kl = 8, f64([[1.0, 2.0, 2.5], [1.0, 4.1, 3.9], [4.1, 2.0, 4.5]])  # median 2.5, log 8 = 2.1
    score = f64([[9.0, 9.0, 2.0], [9.0, 3.0, 9.0], [2.0, 2.0, 2.5]])
    reference = f64([[0.0] * 7 + [2.0]] * 2 + [[2.0] * 8])
    texts, prompts = [f"answer {i}" for i in range(9)], ["a?", "b?", "c?"]

    def found(kl):
        return report.suspects({"score": score, "kl": kl}, texts, prompts, reference)

    none = {"count": 0, "responses": 9, "reference_samples": M, "examples": []}
    assert found(kl) == none and found(kl.clamp(max=2.0) / 10) == none
    low = kl.where(kl > 2.5, f64(0.1))  # median 0.1: log 8 decides
    third = {"prompt": "b?", "response": "answer 5", "score": 9.0, "kl": 3.9}
    fourth = {"prompt": "c?", "response": "answer 8", "score": 2.5, "kl": 4.5}
    assert found(low) == none | {"count": 3, "examples": [third, fourth]}
    assert found(low * 0.53)["count"] == 2 and found(low * 0.45) == none
    twice = kl.where(kl != 2.5, f64(2.0))  # median 2.0: only 4.1 and 4.5 are above 4
    assert found(twice)["examples"][0]["score"] == 3.0 and found(twice)["count"] == 2


@SEEDS
def test_suspects_come_from_three_prompts_the_highest_scores_first(seed):
    seeded(seed)
    n, score, kl = 4, noise(6, 4), torch.zeros(6, 4)
    kl[:, :2] = 10.0  # fewer than half: the median is 0
    prompts, texts = list("uvwxyz"), [str(i) for i in range(24)]
    got = report.suspects({"score": score, "kl": kl}, texts, prompts, torch.full((6, 5), -9.0))
    best = sorted(((score[i, :2].max().item(), i) for i in range(6)), reverse=True)[:3]
    places = [n * i + score[i, :2].argmax().item() for _, i in best]
    assert [x["prompt"] for x in got["examples"]] == [prompts[i] for _, i in best]
    assert [x["response"] for x in got["examples"]] == [texts[i] for i in places]
    assert [x["score"] for x in got["examples"]] == [x for x, _ in best] and got["count"] == 12


def test_a_tie_is_half_a_win():
    assert report.wins(f64([3, 1, 2]), f64([1, 3, 2])).tolist() == [1.0, 0.0, 0.5]


# The report of tiny models

TOKENIZER = Tokenizer([bytes([65 + i]) for i in range(EOS)])


def made(
    out,
    prompts=12,
    seen=8,
    judge=None,
    beta=0.5,
    reward_model=True,
    name="PPO",
    models=None,
    answers=None,
    **stage_flags,
):
    """-> make_report() on tiny models, or on these (SFT model, policy, score), and what respond()
    was asked for. A list `answers` gets the prompts, figures and texts of each call."""
    asked, respond = [], report.respond

    def watched(model, ref, score, prompts, n, *rest):
        asked.append((model is ref, len(prompts), n, rest[-1]))
        figures, texts = respond(model, ref, score, prompts, n, *rest)
        if answers is not None:
            answers.append((prompts, figures, texts))
        return figures, texts

    torch.manual_seed(0)
    sft, scorer = tiny_gpt(), tiny_reward_model() if reward_model else None
    policy = stir(frozen_copy(sft), 0.05)

    def score(tokens, mask):
        return 0.1 * mask.sum(1) + tokens[:, 0].double()

    sft, policy, score = models or (sft, policy, score)
    facts = {"sft": {"val_loss": 2.0, "val_tokens": 50}} | (
        {"rm": {"val_accuracy": 0.7}} if scorer else {}
    )
    models = Models(policy, sft, scorer, score, TOKENIZER, facts)
    rows = [[i % 8, i // 8] for i in range(prompts)]
    config = PPOConfig(max_new_tokens=4, kl_coef=beta, missing_eos_penalty=0.25)
    flags = {"report_prompts": prompts, "batch_size": 7} | stage_flags
    stage = train_ppo.StageConfig(**flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "respond", watched)
        patch.setattr(report, "OPTIMUM_SAMPLES", 64)
        patch.setattr(report, "truth_about", lambda data: (None, judge, {}))
        run = RunConfig(data=out, out=out, seed=3, device="cpu")
        return report.make_report(models, rows[:seen], rows, run, config, stage, name), asked


def test_the_report_holds_every_figure_with_its_error_and_is_written(tmp_path):
    got, asked = made(tmp_path, 24, 16)
    assert got == json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert asked == [(True, 24, 4, 7), (True, 3, 64, 7), (False, 24, 4, 7), (False, 3, 16, 7)]
    assert {x[-1] for x in made(tmp_path, rollout_batch=5)[1]} == {5}
    assert (got["prompts"], got["prompts_of_best_of_n"], got["reference"]) == (24, 3, "SFT")
    assert got["notes"] == list(report.notes(got)) and "3 of the 24" in got["notes"][0]
    figures = {"score", "kl", "eos_rate", "response_length", "penalty", "empty"}
    assert (got["algorithm"], got["beta"], got["seed"]) == ("PPO", 0.5, 3)
    assert got["rm"] == {"val_accuracy": 0.7} and got["sft"]["val_loss"] == 2.0
    assert got["sft"].keys() >= figures and got["sft"]["kl"] == 0
    for kind, count in (("ppo", None), ("ppo_seen", 16), ("ppo_unseen", 8)):
        assert got[kind].keys() >= figures | {f"{x}_se" for x in figures} | {"optimality"}
        assert got[kind].get("prompts") == count
    both = (16 * got["ppo_seen"]["score"] + 8 * got["ppo_unseen"]["score"]) / 24
    assert got["ppo"]["score"] == pytest.approx(both) and got["ppo"]["kl"] > 0
    assert [row["kl"] for row in got["best_of_n"].values()] == [
        best_of_n_kl(n) for n in (4, 16, 64)
    ]
    scores = [got["sft"]["score"], *(row["score"] for row in got["best_of_n"].values())]
    assert 0.5 in [row["beta"] for row in got["optimum"]] and scores[1:] == sorted(scores[1:])
    assert len(got["samples"]) == 6 and got["seconds"].keys() == {"report"}
    assert 0 < got["ppo"]["distinct"] <= 1 and 0 < got["sft"]["distinct"] < 1
    assert "val_loss" not in got["ppo"]  # there are no demonstrations
    (tmp_path / "sft_val.jsonl").write_text("damaged")
    assert "val_loss" not in made(tmp_path, 24, 16)[0]["ppo"]


def test_each_figure_is_that_of_its_answers_weighted_where_the_prompts_are_few(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(report, "add_truth", lambda *_: None)

    def judge(prompt, response):
        return ord(prompt[0]) + 10.0 * len(response)

    answers, weights = [], f64([1, 1, 15, 15])  # of 32 prompts two are unseen, half of the few
    got, _ = made(tmp_path, 32, 30, judge, answers=answers)
    for prompts, figures, texts in answers:
        first = torch.tensor([[ord(TOKENIZER.decode(ids)[0])] for ids in prompts])
        lengths = torch.tensor(list(map(len, texts))).view(len(prompts), -1)
        assert_equal(figures["judge"].double(), (first + 10 * lengths).double())
    sft, few = answers[1][1], answers[3][1]
    J = few["score"] - 0.5 * few["kl"], sft["score"], optimal_objective(sft["score"], 0.5)[:, None]
    for kind, rows, weigh in (
        ("ppo", slice(4), [weights]),
        ("ppo_unseen", slice(2), []),
        ("ppo_seen", slice(2, 4), []),
    ):
        expected = report.optimality(*(x[rows] for x in J), *weigh)
        assert {name: got[kind][name] for name in expected} == expected
    best = {name: best_of_n(sft["score"], sft[name], 4) for name in ("judge", "score")}
    assert got["best_of_n"]["4"] == report.means(best, weights) | {"kl": best_of_n_kl(4)}
    assert got["optimum"] == optima(sft, 0.5, weights)
    for kind, texts, n in (("sft", answers[1][2], 64), ("ppo", answers[3][2], 16)):
        expected = estimate("distinct", report.distinct(texts, n), weights)
        assert {name: got[kind][name] for name in expected} == expected


def test_fewer_prompts_are_drawn_at_random_where_there_is_no_judge(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "add_truth", lambda *_: None)
    assert report.PROMPTS == (1024, 128) and report.OPTIMUM_SAMPLES == 192  # as the texts say
    monkeypatch.setattr(report, "PROMPTS", (9, 5))
    for judge, count in ((None, 5), (lambda *_: 0.0, 9)):
        answers = []
        made(tmp_path, 24, 16, judge, answers=answers, report_prompts=0)
        assert len(answers[0][0]) == count
        assert answers[0][0] != [[i % 8, i // 8] for i in range(count)]


def test_the_policy_is_tried_on_the_demonstrations_too(tmp_path):
    rows = [("A", "BC"), ("BA", ""), ("", "B"), ("A", "B" * 9), ("AB", "CAB")]
    write_rows(tmp_path, sft_val=rows)
    got, _ = made(tmp_path, 24, 16)
    kept = [([65], [66, 67]), ([66, 65], []), ([65], [66] * 9), ([65, 66], [67, 65, 66])]
    torch.manual_seed(0)
    policy = (tiny_gpt(), tiny_reward_model())[0]
    policy = stir(frozen_copy(policy), 0.05)
    nats, count = 0.0, 0
    for prompt, completion in kept:
        ids = [i - 65 for i in (*prompt, *completion)] + [EOS]
        mask = (torch.arange(1, len(ids)) >= len(prompt))[None]
        logprobs, _, _ = evaluate_actions(policy, torch.tensor([ids]), mask)
        nats, count = nats - logprobs.sum().item(), count + int(mask.sum())
    assert got["ppo"]["val_loss"] == pytest.approx(nats / count)
    assert got["ppo"]["val_tokens"] == count and got["sft"]["val_loss"] == 2.0


def test_distinct_answers_are_counted_among_the_first_sixteen_of_each_prompt():
    texts = ["a", "b", "a", "c"] + ["a"] * 4
    assert report.distinct(texts, 4).tolist() == [0.75, 0.25]
    assert report.distinct(texts, 4, shown=2).tolist() == [1.0, 0.5]
    assert report.distinct([str(i) for i in range(40)], 20).tolist() == [1.0, 1.0]
    assert report.distinct([*"abcdefghijklmnop", "p", "p"], 18).tolist() == [1.0]


def test_the_report_names_answers_that_hack_the_reward_model(tmp_path):
    """Planted: the reward model likes one token, which the reference never says and the policy
    now and then."""
    never, often = (biased(tiny_gpt(), {7: bias}) for bias in (-30.0, 0.5))
    often.load_state_dict(never.state_dict() | {"lm_head.bias": often.lm_head.bias})

    def score(tokens, mask):
        return 10.0 * (tokens == 7).any(1) + 0.1 * mask.sum(1)

    answers = []
    got, _ = made(tmp_path, 24, 16, models=(never, often, score), answers=answers)
    found, examples = got["suspects"], got["suspects"]["examples"]
    assert 0 < found["count"] < found["responses"] == 3 * 16 and found["reference_samples"] == 64
    assert len(examples) == 3
    assert {x["prompt"] for x in examples} == {TOKENIZER.decode(ids) for ids in answers[3][0]}
    assert all(chr(65 + 7) in x["response"] and min(x["score"], x["kl"]) > 10 for x in examples)
    assert "reward hacking?" in got["notes"][0] and examples[0]["response"] in got["notes"][1]
    honest, _ = made(tmp_path, 24, 16, models=(never, often, lambda tokens, mask: mask.sum(1)))
    assert honest["suspects"]["count"] == 0 and "hacking" not in "".join(honest["notes"])


def test_without_beta_there_is_no_optimality_and_one_kind_of_prompts_is_not_told_apart(tmp_path):
    got, _ = made(tmp_path, beta=0.0)
    assert "optimality" not in got["ppo"] | got["ppo_seen"] and len(got["optimum"]) == 10
    for seen in (1, 11):
        assert "ppo_seen" not in made(tmp_path, seen=seen)[0]
    got, _ = made(tmp_path, 2, 1, reward_model=False, name="RLOO", reference="last.pt")
    assert got["rm"] == {} and (got["algorithm"], got["reference"]) == ("RLOO", "reference")


def test_a_judge_grades_answers_to_their_prompts_and_samples_hold_both(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "add_truth", lambda *_: None)
    answers = []
    got, _ = made(
        tmp_path,
        judge=lambda prompt, response: len(prompt) + 10.0 * len(response),
        answers=answers,
    )
    for kind in ("sft", "ppo", "ppo_unseen"):
        row = got[kind]  # an end token has no text
        length = row["response_length"] - row["eos_rate"]
        assert row["judge"] == pytest.approx(2 + 10 * length, rel=1e-5)
    assert {"judge", "score"} <= got["best_of_n"]["4"].keys() and "judge" in got["optimum"][0]
    (_, before, before_texts), _, (_, after, after_texts), _ = answers
    for i, row in enumerate(got["samples"]):  # the first of four answers to each prompt
        assert (row["sft"], row["ppo"]) == (before_texts[4 * i], after_texts[4 * i])
        assert row["sft_score"] == before["score"][i, 0] and row["score"] == after["score"][i, 0]
        assert row["judge"] == 2 + 10 * len(row["ppo"]) and row["sft_judge"] == 2 + 10 * len(
            row["sft"]
        )
        assert row.keys() == {
            "prompt",
            "sft",
            "ppo",
            "score",
            "judge",
            "kl",
            "sft_score",
            "sft_judge",
        }


@pytest.mark.parametrize("size", [512, 5])
def test_every_response_is_measured_for_its_prompt_in_pieces_too(monkeypatch, size):
    policy, prompts, seen = tiny_gpt(), [[1], [2, 3], [4, 5, 6]], []
    ref, generate = frozen_copy(tiny_gpt()), report.generate

    def watched(*args):
        seen.append(generate(*args))
        return seen[-1]

    def score(tokens, mask):
        return 100.0 * tokens[:, 0] + mask.sum(1)

    monkeypatch.setattr(report, "generate", watched)
    tokenizer = Tokenizer([b" \n", *(bytes([x]) for x in b" \t\n\r\x0b\x0cABC")])
    config = PPOConfig(5, 0.7, length_penalty=0.25, missing_eos_penalty=0.5)
    measured, texts = report.respond(policy, ref, score, prompts, 4, tokenizer, config, size)
    assert [len(x[0]) for x in seen] == ([5, 5, 2] if size == 5 else [12])
    i = 0
    for tokens, mask, logprobs, _ in seen:
        with torch.no_grad():
            there = evaluate_actions(ref, tokens, mask, 0.7)[0]
        for j, length in enumerate(row_lengths(mask).tolist()):
            n, prompt = int(mask[j].sum()), prompts[i // 4]
            ended = tokens[j, length - 1].item() == EOS
            row = {name: x.flatten()[i].item() for name, x in measured.items()}
            kl = (logprobs[j] - there[j])[mask[j]].sum().item()
            penalty = 0.25 * n + 0.5 * (not ended)
            ids = tokens[j, len(prompt) : length].tolist()
            expected = {"length": n, "ended": float(ended), "penalty": penalty, "kl": kl}
            expected["score"] = 100 * prompt[0] + n - penalty
            expected["empty"] = not any(x in (7, 8, 9) for x in ids)
            assert row == pytest.approx(expected, abs=1e-4)
            assert texts[i] == tokenizer.decode(ids)
            i += 1
    assert 0 < measured["empty"].sum() < 12
    assert not report.respond(ref, ref, score, prompts, 2, TOKENIZER, config)[0]["kl"].any()


# What the default data tells


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_truth_is_known_of_the_default_data_alone(tmp_path):
    nothing, (prompt, *_) = (None, None, {}), zoo.PROMPTS
    write_data(tmp_path)
    assert report.truth_about(tmp_path) == nothing
    (tmp_path / "ceilings.json").write_text('{"best_judge": 3}')
    assert report.truth_about(tmp_path) == (zoo.crowd, zoo.judge, {"best_judge": 3})
    rows = {"prompts": ["Who?"], "pref": ["Who?", "a", "b"], "sft": ["Who?", "a"]}
    for task, row in [*rows.items(), ("sft", [prompt, " My own answer."]), ("sft", None)]:
        path = tmp_path / f"{task}_val.jsonl"
        before = path.read_text()
        path.unlink()
        if row:
            write_rows(tmp_path, **{f"{task}_val": [row]})
        assert report.truth_about(tmp_path) == nothing
        path.write_text(before)
    assert report.truth_about(tmp_path)[1]
    (tmp_path / "ceilings.json").write_text('{"best_judge"')
    with pytest.raises(UserError, match="ceilings.json: is no JSON; delete it"):
        report.truth_about(tmp_path)


def test_sft_and_reward_model_are_held_against_the_truth_row_by_row(tmp_path):
    rng, sft, model = random.Random(0), tiny_gpt(), tiny_reward_model()
    rows = ["".join(rng.choices("ABCDEFGHIJ", k=i % 5 + 1)) for i in range(3 * 90)]
    demonstrations, pairs = (
        list(zip(rows[::3], rows[1::3])),
        list(zip(rows[::3], rows[1::3], rows[2::3])),
    )
    write_lines(
        tmp_path / "sft_val.jsonl", [{"prompt": a, "completion": b} for a, b in demonstrations]
    )
    keys = ("prompt", "chosen", "rejected")
    write_lines(tmp_path / "pref_val.jsonl", [dict(zip(keys, row)) for row in pairs])
    run = SimpleNamespace(data=tmp_path, device="cpu")
    share = {prompt: 0.1 + 0.01 * i for i, prompt in enumerate(dict.fromkeys(rows[::3]))}
    fast.install()
    excess, hits = [], []
    with torch.no_grad():
        for prompt, answer in demonstrations:
            ids = [*TOKENIZER.encode(prompt), *TOKENIZER.encode(answer), EOS]
            logits = sft(torch.tensor([ids]))[0][0].log_softmax(-1)
            nats = sum(logits[t - 1, ids[t]].item() for t in range(len(prompt), len(ids)))
            excess.append(-nats + math.log(share[prompt]))
        for prompt, *answers in pairs:
            ids = [[*TOKENIZER.encode(prompt), *TOKENIZER.encode(x), EOS] for x in answers]
            a, b = (model(torch.tensor([x]), torch.tensor([len(x)])).item() for x in ids)
            gap = len(answers[0]) - len(answers[1])  # to this judge, longer is better
            hits.append((gap > 0) + 0.5 * (gap == 0) - (a > b) - 0.5 * (a == b))
    got = report.above_entropy(
        sft, TOKENIZER, run, lambda prompt: dict.fromkeys(rows, share[prompt])
    )
    count = sum(len(answer) + 1 for _, answer in demonstrations)
    assert got["above_entropy"] == pytest.approx(sum(excess) / count, rel=1e-4)
    assert got["above_entropy_se"] == pytest.approx(
        f64(excess).std().item() * 90**0.5 / count, rel=1e-3
    )
    assert got["entropy_floor"] == pytest.approx(
        -sum(math.log(share[prompt]) for prompt, _ in demonstrations) / count
    )
    got = report.below_ceiling(model, TOKENIZER, run, lambda prompt, answer: float(len(answer)))
    gaps = [len(a) - len(b) for _, a, b in pairs]
    assert got["label_ceiling"] == pytest.approx(sum((x > 0) + 0.5 * (x == 0) for x in gaps) / 90)
    floor = sum(math.log(1 + math.exp(-x)) for x in gaps) / 90
    assert got["label_loss_floor"] == pytest.approx(floor, rel=1e-5)
    assert got["below_ceiling"] == pytest.approx(sum(hits) / 90)
    assert got["below_ceiling_se"] == pytest.approx(f64(hits).std().item() / 90**0.5)
    for name in ("sft", "pref"):  # a row that does not fit: nothing to compare
        path = tmp_path / f"{name}_val.jsonl"
        path.write_text(path.read_text().replace('"prompt": "', '"prompt": "' + "A" * 16, 1))
    assert report.below_ceiling(model, TOKENIZER, run, None) == {}
    assert report.above_entropy(sft, TOKENIZER, run, None) == {}
    write_lines(tmp_path / "sft_val.jsonl", [{"prompt": "A", "completion": "B" * 30}])  # cut
    assert report.above_entropy(sft, TOKENIZER, run, None) == {}


def test_what_the_default_data_tells_stands_in_the_report(monkeypatch):
    monkeypatch.setattr(
        report, "above_entropy", lambda *_: {"above_entropy": 0.02, "entropy_floor": 0.5}
    )
    monkeypatch.setattr(report, "below_ceiling", lambda *_: {"below_ceiling": 0.01})
    limits = {"best_judge": 3.0}
    before, after = ({"judge": f64([[x, 1], [1, 1]])} for x in (0, 2))
    for reward_model in (None, "rm"):
        got = {"sft": {"val_tokens": 40}, "ppo": {}, "rm": {}, "reference": "SFT"}
        models = SimpleNamespace(reference=None, tokenizer=None, reward_model=reward_model)
        report.add_truth(got, before, after, models, None, None, None, limits)
        assert got["best_judge"] == 3.0 and got["sft"]["entropy_floor"] == 0.5
        assert (
            got["ppo"]["win_rate_vs_sft"] == pytest.approx(5 / 8) and "above_entropy" in got["sft"]
        )
        assert got["rm"] == ({"below_ceiling": 0.01} if reward_model else {})
        got = {"sft": {"val_tokens": 40}, "ppo": {}, "rm": {}, "reference": "reference"}
        report.add_truth(got, before, after, models, None, None, None, limits)
        assert got["sft"] == {"val_tokens": 40}  # the reference is not the SFT model


# What is printed


def test_notes_say_what_the_figures_do_not():
    """Each appears where it holds."""

    def noted(beta=0.1, rm=(), **more):
        row = {"score": 1.0, "penalty": 0.5, "empty": 0.0}
        ppo = row | {"score": 2.62, "optimality": 0.5} | more
        ppo = {name: x for name, x in ppo.items() if x is not None}
        names = {"reference": "reference", "algorithm": "RLOO", "prompts_of_best_of_n": 128}
        known = names | {"sft": row, "ppo": ppo, "rm": dict(rm), "beta": beta, "prompts": 1024}
        return list(report.notes(known))

    best = "best of n and optimality are measured on 128 of the 1,024 prompts"
    assert noted(penalty=0.504) == noted(beta=0.0, optimality=None) == [best]
    doubts = noted(rm={"val_loss": 0.7, "val_accuracy": 0.7, "val_pairs": 9})
    assert "70.0 % of 9" in doubts[1] and doubts[2:] == [best]
    assert "change of +1.62 in score, +0.30 comes from the penalty" in noted(penalty=0.2)[1]
    assert "change of +1.62 in score, -0.25 comes" in noted(penalty=0.75)[1]
    assert "optimality above 1" in noted(optimality=1.2)[1] and noted(optimality=1.05) == [best]
    assert noted(empty=0.125)[1] == "empty answers: 0.0% of reference, 12.5% of RLOO"
    assert "no optimality" in noted(optimality=None)[1]
    assert list(report.hacking({"count": 0}, "SFT")) == list(report.hacking(None, "SFT")) == []
    row = {"prompt": "Why\x1b?", "response": " So\x1b.", "score": 3.4567, "kl": 13.2}
    found = {"count": 1234, "responses": 5678, "reference_samples": 192, "examples": [row]}
    first, second = report.hacking(found, "reference")
    assert "1,234 of 5,678" in first and "all 192 of reference to the same prompt" in first
    assert second == "    Why\\x1b? -> So\\x1b.   (score 3.46, KL 13.20)"


def with_errors(**figures):
    return figures | {f"{name}_se": 0.014 for name in figures}


REPORT = {
    "algorithm": "GRPO",
    "reference": "reference",
    "notes": ["something of note", "and more"],
    "beta": 0.1,
    "best_judge": 3.0,
    "seconds": {"sft": 78.4, "report": 45.6},
    "sft": with_errors(
        judge=-0.33,
        score=0.01,
        kl=0.0,
        eos_rate=1.0,
        response_length=9.9,
        val_loss=0.507,
        distinct=0.94,
    ),
    "ppo": with_errors(
        judge=2.63,
        score=1.47,
        kl=2.73,
        eos_rate=1.0,
        response_length=12.36,
        win_rate_vs_sft=0.906,
        optimality=0.86,
        distinct=0.51,
        val_loss=1.93,
    ),
    "ppo_seen": with_errors(optimality=0.87),
    "ppo_unseen": {"prompts": 50} | with_errors(score=1.41, kl=2.57, optimality=0.834),
    "rm": with_errors(val_accuracy=0.8177, below_ceiling=0.0088) | {"label_ceiling": 0.8265},
    "best_of_n": {"4": {"judge": 1.67, "score": 0.93, "kl": 0.63629, "score_se": None}},
    "samples": [{"prompt": "Why?\x1b", "sft": " So.", "ppo": " Yes.", "score": 1.5, "kl": 2.25}],
}
REPORT["sft"] |= with_errors(above_entropy=0.0207) | {"entropy_floor": 0.4862}
PRINTED = """
                          judge            score               kl         eos_rate  response_length
reference          -0.33 ± 0.01      0.01 ± 0.01      0.00 ± 0.01    1.000 ± 0.014      9.90 ± 0.01
best of 4                  1.67             0.93             0.64                -                -
GRPO                2.63 ± 0.01      1.47 ± 0.01      2.73 ± 0.01    1.000 ± 0.014     12.36 ± 0.01
GRPO, unseen                  -      1.41 ± 0.01      2.57 ± 0.01                -                -
best possible              3.00

something of note
and more

SFT validation loss 0.5070 ± 0.0140 nats/token
    0.0207 ± 0.0140 above the entropy of the same rows, 0.4862
    after GRPO 1.9300 ± 0.0140: it imitates less, bad demonstrations included
reward model, validation pairs right 0.8177 ± 0.0140
    0.0088 ± 0.0140 below the judge on the same pairs, 0.8265
share of different answers among 16 to one prompt: reference 0.94 ± 0.01, GRPO 0.51 ± 0.01
GRPO wins against reference 0.906 ± 0.014 (by the judge, ties half)
optimality 0.860 ± 0.014: how much of the way GRPO has come from reference
    to the largest score - 0.1 KL that any policy can have
    50 of the prompts are unseen: it was not trained on them
    optimality there 0.834 ± 0.014, 0.870 ± 0.014 on those that it was trained on

Samples, before and after:
  Why?\\x1b
    reference  So.
    GRPO       Yes.   (score 1.50, KL 2.25)
seconds: sft 78, report 46
"""


def test_the_report_is_printed(capsys):
    report.print_report(REPORT)
    assert capsys.readouterr().out == PRINTED


def test_what_a_report_has_not_is_not_printed(capsys):
    bare = {"score": 0.5, "kl": 0.0, "distinct": 0.5}
    small = {"sft": bare | {"val_loss": 2.0}, "ppo": bare | {"eos_rate": 0.5}}
    small |= {"rm": {}, "best_of_n": {}, "beta": 0.0}
    report.print_report(small | {"samples": [], "seconds": {}})
    table, limits = capsys.readouterr().out.split("\n\n")[:2]
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["score", "kl", "eos_rate", "response_length"],
        ["SFT", "0.50", "0.00", "-", "-"],
        ["PPO", "0.50", "0.00", "0.500", "-"],
    ]
    shares = "share of different answers among 16 to one prompt: SFT 0.50, PPO 0.50"
    assert limits == f"SFT validation loss 2.0000 nats/token\n{shares}"


def test_the_seconds_are_those_of_the_last_lines_of_the_logs(tmp_path):
    for path, name, seconds in (
        (tmp_path, "sft", 3),
        (tmp_path, "rm", 4),
        (tmp_path / "b", "ppo", 5),
    ):
        path.mkdir(exist_ok=True)
        write_lines(
            path / f"{name}.jsonl", [{"step": 1, "seconds": 1}, {"step": 2, "seconds": seconds}]
        )
    assert report.seconds_of_stages(tmp_path, tmp_path / "b") == {"sft": 3, "rm": 4, "ppo": 5}
    assert report.seconds_of_stages(tmp_path, tmp_path) == {"sft": 3, "rm": 4}


def test_where_the_scores_do_not_differ_there_is_no_optimality():
    score = torch.full((5, 4), 0.7)
    best = report.optimal_objective(score, 0.1)[:, None]
    assert report.optimality(score, score, best) == {}
