"""out/report.html (plumbing/page.py). Two tests need playwright and Chromium."""

import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest

import minippo
from cli import ROOT
from data.files import read_log, write_jsonl
from plumbing import page as module
from plumbing.page import json_safe
from tiny import inf, random_batch

ODD = "Who?</script><img src=x>\n\x07\u202e\ud800"
SPELT = r"Who?</script><img src=x>↵ \u0007\u202e\ud800"
BEFORE = {"text": "a\x07b", "score": 1.5, "judge": 0.0, "kl": 2.25}
REPORT = {"table": {"": ["score"], "SFT": ["0.01 ± 0.02"]}, "notes": ["of note"]}
REPORT["samples"] = [{"prompt": ODD, "sft": BEFORE, "policy": {"text": " ", "kl": -0.001}}]
SETTINGS = {"steps": 900, "batch_size": 8, "kl_coef": 0.1, "lr": inf, "seed": 0}
STAGE = "loss", "val_loss", "accuracy", "val_accuracy"
PPO = "judge", "explained_variance", "clip_frac", "response_length"
# Title, the last number of each curve, the highest, the lowest, the first step and the last
FIGURES = """Score|score 600|score − beta × KL −598|judge 0.601|600|−598|2 to 601
KL|KL 1|1|1|5 to 601
Explained variance|explained 1.6|
Clip fraction|clip fraction 2.6|
Length|length 3.6|
SFT: loss|training 20|validation 21|21|2|2 to 20
Reward model: loss|training 0.2|validation 1.2|1.2|0.01|1 to 20
Reward model: accuracy|training 2.2|validation 3.2|"""


def line_of_traces(step):
    """Two responses with the numbers of minippo.trace, the second with the higher score."""
    batch = random_batch(step)
    batch |= minippo.compute_advantages(batch, minippo.PPOConfig())
    batch["logprobs"] = batch["old_logprobs"] + 0.3
    responses = []
    for i in (0, 1):
        columns = minippo.trace(batch, i, lambda x: "</script>" if x % 2 else " a")
        columns["reward"][-1] = inf
        likely = [[["\n", 0.5, 0.03, 0.25], [x, 0.12, 0.06, 1.0]] for x in columns["action"]]
        responses.append({"prompt": ODD, "score": i, "columns": columns, "likely": likely})
    return json_safe({"step": step, "responses": responses}, 5)


@pytest.fixture
def folder(tmp_path):
    ppo = [
        {"step": i, **{x: j + i / 1e3 for j, x in enumerate(PPO)}}
        | {"score": i - 1, "rlhf_reward": 3 - i, "kl": 1.0 if i > 3 else None, "entropy": None}
        for i in range(1, 602)
    ]
    steps = range(1, 21)
    sft = [{"step": i, "loss": i, "val_loss": None if i % 5 else i + 1} for i in steps]
    rm = [{"step": i} | {x: j + i / 100 for j, x in enumerate(STAGE)} for i in steps]
    traces = [line_of_traces(1), line_of_traces(600)]
    for name, rows in {"sft": sft, "rm": rm, "ppo": ppo, "ppo_traces": traces}.items():
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    return tmp_path


def write_page(out, models, settings, *report):
    config = SimpleNamespace(out=out, models=models)
    return module.write_page(SimpleNamespace(config=config, settings=settings), *report)


def data_in_page(*arguments):
    text = write_page(*arguments).read_text(encoding="utf-8")
    template = (ROOT / "plumbing" / "page.html").read_text(encoding="utf-8")
    assert text.count("<") == template.count("<")  # no text of the data is markup
    return json.loads(re.search(r'id="data">(.*?)<', text)[1], parse_constant=pytest.fail)


def test_the_page_holds_logs_traces_and_report(folder):
    data = data_in_page(folder, folder, SETTINGS, REPORT)
    assert data["steps"] == 601 and data["report"] == REPORT
    assert data["settings"] == SETTINGS | {"lr": None}
    assert data["traces"] == [line_of_traces(1), line_of_traces(600)]
    sft, rm, ppo = data["curves"].values()
    assert ppo["score"] == [*([3 * i + 2, 3 * i + 1] for i in range(200)), [601, 600]]
    assert ppo["kl"] == [[2 * i + 4.5, 1] for i in range(299)]
    assert sft["val_loss"] == [[i, i + 1] for i in (5, 10, 15, 20)] and len(rm["loss"]) == 20
    (folder / "round").mkdir()  # the logs of stages 1 and 2 are elsewhere, and PPO has none yet
    data |= {"steps": 0, "report": None, "traces": []}
    data["curves"]["ppo"] = {}
    assert data_in_page(folder / "round", folder, SETTINGS) == data


