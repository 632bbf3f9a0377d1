"""evaluate.py and sample.py."""

import itertools
import json
import shutil
import signal

import pytest
import torch

from data.rows import UserError
from data.zoo import judge
from evaluate import Config, best_of_n, main, optimal_objective, optimality, suspects
from plumbing.page import distinct
from tiny import f64, noise
from tiny_run import start, write_models


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("a"))


@pytest.fixture
def out(run, tmp_path):
    return shutil.copytree(run, tmp_path / "out")


def results(out):
    text = (out / "report.html").read_text().partition('id="data">')[2].partition("</script>")[0]
    data = json.loads(text, parse_constant=pytest.fail)
    return json.loads((out / "report.json").read_text()), data


def evaluated(out, **options):
    main(Config([out], reference_samples=64, policy_samples=2, **options))
    return results(out)


def test_optimality_is_1_for_the_optimum_0_for_the_reference():
    scores = 3 * noise(4, 5)
    best = optimal_objective(scores, 0.3)
    for policy, expected in ((scores / 0.3).softmax(1), 1), (torch.full_like(scores, 0.2), 0):
        J = (policy * (scores - 0.3 * (5 * policy).log())).sum(1)
        found = optimality(J, scores.mean(1), best)
        assert found["optimality"] == pytest.approx(expected, abs=1e-9)
    assert optimality(best, best, best) == {}


def test_optimality_is_a_ratio_with_its_error():
    rest = f64([1, 2, 6]) - 0.75 * f64([2, 4, 6])
    expected = {"optimality": 0.75, "optimality_se": rest.std().item() / 3**0.5 / 4}
    assert optimality(f64([2, 4, 9]), f64([1, 2, 3]), f64([3, 6, 9])) == pytest.approx(expected)


def test_best_of_n_is_a_mean_over_subsets():
    pairs = noise(6, 2)
    for n in range(1, 7):
        best = [max(subset)[1] for subset in itertools.combinations(pairs.tolist(), n)]
        assert best_of_n(*pairs.T[:, None], n).item() == pytest.approx(sum(best) / len(best))


def test_texts_are_counted_among_16():
    groups = [[{"text": text} for text in texts] for texts in (16 * "a" + "bcde", 5 * "abcd")]
    assert distinct(groups).tolist() == [1 / 16, 1 / 4]


@pytest.mark.parametrize("near, count, best", [(0.3, 5, [9, 8, 7]), (0.6, 4, [9, 7, 4])])
def test_high_scores_at_a_high_kl_are_suspect(near, count, best):
    rows = {
        "a": [(4, 2), (3, 2), (9, near), (0, near)],
        "b": [(9, 2), (5, 2), (6, 0.65), (0, near)],
        "c": [(8, 1), *3 * [(0, near)]],
        "d": [(7, 2), *3 * [(0, near)]],
    }
    groups = [[{"prompt": name, "score": x, "kl": kl} for x, kl in rows[name]] for name in rows]
    found = suspects(groups, f64([[0, 2], [5, 3], [1, 0], [0, 1]]), cap=5)
    scores = [row["score"] for row in found["examples"]]
    assert (found["count"], found["prompts"], scores) == (count, 3, best)


def test_a_run_becomes_report_and_page(run):
    printed, _ = start("evaluate.py", run, "--reference_samples", 67).communicate()
    report, data = results(run)
    assert data["text"] in printed
    for row in report["sft"], report["best_of_n"]["64"], report["policy"], report["unseen"]:
        assert f" {row['score']:z.2f} ± {row['score_se']:.2f} " in printed
    assert f" {report['policy']['optimality']:z.3f} ± " in printed
    assert report["sft"]["kl"] == 0 and report["best_of_n"]["4"]["kl"] > 0.6
    assert len(data["samples"]) == 6
    for before, after in data["samples"]:
        assert after["judge"] == judge(before["prompt"], after["text"])
        assert after["prompt"] == before["prompt"]
    assert [curve["lr"][-1][0] for curve in data["curves"].values()] == [100, 30, 2]

    first, last = data["iterations"].values()
    [value] = {value for row in first for value in row["old_values"]}
    assert value != 0 and any(row["kl"] for row in last)
    for row in first + last:
        for i, token in enumerate(row["tokens"]):
            [chances] = [x for text, *x in row["rivals"][i] if text == token]
            logprobs = [row[name][i] for name in ("old_logprobs", "ref_logprobs", "logprobs")]
            assert torch.tensor(chances).log().tolist() == pytest.approx(logprobs, abs=1e-4)
            assert logprobs[0] != logprobs[2]


def test_a_run_in_progress_is_measured(out, tmp_path):
    (out / "ppo.jsonl").write_text('{"step": 3, "kl_coef": 1000, "kl": NaN}\n')
    assert evaluated(out)[0]["policy"]["optimality"] < -100
    weights = torch.load(out / "sft.pt")["model"]
    weights["value_trunk.norm.bias"] = torch.ones(32)  # of a separate critic
    torch.save(torch.load(out / "ppo_state.pt") | {"policy": weights}, out / "ppo_state.pt")
    (out / "ppo.pt").unlink()
    (tmp_path / "prompts_train.jsonl").write_text('{"prompt": "What?"}\n{"prompt": "</script>"}')
    report, data = evaluated(out, data=tmp_path, kl_coef=0.1)
    policy = report["policy"]
    assert policy["kl"] == 0 and abs(policy["optimality"]) < 9 and policy == report["unseen"]
    assert len(set(data["iterations"]["the policy"][0]["old_values"])) == 1


def test_a_foreign_reward_model_is_refused(out):
    torch.save(torch.load(out / "rm.pt") | {"other": 1}, out / "rm.pt")
    with pytest.raises(UserError, match="rm.pt"):
        evaluated(out)


def test_sample_answers_what_fits(run):
    flags = "--n", 2, "--temperature", 1e-3, "--max_new_tokens", 1
    process = start("sample.py", run / "ppo.pt", *flags)
    printed, errors = process.communicate(f"What?\r\n\n{'x' * 500}\nWho?\n")
    first, a, b, second, *_ = printed.splitlines()
    assert (first, a, second) == ("What?", b, "Who?") and len(a.split()) < 2
    assert process.returncode == 2 and errors.count("sample.py") == 2


def test_sample_ends_quietly(run):
    for status in 1, 130:
        with start("sample.py", run / "ppo.pt", "Who?", "--n", 3000) as process:
            process.stdout.readline()
            process.stdout.close() if status == 1 else process.send_signal(signal.SIGINT)
            assert process.wait() == status and not process.stderr.read()
