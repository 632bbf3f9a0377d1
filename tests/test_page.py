"""The specification of plumbing/page.py: what report.html is made of. Run: python -m pytest tests/test_page.py

What a browser makes of it is the matter of tests/test_browser.py.
"""

import json
import re
import shutil
import sys

import pytest

from cli import ROOT, run
from plumbing import page
from plumbing.page import curve, path_of, response_shown, short, within_budget, write_page
from plumbing.report import systems
from plumbing.settings import UserError
from runs import BEE, REPORT, SETTINGS, STOPS, make_models, metric, ppo, response, trace, write_jsonl, write_run
from tiny import inf, nan

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.S)


def shown(path):
    """The data in a page."""
    return json.loads(DATA.search(path.read_text(encoding="utf-8"))[1], parse_constant=pytest.fail)


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "out")


# What is on the page


def test_the_page_holds_curves_result_and_responses_of_a_run(folder):
    assert write_page(folder) == folder / "report.html"
    data = shown(folder / "report.html")
    assert data["steps"] == 60 and data["beta"] == 0.1 and data["settings"] == SETTINGS
    assert data["curves"].keys() == {"sft", "rm", "ppo", "judge"} and data["every"] == {"sft": 1, "rm": 1, "ppo": 1}
    assert data["curves"]["sft"].keys() == {"loss", "val_loss"}
    assert data["curves"]["sft"]["val_loss"] == {"x": [50, 60], "y": [0.25, 0.2]}
    assert data["curves"]["sft"]["loss"] == {"x": [*range(1, 61)], "y": [short(5 / i) for i in range(1, 61)]}
    assert data["curves"]["rm"].keys() == {"loss", "val_loss", "accuracy", "val_accuracy"}
    assert data["curves"]["rm"]["val_accuracy"] == {"x": [50, 60], "y": [0.7, 0.8]}
    names = set("score rlhf_reward kl paid entropy explained_variance response_length eos_rate value_loss policy_loss".split())
    assert data["curves"]["ppo"].keys() == names
    for name in names - {"paid"}:
        assert data["curves"]["ppo"][name]["y"] == [short(metric(step)[name]) for step in range(1, 61)], name
    assert data["curves"]["ppo"]["paid"]["y"] == [short(0.1 * 0.05 * step) for step in range(1, 61)]
    assert data["curves"]["judge"] == {"x": [1, 10, 50], "y": [0.04, 0.4, 2.0]}
    assert [line["step"] for line in data["traces"]] == [*STOPS]
    assert data["judged"] == [{"kl": short(0.05 * step), "judge": step / 25} for step in STOPS]


def test_the_clip_fraction_is_drawn_for_each_pass(folder):
    write_page(folder)
    clip = shown(folder / "report.html")["clip"]
    assert [line["pass"] for line in clip] == [1, 2] and clip[0]["x"] == clip[1]["x"] == [*range(1, 61)]
    assert [line["y"] for line in clip] == [[short(share * step) for step in range(1, 61)] for share in (0.001, 0.002)]


def test_of_a_single_pass_there_is_one_line_and_of_many_there_are_six():
    rows = [{"step": 1, "clip_frac": 0.25}, {"step": 2, "clip_frac": 0.5}]
    assert page.clip_curves(rows) == [{"pass": 1, "x": [1, 2], "y": [0.25, 0.5]}]
    rows = [{"step": 3, "passes": [{"clip_frac": i / 10} for i in range(11)]}]
    assert [(line["pass"], line["y"]) for line in page.clip_curves(rows)] == [
        (1, [0.0]), (3, [0.2]), (5, [0.4]), (7, [0.6]), (9, [0.8]), (11, [1.0])]  # fmt: skip
    assert page.clip_curves([{"step": 1}]) == []


