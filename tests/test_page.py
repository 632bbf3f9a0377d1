"""out/report.html (plumbing/page.py). Run: python -m pytest tests/test_page.py. A test needs
playwright (pip install playwright) and Chromium."""

import json
import re
import shutil

import pytest

import minippo
from cli import ROOT
from plumbing.page import curves, strict, trace_responses, write_page
from plumbing.text import Tokenizer
from tiny import inf, nan, random_batch, tiny_gpt

ODD = 'Who?</script><img src=x onerror="1"> \x07\u202e\ud800'
SAID = {"text": "a\x07b", "score": 1.5, "judge": 0.0, "kl": 2.25}
REPORT = {"table": {"": ["score"], "SFT": ["0.01 ± 0.02"]}, "notes": ["of note"]}
OTHER = {"text": "", "score": 0.25, "judge": 3.0, "kl": -1.0}
REPORT |= {"samples": [{"prompt": ODD, "sft": SAID, "policy": OTHER}]}
SETTINGS = {"steps": 900, "clip_eps": 0.2, "kl_coef": inf}
FIT = "loss", "val_loss", "accuracy", "val_accuracy"
KEYS = """score 200.33score − beta × KL 0.60judge 1.60iteration 601
KL 1.00iteration 601
explained 2.60iteration 601
clip fraction 360.1iteration 601
length 4.6iteration 601
training 29.000validation 29.000step 20
training 0.200validation 1.200step 20
training 220.0validation 320.0step 20""".splitlines()  # the last numbers
REST = "rlhf_reward judge explained_variance clip_frac response_length".split()


def line_of_traces(step):
    """Two responses with the numbers of minippo.trace, the second with the higher score."""
    batch = random_batch(step) | {"logprobs": random_batch(step)["old_logprobs"] + 0.3}
    batch |= minippo.compute_advantages(batch, minippo.PPOConfig())
    rows = [minippo.trace(batch, i, lambda x: "</script>" if x % 2 else " a") for i in (0, 1)]
    rows[0]["reward"][-1] = inf
    likely = [
        [[[" b", 0.5, nan, 0.25], [x, 0.125, 0.0625, 1.0]] for x in y["action"]] for y in rows
    ]
    responses = [
        {"prompt": ODD, "score": i, "columns": row, "likely": likely[i]}
        for i, row in enumerate(rows)
    ]
    return strict({"step": step, "responses": responses})


@pytest.fixture
def folder(tmp_path):
    rm = [{"step": i} | {x: j + i / 100 for j, x in enumerate(FIT)} for i in range(1, 21)]
    sft = [row | dict.fromkeys(FIT[: 1 + (row["step"] % 5 == 0)], 9 + row["step"]) for row in rm]
    ppo = [{"step": i, "score": i / 3, "kl": 1.0, "entropy": None} for i in range(1, 602)]
    ppo = [row | {x: j + row["step"] / 1e3 for j, x in enumerate(REST)} for row in ppo]
    for row in ppo[:3]:
        row["kl"] = None
    traces = [line_of_traces(1), line_of_traces(600)]
    for name, rows in {"sft": sft, "rm": rm, "ppo": ppo, "ppo_traces": traces}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    return tmp_path


def data_in_page(*arguments):
    text = write_page(*arguments).read_text(encoding="utf-8")
    template = (ROOT / "plumbing" / "page.html").read_text(encoding="utf-8")
    assert text.count("<") == template.count("<")  # no text of the data is markup
    return json.loads(re.search(r'id="data">(.*?)<', text)[1], parse_constant=pytest.fail)


def test_the_page_holds_logs_traces_and_report_with_five_digits_and_no_more_points(folder):
    data, traces = (
        data_in_page(folder, folder, SETTINGS, REPORT),
        [line_of_traces(1), line_of_traces(600)],
    )
    assert strict({"a": [1.23456789, nan, 1234567]}, 5) == {"a": [1.2346, None, 1234567]}
    assert strict((0.1 + 0.2, -inf, "é", True)) == [0.1 + 0.2, None, "é", True]
    assert data["steps"] == 601 and data["report"] == REPORT and data["traces"] == strict(traces, 5)
    assert data["settings"] == {"steps": 900, "clip_eps": 0.2, "kl_coef": None}
    score, kl = (data["curves"]["ppo"][x] for x in ("score", "kl"))
    assert data["curves"]["rm"]["loss"] != data["curves"]["sft"]["loss"]
    assert score["x"] == [*range(2, 602, 3), 601] and score["y"][:2] == [0.66667, 1.6667]
    (folder / "round").mkdir()  # the logs of stages 1 and 2 are elsewhere
    curves = data["curves"] | {"ppo": {}}
    assert data_in_page(folder / "round", folder, SETTINGS)["curves"] == curves
    assert len(kl["x"]) == 299 and (kl["x"][0], kl["y"][0]) == (4.5, 1.0)
    (folder / "ppo.jsonl").unlink()  # nothing is logged yet
    data = data_in_page(folder, folder, SETTINGS)
    assert (data["report"], data["steps"], data["curves"]["ppo"]) == (None, 0, {})


