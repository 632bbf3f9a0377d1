"""What starts from trained models: evaluate.py with its page, sample.py, variations/."""

import io
import itertools
import json
import math
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch

import evaluate
import sample
from data.rows import UserError, read_jsonl
from data.zoo import judge
from minippo import evaluate_actions, pad_completions
from plumbing import report
from plumbing.files import read_log
from plumbing.models import load_checkpoint, load_from_same_sft
from plumbing.page import BLUE, COLUMNS, ORANGE, write_page
from plumbing.report import distinct
from plumbing.report import sample as sample_responses
from plumbing.settings import printable
from plumbing.text import encode_rows
from tiny import assert_equal, f64, noise, weights
from tiny_run import ROOT, write_models
from train_ppo import Config


# Formulas


def test_optimality_is_the_share_of_the_largest_gain_in_j():
    scores = 3 * noise(4, 5)
    p = (scores / 0.3).softmax(1)  # the best policy, if the reference is uniform
    J = (p * (scores - 0.3 * (5 * p).log())).sum(1)
    assert_equal(evaluate.optimal_objective(scores, 0.3), J)
    group = [{"text": "a", "score": x, "kl": x + 2} for x in (3.0, 5.0)]
    gain = (4 - 0.3 * 6 - scores[0].mean()) / (J[0] - scores[0].mean())
    expected = {"score": 4.0, "kl": 6.0, "distinct": 0.5, "optimality": gain.item()}
    assert evaluate.summarize([group], scores[:1], 0.3) == pytest.approx(expected)
    rest = f64([1, 2, 6]) - 0.75 * f64([2, 4, 6])
    found = evaluate.optimality(f64([2, 4, 9]), f64([1, 2, 3]), f64([3, 6, 9]))
    error = rest.std().item() / 3**0.5 / 4
    assert found == pytest.approx({"optimality": 0.75, "optimality_se": error})
    assert evaluate.optimality(J, J, J) == {}


def test_best_of_n_is_a_mean_over_subsets():
    pairs = noise(6, 2)
    for n in range(1, 7):
        best = [max(subset)[1] for subset in itertools.combinations(pairs.tolist(), n)]
        number = evaluate.best_of_n(*pairs.T[:, None], n).item()
        assert number == pytest.approx(sum(best) / len(best))


def test_texts_are_counted_among_16():
    groups = [[{"text": text} for text in texts] for texts in (16 * "a" + "bcde", 5 * "abcd")]
    assert distinct(groups).tolist() == [1 / 16, 1 / 4]


def test_the_furthest_responses_are_of_different_prompts():
    kls = {"a": [3, 9], "b": [8, 1], "c": [7, 6], "d": [2, 5]}
    groups = [[{"prompt": name, "kl": kl} for kl in kls[name]] for name in kls]
    found = [(row["prompt"], row["kl"]) for row in evaluate.furthest(groups)]
    assert found == [("a", 9), ("b", 8), ("c", 7)]


# Programs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A new folder with data/ and out/, in which the tests go on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("user"))
        write_models(Path())
        yield


groups = []  # the responses that were sampled


def evaluated(out, **flags):
    """-> the report, and what write_page gets."""
    shown = []
    groups.clear()

    def sample_and_keep(*arguments, **roles):
        groups.append(sample_responses(*arguments, **roles))
        return groups[-1]

    def write(path, *arguments):
        shown.extend(arguments)
        write_page(path, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "write_page", write)
        patch.setattr(evaluate, "sample", sample_and_keep)
        evaluate.main(evaluate.Config(Path(out), reference_samples=67, policy_samples=1, **flags))
    return json.loads(Path(out, "report.json").read_text()), *shown


def test_the_iteration_of_the_page_has_the_first_rates_of_the_run(folder, monkeypatch):
    def update(policy, optimizer, *_):
        rates.append([group["lr"] for group in optimizer.param_groups])

    rates = []
    monkeypatch.setattr(report, "ppo_update", update)
    policy, tokenizer, _ = load_checkpoint("out/sft.pt", ["sft"])
    roles = {"ref": policy, "score": lambda *x: torch.ones(len(x[0])), "tokenizer": tokenizer}
    config = Config(steps=100, warmup=4, lr=0.5, value_lr=2.0, batch_size=4, max_new_tokens=4)
    prompts = [prompt for (prompt,) in encode_rows([{"prompt": "What?"}], [], tokenizer, 64)]
    report.one_iteration(policy, prompts, config=config, **roles)
    assert rates == [pytest.approx([0.1, 0.4])]