def test_the_table_is_the_one_that_is_printed_and_the_figures_have_their_errors(folder):
    write_page(folder)
    result, (names, rows) = shown(folder / "report.html")["result"], systems(REPORT)
    assert result["columns"] == names == ["judge", "score", "kl", "eos_rate", "response_length"]
    assert result["rows"] == [[name, *cells] for name, cells in rows.items()]
    assert result["rows"][0] == ["SFT", "-0.33 ± 0.04", "-0.01 ± 0.03", "0.00 ± 0.00", "1.000 ± 0.000", "9.90 ± 0.09"]
    assert result["facts"] == {
        "ppo optimality": "0.860 ± 0.011", "ppo win_rate_vs_sft": "0.906 ± 0.005", "ppo_unseen optimality": "0.834 ± 0.015",
        "sft val_loss": "0.5070 ± 0.0032", "sft above_entropy": "0.0207 ± 0.0017", "rm val_accuracy": "0.8177 ± 0.0043",
        "rm below_ceiling": "0.0088 ± 0.0026"}  # fmt: skip
    assert result["limits"] == {"sft loss": 0.4862, "rm loss": 0.3653, "rm accuracy": 0.8265}
    assert result["points"] == {"sft": {"kl": 0, "score": -0.01, "judge": -0.33}, "ppo": {"kl": 2.73, "score": 1.47, "judge": 2.63}}
    best = [(row["n"], row["kl"], row["score"], row["judge"]) for row in result["best_of_n"]]
    assert best == [(4, 0.63629, 0.93, 1.67), (16, 1.8351, 1.42, 2.58)]
    assert result["optimum"] == REPORT["optimum"] and result["unseen"] == 50 and result["beta"] == 0.1
    assert result["samples"] == REPORT["samples"] and result["seconds"] == REPORT["seconds"]


def test_a_response_keeps_its_numbers_and_loses_what_is_not_shown():
    row = response(*BEE, 10)
    x = response_shown(row | {"ids": [1], "prompt_ids": [2]}, 10**6)
    whole = {"prompt", "ended", "count", "gap", "score", "judge", "total_log_old", "total_kl"}
    assert x.keys() == whole | {"tokens", "clip", *page.NUMBERS}
    for name in page.NUMBERS:
        assert x[name] == [short(v) for v in row[name]]
    assert (x["tokens"], x["clip"], x["prompt"], x["ended"], x["count"]) == (row["tokens"], row["clip"], row["prompt"], True, 6)
    assert x["total_kl"] == short(sum(row["kl"])) and x["total_log_old"] == short(sum(row["log_old"])) and x["gap"] == [6, 0]
    assert response_shown(row | {"kl": [None] * 6}, 10**6)["total_kl"] is None


def test_of_a_long_response_beginning_and_end_stay():
    x = response_shown(response([f" {i}" for i in range(100)], 1.0, "x" * 400, 1), 7)
    assert x["tokens"] == [" 0", " 1", " 2", " 96", " 97", " 98", " 99"] and x["gap"] == [3, 93] and x["count"] == 100
    assert all(len(x[name]) == 7 for name in (*page.NUMBERS, "clip")) and x["reward"][-1] > 0.5
    assert x["prompt"] == "…" + "x" * 300


def test_long_texts_before_and_after_are_cut(folder):
    sample = {**REPORT["samples"][0], "prompt": "a" * 999 + "b", "sft": "c" + "d" * 2000, "ppo": "e" * 1500}
    (folder / "report.json").write_text(json.dumps(REPORT | {"samples": [sample]}))
    write_page(folder)
    (x,) = shown(folder / "report.html")["result"]["samples"]
    assert (x["prompt"], x["sft"], x["ppo"]) == ("…" + "a" * 299 + "b", "c" + "d" * 1499 + "…", "e" * 1500)


# Long runs


def test_a_long_log_is_averaged():
    rows = [{"step": i, "loss": float(i)} for i in range(1, 1001)]
    x = curve(rows, "loss")
    assert len(x["x"]) == 334 and x["x"][:2] == x["y"][:2] == [2, 5] and x["x"][-1] == x["y"][-1] == 1000
    assert curve(rows[:400], "loss")["y"] == [float(i) for i in range(1, 401)] and curve(rows[:401], "loss")["y"][0] == 1.5
    odd = [{"step": 1, "loss": nan}, {"step": 2}, {"step": 3, "loss": "high"}, {"step": 4, "loss": True}, {"step": 5, "loss": 0.5}]
    assert curve(odd, "loss") == {"x": [5], "y": [0.5]}
    path = path_of([{"kl": float(i), "score": 2.0 * i} for i in range(80)] + [{"kl": None, "score": 1.0}, {"kl": 1.0}])
    assert len(path) == 40 and path[0] == {"kl": 0.5, "score": 1.0} and path[-1] == {"kl": 78.5, "score": 157.0}