def test_a_zero_is_a_point_of_a_curve():
    assert curves([{"step": 1, "x": 0.0}, {"step": 2, "x": None}])["x"] == {"x": [1.0], "y": [0.0]}


def test_a_trace_has_the_prompt_the_likeliest_tokens_and_the_numbers_of_the_batch():
    policy, before, ref = (tiny_gpt() for _ in range(3))
    tokenizer, config = Tokenizer([bytes([65 + i]) for i in range(10)]), minippo.PPOConfig(4)
    batch = minippo.rollout(policy, policy, lambda x, _: x.sum(1), [[1, 2]], config)
    (x,) = trace_responses(batch, before, ref, policy, tokenizer, 0.7)
    mask = batch["mask"]
    now = minippo.evaluate_actions(policy, batch["tokens"], mask, 0.7)[0].detach()
    assert x["columns"] == minippo.trace(batch | {"logprobs": now}, 0, tokenizer.spell)
    assert (x["prompt"], x["score"]) == ("BC", batch["scores"].item())
    states = batch["tokens"][:, :-1]
    chances = [(y(states)[0].detach() / 0.7).softmax(-1)[mask] for y in (before, ref, policy)]
    for i, (action, likely) in enumerate(zip(x["columns"]["action"], x["likely"])):
        order = chances[0][i].argsort(descending=True).tolist()[:3]
        shown = dict.fromkeys([*map(tokenizer.spell, order), action])
        assert [row[0] for row in likely] == [*shown]
        for text, *p in likely:
            j = tokenizer.eos if text == "<eos>" else ord(text) - 65
            assert p == pytest.approx([y[i, j].item() for y in chances], abs=1e-9)


def test_in_a_browser_everything_is_there_and_a_token_shows_its_numbers(folder):
    playwright = pytest.importorskip("playwright.sync_api")
    if not (chromium := shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("there is no Chromium here")
    with playwright.sync_playwright() as it:
        browser = it.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 800})
        troubles = []
        for event in ("console", "pageerror", "requestfailed"):
            page.on(event, lambda x: troubles.append(str(x)))

        def visit(*report):
            page.goto(write_page(folder, folder, SETTINGS, *report).as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") == 390
            text = page.inner_text("body")
            assert troubles == re.findall(r"undefined|NaN|\[object|Infinity|null", text) == []
            return text, page.locator("h2").all_inner_texts()

        text, parts = visit(REPORT)
        assert parts == ["The result", "Token by token", "The curves"]
        for words in ("this run did", "iteration 601 of 900", "0.01 ± 0.02", "of note", "KL 2.25"):
            assert words in text
        assert page.locator("figure .keys").all_text_contents() == KEYS
        assert page.locator("figure polyline").count() == 13
        points = page.locator("#ppo polyline").first.get_attribute("points").split()
        assert float(points[0].split(",")[1]) > float(points[-1].split(",")[1])  # it rises
        losses = page.locator("#stages polyline").first.get_attribute("points").split()
        assert len(losses) == 19  # of 20 steps, without the first tenth
        assert "a\\u0007b" in text
        figures = [
            "before · score 1.50 · judge 0.0 · KL 2.25 nats",
            "after · score 0.25 · judge 3.0 · KL −1.00 nats",
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
            expected = [f"{x[i] or inf:z.3f}" for x in strict(columns, 5).values()] + ["1.350"]
            expected = [x.replace("-", "−").replace("inf", "–") for x in expected]
            assert page.locator("#detail [data-number]").all_inner_texts() == expected
            titles, why = (page.locator(x).all_inner_texts() for x in ("dt", ".why"))
            assert titles == [*columns, "ratio"] and why[titles.index("ratio")] == "pi now / pi"
            cells = page.locator("#likely td").all_inner_texts()
            spelt = page.locator(".response .token[aria-current]").inner_text().strip()
            assert cells[:4] == [" b", "–", "50.0", "25.0"] and cells[5:] == [
                "6.3",
                "12.5",
                "100.0",
            ]
            assert cells[4].strip() == f"{spelt} (sampled)"
        for title, sign in (("KL", -1), ("advantage", 1)):  # blue is what pays
            page.select_option("#colour", title)
            columns = line_of_traces(600)["responses"][1]["columns"]
            up = [sign * x > 0 for x in columns[title]]
            styles = "tokens => tokens.map(x => x.getAttribute('style').includes('--up'))"
            assert page.locator(".response").first.locator(".token").evaluate_all(styles) == up
            ends = page.inner_text("#low")[0], page.inner_text("#high")[0]
            assert ends == (("+", "−") if title == "KL" else ("−", "+"))
        for row in (0, 1):
            columns = line_of_traces(600)["responses"][1 - row]["columns"]
            clipped = [x > 0 for x in columns["advantage"]]  # all ratios are 1.35
            styles = "tokens => tokens.map(x => x.className == 'token clipped')"
            tokens = page.locator(".response").nth(row).locator(".token")
            assert tokens.evaluate_all(styles) == clipped
        assert visit()[1] == ["Token by token", "The curves"]  # while it goes on
        (folder / "ppo_traces.jsonl").unlink()
        assert visit()[1] == ["The curves"]
        browser.close()
