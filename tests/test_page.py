"""out/report.html (plumbing/page.py) and out/minippo.html (plumbing/reading.py). Run: python -m
pytest tests/test_page.py. A test needs playwright (pip install playwright) and Chromium."""

import html
import json
import re
import shutil

import pytest

import minippo
from cli import ROOT, edited, run
from plumbing.page import rounded, write_page
from plumbing.reading import beside
from tiny import inf, nan, random_batch

ODD = 'Who?</script><img src=x onerror="1"> \x07\u202e\ud800'
SAID = {"text": "A bee.", "score": 1.5, "kl": 2.25}
REPORT = {"table": {"": ["score"], "SFT": ["0.01 ± 0.02"]}, "notes": ["of note"]}
OTHER = {"text": "", "score": 0.25, "judge": 3.0, "kl": -1.0}
REPORT |= {"algorithm": "rloo", "samples": [{"prompt": ODD, "sft": SAID, "ppo": OTHER}]}
FIT = "loss", "val_loss", "accuracy", "val_accuracy"
ENDS = """lines => lines.map(x => x.getAttribute("points").split(" "))
    .map(points => [points[0], points.at(-1)].map(x => x.split(",").map(Number)))"""
LOOKS = "tokens => tokens.map(x => [x.className, x.getAttribute('style')])"
KEYS = """score 200.33score − beta × KL 0.60judge 1.60iteration 601
KL 1.00iteration 601
explained 2.60iteration 601
clip fraction 360.1iteration 601
length 4.6iteration 601
ended 560.1iteration 601
value loss 6.601iteration 601
training 29.000validation 29.000step 20
training 0.200validation 1.200step 20
training 220.0validation 320.0step 20""".splitlines()  # the last numbers
REST = "rlhf_reward judge explained_variance clip_frac response_length eos_rate value_loss".split()


def line_of_traces(step):
    """Two responses with the numbers of minippo.trace, the second with the higher score."""
    batch = random_batch(step) | {"logprobs": random_batch(step)["old_logprobs"] + 0.3}
    batch |= minippo.compute_advantages(batch, minippo.PPOConfig())
    rows = [minippo.trace(batch, i, lambda x: "</script>" if x % 2 else " a") for i in (0, 1)]
    rows[0]["reward"][-1] = inf
    responses = [{"prompt": ODD, "score": i, "columns": row} for i, row in enumerate(rows)]
    settings = {"steps": 900, "clip_eps": 0.2, "algorithm": "rloo"}
    return {"step": step, "settings": settings, "responses": responses}


@pytest.fixture
def folder(tmp_path):
    rm = [{"step": i} | {x: j + i / 100 for j, x in enumerate(FIT)} for i in range(1, 21)]
    sft = [row | dict.fromkeys(FIT[: 1 + (row["step"] % 5 == 0)], 9 + row["step"]) for row in rm]
    ppo = [{"step": i, "score": i / 3, "kl": 1.0, "entropy": inf} for i in range(1, 602)]
    ppo = [row | {x: j + row["step"] / 1e3 for j, x in enumerate(REST)} for row in ppo]
    for row in ppo[:3]:
        row["kl"] = nan
    traces = [line_of_traces(1), line_of_traces(600)]
    for name, rows in {"sft": sft, "rm": rm, "ppo": ppo, "ppo_traces": traces}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    return tmp_path


def data_in_page(*given):
    text = write_page(*given).read_text(encoding="utf-8")
    template = (ROOT / "plumbing" / "page.html").read_text(encoding="utf-8")
    assert text.count("<") == template.count("<")  # no text of the data is markup
    return json.loads(re.search(r'id="data">(.*?)<', text)[1], parse_constant=pytest.fail)