@pytest.mark.parametrize("tokens, responses", [(20, 6), (300, 1), (700, 1)])
def test_the_page_stays_below_a_megabyte(folder, tokens, responses):
    one = response([f"\u2603{i}" for i in range(tokens)], 1.0, "\u2603" * 999, 1)
    rows = [trace(step, tracked=[one] * 6, sampled=[one] * 6) for step in (1, 2, 5, 10, 20, 50, 100, 200, 400)]
    write_jsonl(folder / "ppo_traces.jsonl", rows)
    write_jsonl(folder / "ppo.jsonl", [metric(step) for step in range(1, 5001)])
    report = REPORT | {"samples": [dict.fromkeys(("prompt", "sft", "ppo"), "\u2603" * 9999) | {"score": 0.0, "kl": 0.0}] * 6}
    (folder / "report.json").write_text(json.dumps(report | {"seconds": {"ppo": 2500.0}}))
    write_page(folder)
    assert (folder / "report.html").stat().st_size < 1_000_000
    data = shown(folder / "report.html")
    assert {len(line[kind]) for line in data["traces"] for kind in ("tracked", "sampled")} == {responses} and data["result"]


def test_of_fewer_responses_the_first_and_the_last_stay(monkeypatch):
    rows = [trace(1, tracked=[response(*BEE[:1], score, "", 1) for score in range(6)], sampled=[])]
    monkeypatch.setattr(page, "BUDGET", 4000)
    (line,) = within_budget(rows)
    assert len(json.dumps(line)) <= 4000 and line["sampled"] == []
    scores = [x["score"] for x in line["tracked"]]
    assert 1 < len(scores) < 6 and (scores[0], scores[-1]) == (0, 5)


# Parts that are not there


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


def test_a_run_ends_with_its_page(models, tmp_path):
    out = tmp_path / "out"
    status, printed, error = ppo(models, out, "--steps", 2, "--epochs", 2)
    assert (status, error) == (0, "") and printed.splitlines()[-1] == f"open {out / 'report.html'} in a browser to see the run"
    data, report = shown(out / "report.html"), json.loads((out / "report.json").read_text())
    assert data["result"]["columns"][0] == "judge" and data["result"]["seconds"] == report["seconds"]
    betas = [x["beta"] for x in report["optimum"]]
    assert betas == sorted(set(betas)) and len(betas) == 11 and 0.1 in betas
    assert all(x.keys() == {"beta", "score", "judge", "kl"} for x in report["optimum"])
    for sample in report["samples"]:
        assert sample.keys() == {"prompt", "sft", "ppo", "score", "judge", "kl", "sft_score", "sft_judge"}
    assert [line["step"] for line in data["traces"]] == [1, 2] and [line["pass"] for line in data["clip"]] == [1, 2]
    assert data["curves"]["sft"] == data["curves"]["rm"] == {}  # the folder of the models has no logs
    before = (out / "report.html").read_bytes()
    assert run("plumbing/page.py", out) == (0, f"wrote {out / 'report.html'}\n", "")
    assert (out / "report.html").read_bytes() == before


def test_the_logs_of_stages_1_and_2_may_be_in_another_folder(models, tmp_path):
    write_run(tmp_path / "logs")
    for name in ("sft.pt", "rm.pt"):
        shutil.copy(models / name, tmp_path / "logs")
    assert ppo(models, tmp_path / "out", "--steps", 1, "--no_report", "--models", tmp_path / "logs")[0] == 0
    assert shown(tmp_path / "out" / "report.html")["curves"]["sft"].keys() == {"loss", "val_loss"}
    write_page(tmp_path / "out")
    assert shown(tmp_path / "out" / "report.html")["curves"]["sft"] == {}
    assert run("plumbing/page.py", tmp_path / "out", "--models", tmp_path / "logs")[0] == 0
    assert shown(tmp_path / "out" / "report.html")["curves"]["rm"].keys() == {"loss", "val_loss", "accuracy", "val_accuracy"}


def test_without_a_report_there_is_no_result_and_an_earlier_one_is_not_taken_for_it(models, tmp_path):
    write_run(tmp_path)
    assert ppo(models, tmp_path, "--steps", 1, "--no_report")[0] == 0
    data = shown(tmp_path / "report.html")
    assert (tmp_path / "report.json").exists() and data["result"] is None  # it tells of other seconds than the log
    assert len(data["traces"]) == 1 and data["curves"]["ppo"] and data["path"]


def test_without_a_judge_nothing_is_said_of_one(models, tmp_path):
    own = shutil.copytree(models / "zoo", tmp_path / "own")
    (own / "ceilings.json").unlink()
    assert ppo(models, tmp_path / "out", "--steps", 1, "--data", own)[0] == 0
    data = shown(tmp_path / "out" / "report.html")
    assert "judge" not in json.dumps({name: x for name, x in data.items() if name not in ("judged", "curves")})
    assert data["judged"] == [] and data["curves"]["judge"] == {"x": [], "y": []}
    assert set(data["result"]["limits"].values()) == {None} and len(data["result"]["optimum"]) == 11