def test_a_run_becomes_report_and_page(folder, capsys):
    report, text, samples, iterations, logs = evaluated("out")
    assert [len(logs[name]) for name in ("sft", "rm", "ppo")] == [100, 30, 2]
    sft, best, policy = report["sft"], report["best_of_n"], report["policy"]
    assert text in capsys.readouterr().out
    for row in sft, best["64"], policy, report["unseen"]:
        assert f" {row['score']:z.2f} ± {row['score_se']:.2f} " in text
    assert f" {policy['optimality']:z.3f} ± " in text
    assert sft["kl"] == 0 and sft["optimality"] == pytest.approx(0)
    assert best["4"]["kl"] == pytest.approx(math.log(4) - 0.75)
    assert sft["score"] < best["4"]["score"] < best["16"]["score"]
    assert f"KL {report['furthest'][0]['kl']:.2f})" in text
    trained = {row["prompt"] for row in read_jsonl("data/prompts_train.jsonl")}
    ours = [i for i, group in enumerate(groups[1]) if group[0]["prompt"] not in trained]
    scores = f64([[row["score"] for row in groups[0][i]] for i in ours])
    unseen = evaluate.summarize([groups[1][i] for i in ours], scores, 0.1)
    assert len(ours) == 4 and report["unseen"] == pytest.approx(unseen, rel=1e-6)
    assert len(samples) == 6
    for before, after in samples:
        assert after["judge"] == judge(before["prompt"], after["text"])

    first, last = iterations.values()
    [value] = {value for row in first for value in row["old_values"]}
    assert value != 0 and any(sum(row["d"]) for row in last)
    ref, tokenizer, _ = load_checkpoint("out/sft.pt", ["sft"])
    spelled = [printable(tokenizer.spell(i), keep="") for i in range(tokenizer.vocab_size)]
    for rows in first, last:
        scores = [row["score"] for row in rows]
        assert len(scores) == 6 and scores == sorted(scores, reverse=True)
    for row in first + last:
        ids = [spelled.index(token) for token in row["tokens"]]
        tokens, mask = pad_completions([(tokenizer.encode(row["prompt"]), ids)])
        ref_logprobs, _ = evaluate_actions(ref, tokens, mask)
        assert ref_logprobs[mask].tolist() == pytest.approx(row["ref_logprobs"], abs=1e-4)
        for i, token in enumerate(row["tokens"]):
            rivals = {name: chances for name, *chances in row["rivals"][i]}
            before, after = rivals[token]
            assert math.log(before) == pytest.approx(row["old_logprobs"][i], abs=1e-4)
            assert math.log(after) == pytest.approx(row["logprobs"][i], abs=1e-4)
            gap = row["old_logprobs"][i] - row["ref_logprobs"][i]
            assert row["d"][i] == pytest.approx(gap, abs=1e-6)
            assert row["ratio"][i] == pytest.approx(after / before, abs=1e-4)
            assert before != after and len(rivals) >= 3


def test_the_page_shows_what_it_gets(tmp_path):
    logs = {}  # with a reward of one's own there is none of "rm"
    for stage, name in (("sft", "val_loss"), ("ppo", "score")):
        logs[stage] = [{"step": 0}, *({"step": 5 * i, name: 2.0 - i} for i in (1, 2, 3))]
    response = {"prompt": "<i>", "score": 0.5, "tokens": ["<b>", "c"]}
    response |= {name: [0.001, -1.239] for name in COLUMNS} | {"advantages": [1.0, -2.0]}
    response["rivals"] = [[("<b>", 0.25, 0.75)], [("d", 0.5, 0.4), ("c", 0.1, 0.2)]]
    samples = [({"prompt": "<p>", "text": "<t>\x1b", "score": 1.0}, {"text": "u", "score": 2.0})]
    write_page(tmp_path / "report.html", "<text>", samples, {"the start": [response]}, logs)
    page = (tmp_path / "report.html").read_text()
    assert "<pre>&lt;text&gt;</pre>" in page and "<b>&lt;p&gt;</b>" in page
    assert "before: &lt;t&gt;\\x1b (score 1.00)" in page and "after: u (score 2.00)" in page
    assert "&lt;i&gt;&lt;b&gt;c (score 0.50)" in page
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page)
    assert cells[0] == "&lt;b&gt;" and cells[1:10] == 6 * ["0.00"] + ["1.00", "0.00", "0.00"]
    assert cells[10] == "&lt;b&gt; 25 → 75" and cells[-1] == "d 50 → 40,  c 10 → 20"
    assert cells[12:18] == 6 * ["-1.24"]
    assert re.findall(r"(#\w+) (\d+)%", page) == [(BLUE, "25"), (ORANGE, "50")]
    assert re.findall(r'points="(.*?)"', page) == 2 * ["0.00,0.00 50.00,50.00 100.00,100.00"]
    assert page.count("1<svg") == 2 and page.count("</svg>-1, steps 5 to 15") == 2
    assert page.count("</span> -1") == 2