@pytest.fixture
def page():
    """A page as wide as a phone, in a browser that reports any trouble."""
    playwright, troubles = pytest.importorskip("playwright.sync_api"), []
    if not (chromium := shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("there is no Chromium here")
    with playwright.sync_playwright() as it:
        browser = it.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 800})
        for event in ("console", "pageerror", "requestfailed"):
            page.on(event, lambda x: troubles.append(str(x)))
        yield page
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        text = page.inner_text("body")
        assert troubles == re.findall(r"undefined|NaN|\[object|Infinity", text) == []
        browser.close()


def test_a_browser_shows_the_report_and_the_curves(folder, page):
    def visit(*report):
        page.goto(write_page(folder, folder, SETTINGS, *report).as_uri())
        return page.locator("h2").all_inner_texts()

    assert visit(REPORT) == ["The result", "Token by token", "The curves"]
    facts = "iteration 601 of 900 · batch_size 8 · kl_coef 0.1 · lr null · seed 0"
    assert page.inner_text("#facts") == facts and page.inner_text("#notes") == "of note"
    assert page.locator("#systems tr").all_inner_texts() == ["\tscore", "SFT\t0.01 ± 0.02"]
    before = r"before · score 1.50 · judge 0.00 · kl 2.25 a\u0007b"
    sample = f"{SPELT} {before} after · kl 0.00 (nothing)"
    assert page.inner_text(".pair").split() == sample.split()
    texts = "x => [...x.querySelectorAll('h4, span, div:not(:has(*))')].map(x => x.textContent)"
    for figure, expected in zip(page.locator("figure").all(), FIGURES.split("\n"), strict=True):
        assert "|".join(figure.evaluate(texts)).replace("■ ", "").startswith(expected)
    for i, end in enumerate(("100,0", "100,100")):  # one rises, one falls
        points = page.locator("polyline").nth(i).get_attribute("points").split()
        assert len(points) == 201 and points[0].startswith("0,") and points[-1] == end
    write_jsonl(folder / "ppo.jsonl", read_log(folder / "ppo.jsonl")[:1])  # curves of one point
    assert visit() == ["Token by token", "The curves"]
    (folder / "ppo_traces.jsonl").unlink()  # trained by other code
    assert visit() == ["The curves"] and page.locator("figure").count() == 7  # no KL


def test_a_browser_shows_a_response_token_by_token(folder, page):
    page.goto(write_page(folder, folder, SETTINGS).as_uri())
    assert page.inner_text("#when") == "iteration 1"
    assert page.get_attribute("#stop", "max") == "1"
    page.locator("#stop").fill("1")
    assert page.inner_text("#when") == "iteration 600"

    def say(x, digits):
        return "–" if x is None else f"{x:z.{digits}f}".replace("-", "−")

    responses = line_of_traces(600)["responses"][::-1]  # the highest score first
    assert page.locator(".token").first.get_attribute("aria-current")
    largest = max(abs(x) for r in responses for x in r["columns"]["advantage"])
    for shown, r in zip(page.locator(".response").all(), responses, strict=True):
        columns, tokens = r["columns"], shown.locator(".token")
        kl = say(sum(columns["KL"]), 2)
        assert f"{SPELT} score {r['score']}.00 · kl {kl}" in " ".join(shown.inner_text().split())
        styles = " ".join(tokens.evaluate_all("xs => xs.map(x => x.getAttribute('style'))"))
        colours = re.findall(r"--(\w+)\) ([\d.]+)%", styles)
        strengths = [float(x) if colour == "blue" else -float(x) for colour, x in colours]
        assert strengths == pytest.approx([70 * x / largest for x in columns["advantage"]])
        actions = columns.pop("action")
        columns["ratio"] = [math.exp(0.3)] * len(actions)
        tokens.last.click()
        assert page.locator("[aria-current]").all_inner_texts() == [tokens.last.inner_text()]
        rows = [x.split("\t")[:2] for x in shown.locator("#numbers tr").all_inner_texts()]
        assert rows == [[title, say(x[-1], 3)] for title, x in columns.items()]
        likely = ["", "before", "ref", "after", "↵\n", "50.0", "3.0", "25.0"]
        likely += [f"{actions[-1]} (sampled)", "12.0", "6.0", "100.0"]
        assert shown.locator("#likely th, #likely td").all_text_contents() == likely

    line = line_of_traces(1)  # of DPO
    for response in line["responses"]:
        del response["columns"]["advantage"]
    write_jsonl(folder / "ppo_traces.jsonl", [line])
    page.goto(write_page(folder, folder, SETTINGS).as_uri())
    assert page.locator("figure").count() == 8