def test_with_a_function_for_reward_there_is_no_reward_model(models, tmp_path, monkeypatch):
    (tmp_path / "lengths.py").write_text("def score(prompts, responses):\n    return [float(len(x)) for x in responses]\n")
    monkeypatch.syspath_prepend(tmp_path)
    write_run(tmp_path / "out")
    shutil.copy(models / "sft.pt", tmp_path / "out")
    flags = ["--steps", 1, "--models", tmp_path / "out", "--reward", "lengths:score", "--kl_coef", 1]
    assert ppo(models, tmp_path / "out", *flags)[0] == 0
    sys.modules.pop("lengths")
    data = shown(tmp_path / "out" / "report.html")
    assert data["settings"]["reward"] == "lengths:score" and data["curves"]["rm"] == {} and data["curves"]["sft"]
    assert not [name for name in data["result"]["facts"] if name.startswith("rm")] and data["beta"] == 1


def test_without_a_price_for_kl_there_is_no_optimality_but_a_limit(models, tmp_path):
    assert ppo(models, tmp_path, "--steps", 1, "--kl_coef", 0)[0] == 0
    data = shown(tmp_path / "report.html")
    assert data["beta"] == 0 and "ppo optimality" not in data["result"]["facts"] and len(data["result"]["optimum"]) == 10
    assert set(data["curves"]["ppo"]["paid"]["y"]) == {0}


def test_of_a_run_that_goes_on_the_page_shows_what_is_there(folder):
    for name in ("report.json", "ppo_traces.jsonl", "sft.jsonl", "rm.jsonl"):
        (folder / name).unlink()
        write_page(folder)
    data = shown(folder / "report.html")
    assert data["result"] is None and data["traces"] == [] and data["settings"] == {} and data["beta"] == 0.1
    with open(folder / "ppo.jsonl", "a") as log:
        log.write('{"step": 61, "sco')  # a run is just writing it
    write_page(folder)
    assert shown(folder / "report.html") == data


def test_the_way_of_score_and_kl_is_not_shown_where_the_reference_moves(folder):
    write_jsonl(folder / "ppo_traces.jsonl", [trace(1, settings=SETTINGS | {"ref_update_every": 5})])
    write_page(folder)
    data = shown(folder / "report.html")
    assert data["path"] == data["judged"] == []


def test_an_older_report_without_the_newer_entries_will_do(folder):
    report = {name: x for name, x in REPORT.items() if name not in ("optimum", "ppo_unseen", "best_judge")}
    (folder / "report.json").write_text(json.dumps(report))
    write_page(folder)
    result = shown(folder / "report.html")["result"]
    assert result["optimum"] == [] and result["unseen"] is None and "best possible" not in [row[0] for row in result["rows"]]


# Texts of any kind, and numbers that are none


def test_no_text_can_end_the_script_and_no_number_is_beyond_json(folder):
    rows = [trace(1), trace(10)]
    rows[1]["tracked"][0]["kl"] = [nan, inf, -inf]
    rows[1]["mean"] = nan
    write_jsonl(folder / "ppo_traces.jsonl", rows)
    write_jsonl(folder / "ppo.jsonl", [metric(step) | {"score": nan, "policy_loss": inf} for step in (1, 10, 60)])
    write_page(folder)
    text = (folder / "report.html").read_text(encoding="utf-8")
    template = (ROOT / "plumbing" / "page.html").read_text(encoding="utf-8")
    assert "onerror" in text and text.count("<") == template.count("<") and text.isprintable() is False
    data = shown(folder / "report.html")
    assert data["traces"][0]["tracked"][0]["prompt"] == rows[0]["tracked"][0]["prompt"]  # lone surrogates and all
    assert data["traces"][1]["tracked"][0]["kl"] == [None] * 3 and data["traces"][1]["mean"] is None
    assert "score" not in data["curves"]["ppo"] and "kl" in data["curves"]["ppo"] and data["path"] == []


def test_the_page_asks_the_network_for_nothing_and_its_source_can_be_read(folder):
    template = (ROOT / "plumbing" / "page.html").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"]*", template)) == {"http://www.w3.org/2000/svg"}  # the name of a format
    assert not re.search(r"@import|<link(?! rel=\"icon\" href=\"data:,\")|src=|innerHTML|fetch\(", template.replace("-src ", ""))
    assert "default-src 'none'" in template and template.count("@data@") == 1
    assert max(map(len, template.splitlines())) <= 132