def test_a_run_in_progress_is_measured(folder, tmp_path):
    out = shutil.copytree("out", tmp_path / "out")
    assert evaluated(out, kl_coef=1000.0)[0]["policy"]["optimality"] < -100
    (tmp_path / "prompts_train.jsonl").write_text('{"prompt": "What?"}\n{"prompt": "</script>"}')
    (out / "ppo.pt").unlink()
    state = torch.load(out / "ppo_state.pt") | {"model": torch.load(out / "sft.pt")["model"]}
    state["settings"]["policy"] = "out/ppo.pt"  # of a second round
    torch.save(state, out / "ppo_state.pt")
    report, *shown = evaluated(out, data=str(tmp_path), kl_coef=0.1)
    text, samples, iterations, _ = shown
    policy = report["policy"]  # one response to one prompt
    assert policy == report["unseen"] and abs(policy["optimality"]) < 9
    assert policy["kl"] == 0 and policy["score"] == samples[0][1]["score"]
    assert len(set(iterations["the policy"][0]["old_values"])) == 1
    torch.save(torch.load(out / "rm.pt") | {"other": 1}, out / "rm.pt")
    with pytest.raises(UserError, match="rm.pt: not that of this run"):
        evaluated(out)


def test_sample_answers_what_fits(folder, monkeypatch, capsys):
    lines = b" What? \r\n\n" + 500 * b"x" + b"\nWho?\xff"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    sample.main(sample.Config(Path("out/ppo.pt"), n=2, temperature=1e-3, max_new_tokens=1))
    first, a, b, empty, none, long, too_long, second, *_ = capsys.readouterr().out.splitlines()
    assert (first, a, empty, second) == (" What? ", b, "", "Who?\ufffd") and len(a.split()) < 2
    assert "no answer" in none and "no answer" in too_long


def run(monkeypatch, name, *flags):
    """As a user does -> the lines of the log."""
    common = ["--data=data", "--device=cpu", "--batch_size=16"]
    monkeypatch.setattr("sys.argv", [name, *common, *flags])
    runpy.run_path(f"{ROOT}/variations/{name}.py", run_name="__main__")
    before, _, _ = load_checkpoint("out/sft.pt", ["sft"])
    trained = load_from_same_sft(f"out/{name}/ppo.pt", ["ppo"], Config(models="out"), "cpu")
    assert not weights(trained.trunk).equal(weights(before.trunk))
    return read_log(f"out/{name}/ppo.jsonl")


PROGRAMS = {
    "grpo": "--kl_coef=1000",
    "kl_in_loss": "--kl_loss_coef=1000",
    "ppo_penalty": "--penalty=1000",
    "reinforce": "--no-resume",
    "rloo": "--group_size=2",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_trains_and_saves_a_policy(folder, monkeypatch, name):
    flag = PROGRAMS[name]
    first, *_ = run(monkeypatch, name, "--steps=3", "--max_new_tokens=16", flag)
    assert (first["grad_norm"] > 100) == flag.endswith("1000")
    assert ("value_loss" in first) == (name not in ("grpo", "reinforce", "rloo"))


def test_dpo_learns_the_pairs_in_pieces_of_any_size(folder, monkeypatch):
    flags = "--steps=15", "--lr=0.004", "--overwrite"
    logs = [run(monkeypatch, "dpo", *flags, f"--micro_batch={size}") for size in (5, 16)]
    for line, other in zip(*logs, strict=True):
        for name in ("loss", "accuracy", "margin", "grad_norm"):
            assert line[name] == pytest.approx(other[name], rel=1e-2, abs=1e-3)
    assert logs[0][0]["loss"] == pytest.approx(math.log(2))
    assert logs[0][-1]["loss"] < 0.5 and logs[0][-1]["grad_norm"] < 0.7
    evaluate.main(evaluate.Config(Path("out/dpo"), prompts=2, reference_samples=4))