def test_the_page_holds_logs_traces_and_report_with_five_digits_and_no_more_points(folder):
    data, traces = data_in_page(folder, "", REPORT), [line_of_traces(1), line_of_traces(600)]
    assert rounded({"a": [1.23456789, nan, 1234567]}) == {"a": [1.2346, None, 1234567]}
    assert data["steps"] == 601 and data["report"] == REPORT and data["traces"] == rounded(traces)
    score, kl = (data["curves"]["ppo"][x] for x in ("score", "kl"))
    assert data["curves"]["rm"]["loss"] != data["curves"]["sft"]["loss"]
    assert score["x"] == [*range(2, 602, 3), 601] and score["y"][:2] == [0.66667, 1.6667]
    (folder / "round").mkdir()  # the logs of stages 1 and 2 are elsewhere
    assert data_in_page(folder / "round", folder)["curves"] == data["curves"] | {"ppo": {}}
    assert len(kl["x"]) == 299 and (kl["x"][0], kl["y"][0]) == (4.5, 1.0)
    (folder / "ppo.jsonl").unlink()  # nothing is logged yet
    data = data_in_page(folder)
    assert (data["report"], data["steps"], data["curves"]["ppo"]) == (None, 0, {})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser_everything_is_there_and_a_token_shows_its_numbers(folder, scheme):
    playwright = pytest.importorskip("playwright.sync_api")
    if not (chromium := shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("there is no Chromium here")
    with playwright.sync_playwright() as it:
        browser = it.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
        troubles = []
        for event in ("console", "pageerror", "requestfailed"):
            page.on(event, lambda x: troubles.append(str(x)))

        def visit(*given):
            page.goto(write_page(folder, "", *given).as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") == 390
            text = page.inner_text("body")
            assert troubles == re.findall(r"undefined|NaN|\[object|Infinity|null", text) == []
            return text, page.locator("h2").all_inner_texts()

        text, parts = visit(REPORT)
        assert parts == ["The result", "Token by token", "The curves"]
        for words in ("RLOO did", "iteration 601 of 900", "0.01 ± 0.02", "of note", "KL 2.25"):
            assert words in text
        assert page.locator("figure .keys").all_text_contents() == KEYS
        ends = page.locator("figure polyline").evaluate_all(ENDS)
        assert len(ends) == 15 and all(x < x2 and y >= y2 for (x, y), (x2, y2) in ends)  # up
        figures = [
            "SFT · score 1.50 · KL 2.25 nats",
            "RLOO · score 0.25 · judge 3.0 · KL −1.00 nats",
        ]
        assert page.locator(".pair .small").all_inner_texts() == figures
        scale = page.inner_text("#high")
        page.locator("#stop").fill("1")
        assert page.inner_text("#when") == "iteration 600"
        assert page.inner_text("#high") == scale  # one for all iterations
        for row, i in ((0, 1), (1, -1)):  # the highest score first
            columns = line_of_traces(600)["responses"][1 - row]["columns"]
            tokens = page.locator(".response").nth(row).locator(".token")
            assert tokens.count() == len(columns.pop("action"))
            tokens.nth(i).click()
            wanted = [f"{x[i] or inf:z.3f}" for x in rounded(columns).values()] + ["1.350"]
            wanted = [x.replace("-", "−").replace("inf", "–") for x in wanted]
            assert page.locator("#detail [data-number]").all_inner_texts() == wanted
            why = dict(
                zip(page.locator("dt").all_inner_texts(), page.locator(".why").all_inner_texts())
            )
            for title, words in (
                ("credit", "down up"),
                ("KL", "less more"),
                ("advantage", "worse better"),
            ):
                assert words.split()[columns[title][i] > 0] in why[title].split()
            assert why["ratio"] == "pi now / pi: 35.0 % more probable"
        lines = rounded([line_of_traces(1), line_of_traces(600)])
        for title, sign in (("KL", -1), ("credit", 1)):  # blue is what pays
            page.select_option("#colour", title)
            rows = [x["columns"] for line in lines for x in line["responses"]]
            sizes = sorted(abs(x) for row in rows for x in row[title])
            scale, looks = sizes[int(0.95 * (len(sizes) - 1))], []
            for x, credit in (
                (x, y) for row in rows[:1:-1] for x, y in zip(row[title], row["credit"])
            ):
                colour = (
                    f"rgb(var(--{'up' if sign * x > 0 else 'down'}) / {min(1, abs(x) / scale):.3f})"
                )
                looks.append(["token clipped" if credit > 0 else "token", f"background: {colour}"])
            assert page.locator(".response .token").evaluate_all(LOOKS) == looks  # ratios of 1.35
        assert visit()[1] == ["Token by token", "The curves"]  # while it goes on
        (folder / "ppo_traces.jsonl").unlink()
        assert visit()[1] == ["The curves"]
        browser.close()


def test_an_edit_of_gae_is_shown_beside_it_in_minippo_with_its_numbers(tmp_path):
    delta = "delta = rewards[:, t] + gamma * next_value - values[:, t]"
    with edited(tmp_path, ("minippo.py", delta, delta.replace("- v", "- 2 * v"))):
        assert run("plumbing/reading.py", root=tmp_path)[0] == 0
    page = (tmp_path / "out" / "minippo.html").read_text(encoding="utf-8").split("</p>")[1]
    text, at = html.unescape(re.sub("<[^>]*>", "", page)), 0
    for i, line in enumerate((tmp_path / "minippo.py").read_text().splitlines(), 1):
        at = text.index(f"\n{i}{line}", at)
    for line in (
        "delta = *delta 0.00 | -1.02 | -0.78 | -0.65 | 0.80",
        "rewards[torch.arange*rewards 0.00 -0.05 0.02 1.38 0.00",  # changed in place
        "rewards, values = *rewards 0.00 -0.05 0.02 1.38 0.00",  # looks as before
        "margin = *margin 1.20",
        "for t in reversed*t 4 | 3 | 2 | 1 | 0",
        "return (action >= *-> x x x x . . . / . x x x x x x",
        "ratio = *ratio 1.28 1.11 0.74",
        "lengths[rows] += *lengths 2 2 | 3 3 | 4 4 | 5 5 | 5 6 | 5 7 | 5 8",
    ):
        assert re.search(re.escape(line).replace(r"\*", ".*") + "\n", text), line
    assert beside([{"a": str(i)} for i in range(9)]) == [("a", "0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | …")]
    assert re.findall(r"\n\d+def (\w+)\(.*:\n", text) == ["frozen_copy", "main"]  # no numbers