def test_every_condition_and_every_word_of_the_template_is_known_to_its_script():
    template = (ROOT / "plumbing" / "page.html").read_text(encoding="utf-8")
    elements, script = template.split("<script>")
    there = re.search(r"const there = \{(.*?)\};", script, re.S)[1]
    words = re.search(r"const words = \{(.*?)\};", script, re.S)[1]
    known = {f"{part} {name}" for part, names in page.FACTS.items() for name in names}
    for condition in re.findall(r'data-if="([^"]+)"', elements):
        for name in condition.split():
            assert re.search(rf"\b{name.strip('!')}\b", there), name
    for name in re.findall(r'data-fill="([^"]+)"', elements):
        assert name in known or re.search(rf"\b{name}:", words), name


# What can be wrong with the files


def damage(name, text):
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize("spoil, says", [
    (lambda folder: (folder / "ppo.jsonl").unlink(), ["ppo.jsonl", "not there", "train_ppo.py --out"]),
    (damage("ppo.jsonl", ""), ["ppo.jsonl", "empty"]),
    (damage("ppo.jsonl", '{"step": 1}\n{"step": 2\n{"step": 3}\n'), ["ppo.jsonl, line 2", "delete this line, and"]),
    (damage("sft.jsonl", '{"step": 1}\n[1]\n'), ["sft.jsonl, line 2", "delete this line, or the file"]),
    (damage("rm.jsonl", '{"loss": 1}\n'), ["rm.jsonl, line 1", "step"]),
    (damage("rm.jsonl", '{"step": "1"}\n'), ["rm.jsonl, line 1", "step"]),
    (damage("rm.jsonl", "[" * 100_000 + "\n"), ["rm.jsonl, line 1", "step"]),
    (damage("ppo.jsonl", '{"step": 1, "passes": [1]}\n'), ["ppo.jsonl", "damaged", "--overwrite"]),
    (damage("ppo_traces.jsonl", "\xff\n"), ["ppo_traces.jsonl, line 1"]),
    (damage("ppo_traces.jsonl", '{"step": 1}\n'), ["ppo_traces.jsonl", "damaged", "KeyError: 'settings'", "delete it, and"]),
    (damage("ppo_traces.jsonl", json.dumps(trace(1, tracked=[{}])) + "\n"), ["ppo_traces.jsonl", "damaged", "delete it"]),
    (damage("report.json", "{"), ["report.json", "no JSON", "delete it", "makes the page without it"]),
    (damage("report.json", "[]"), ["report.json", "damaged", "delete it"]),
    (damage("report.json", '{"seconds": {"ppo": 30.0}}'), ["report.json", "damaged", "KeyError: 'sft'"]),
])  # fmt: skip
def test_a_file_that_is_missing_or_damaged_is_named_with_what_to_do(folder, spoil, says):
    spoil(folder)
    with pytest.raises(UserError) as refused:
        write_page(folder)
    message = str(refused.value)
    assert message.count("\n") == 0 and str(folder) in message and all(part in message for part in says), message
    assert not (folder / "report.html").exists()


def test_the_command_ends_with_status_2_and_one_line(tmp_path):
    status, printed, error = run("plumbing/page.py", tmp_path / "none")
    assert status == 2 and printed == "" and error.count("\n") == 1
    assert error.startswith("page.py: ") and f"train_ppo.py --out {tmp_path / 'none'}" in error
    status, _, error = run("plumbing/page.py", tmp_path, tmp_path)
    assert status == 2 and "one folder is wanted, not 2" in error


def test_a_run_whose_logs_are_damaged_ends_with_its_report_and_says_what_keeps_the_page_from_being_written(models, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in ("sft.pt", "rm.pt"):
        shutil.copy(models / name, logs)
    (logs / "sft.jsonl").write_text('{"step": 1}\n')
    (logs / "rm.jsonl").write_text('{"step": 1\n')
    status, _, error = ppo(models, tmp_path / "out", "--steps", 1, "--models", logs)
    assert status == 2 and error.startswith("train_ppo.py: ") and f"{logs / 'rm.jsonl'}, line 1" in error
    assert json.loads((tmp_path / "out" / "report.json").read_text())["seconds"].items() >= {"sft": 0.0, "rm": 0.0}.items()
