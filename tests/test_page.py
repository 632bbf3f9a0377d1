"""The specification of plumbing/page.py and page.html. Run: python -m pytest tests/test_page.py

The last test needs the package playwright, and Chromium.
"""

import json
import re
import shutil

import pytest

from cli import ROOT, run
from plumbing.errors import UserError
from plumbing.page import curve, write_page
from bench import screenshot
from runs import BEE, REPORT, RUDE, SETTINGS, metric, response, trace, write_jsonl, write_run
from tiny import inf, nan

TEMPLATE = (ROOT / "plumbing" / "page.html").read_text(encoding="utf-8")
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.S)
NUMBERS = "log_pi log_old log_ref kl reward value return advantage whitened ratio".split()


def shown(folder, models=""):
    """The data in its page, which is written."""
    text = write_page(folder, models).read_text(encoding="utf-8")
    return json.loads(DATA.search(text)[1], parse_constant=pytest.fail)


def short(x):
    return float(f"{x:.5g}")


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "out")


def test_the_page_holds_what_log_traces_and_report_say(folder):
    data, rows = shown(folder), [metric(step) for step in range(1, 61)]
    rows = [row | {f"pass {i}": row["passes"][i - 1]["clip_frac"] for i in (1, 2)} for row in rows]
    names = rows[0].keys() - {"passes"}
    assert data["curves"]["ppo"] == {
        name: {"x": [*range(1, 61)], "y": [short(row[name]) for row in rows]} for name in names
    }
    for stage in ("sft", "rm"):
        assert data["curves"][stage]["val_loss"] == {"x": [3, 50], "y": [9, 0.25]}
    assert data["judge"] == {"x": [1, 10, 50], "y": [0.04, 0.4, 2]} and data["steps"] == 60
    assert data["path"]["kl"][:2] == [0.075, 0.175] and len(data["path"]["kl"]) == 30
    assert data["path"]["score"][-1] == short(0.03 * 59.5)
    data["report"]["ppo_unseen"] = data["report"].pop("unseen")
    assert data["report"] == REPORT
    assert [line["step"] for line in data["traces"]] == [1, 10, 50] and data["settings"] == SETTINGS
    bee, wanted = data["traces"][1]["tracked"][1], response(*BEE, 10)
    assert bee == wanted | {name: [short(x) for x in wanted[name]] for name in NUMBERS}


def test_a_long_log_is_averaged_and_what_is_no_number_left_out():
    rows = [{"step": i, "loss": float(i)} for i in range(1, 1001)]
    x = curve(rows, "loss")
    assert len(x["x"]) == 334 and x["x"][:2] == x["y"][:2] == [2, 5]
    assert x["x"][-1] == x["y"][-1] == 1000 and len(curve(rows, "loss", 40)["x"]) == 40
    assert len(curve(rows[:400], "loss")["y"]) == 400 and curve(rows[:401], "loss")["y"][0] == 1.5
    odd = [{"step": i, "loss": x} for i, x in enumerate((nan, "high", True, None, 0.5))]
    assert curve([{"step": 9}, *odd], "loss") == {"x": [4], "y": [0.5]}


DAMAGED = {
    "report.json": ["{", "[" * 100_000]
    + [
        json.dumps(REPORT | x) for x in ({"ppo": {}}, {"sft": []}, {"samples": [1]}, {"seconds": 1})
    ],
    "ppo_traces.jsonl": ["\xff\n", '{"step": 1}\n']
    + [json.dumps(trace(1, **x)) for x in ({"tracked": [{"tokens": []}]}, {"settings": 1})],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_missing_or_damaged_is_left_out_and_a_line_says_so(folder, capsys, name):
    lacks = {"report": None}
    if name == "ppo_traces.jsonl":
        lacks = {"settings": {}, "traces": [], "judge": {"x": [], "y": []}}
    whole = shown(folder) | lacks
    for text in DAMAGED[name]:
        (folder / name).write_text(text)
        assert shown(folder) == whole
        printed = capsys.readouterr().out
        assert printed.startswith(f"{folder / name}: damaged, or another version's (")
        assert printed.count("\n") == 1 and len(printed) < 300
    (folder / name).unlink()
    assert shown(folder) == whole and capsys.readouterr().out == ""


def test_while_a_run_goes_on_its_page_can_be_written(folder):
    write_jsonl(folder / "ppo.jsonl", [metric(1), metric(2) | {"kl": nan}])
    data = shown(folder)
    assert data["report"] is None and data["steps"] == 2  # the report tells of another run
    assert data["path"] == {"kl": [0.05], "score": [0.03]}
    for name in ("ppo.jsonl", "ppo_traces.jsonl"):
        with open(folder / name, "a") as log:
            log.write('{"step": 61, "sco')  # just being written
    assert shown(folder) == data
    write_jsonl(folder / "ppo_traces.jsonl", [trace(1), trace(2, tracked=[], sampled=[])])
    data = shown(folder)  # an algorithm without responses
    assert [line["step"] for line in data["traces"]] == [1] and data["judge"]["x"] == [1, 2]
    (folder / "ppo.jsonl").write_text("\n{}\n")
    with pytest.raises(UserError, match="ppo.jsonl: not there, or nothing is logged yet"):
        write_page(folder)


def test_the_logs_of_stages_1_and_2_may_be_elsewhere_and_a_function_has_no_curve(folder, tmp_path):
    for name in ("sft.jsonl", "rm.jsonl"):
        (folder / name).rename(tmp_path / name)
    assert shown(folder)["curves"]["sft"] == shown(folder)["curves"]["rm"] == {}
    done = run("plumbing/page.py", folder, "--models", tmp_path)
    assert done == (0, f"wrote {folder / 'report.html'}\n", "")
    written = (folder / "report.html").read_bytes()
    assert shown(folder, tmp_path)["curves"]["rm"]
    assert (folder / "report.html").read_bytes() == written
    write_jsonl(folder / "ppo_traces.jsonl", [trace(1, settings=SETTINGS | {"reward": "my:score"})])
    curves = shown(folder, tmp_path)["curves"]
    assert curves["rm"] == {} and curves["sft"]
    assert "one folder is wanted, not 2" in run("plumbing/page.py", folder, tmp_path)[2]


def test_no_text_ends_the_script_and_no_number_is_beyond_json(folder):
    row = response(*RUDE, 1) | {"kl": [nan, inf, -inf]}
    write_jsonl(folder / "ppo_traces.jsonl", [trace(1, tracked=[row], mean=nan)])
    line = shown(folder)["traces"][0]
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "onerror" in text and text.count("<") == TEMPLATE.count("<")
    assert line["tracked"][0]["prompt"] == RUDE[2]  # lone surrogate and all
    assert line["tracked"][0]["kl"] == [None] * 3 and line["mean"] is None


def test_in_a_browser_everything_is_there_and_a_token_shows_its_numbers(folder):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if not chromium:
        pytest.skip("there is no Chromium here")
    with playwright.sync_playwright() as it:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = it.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": 390, "height": 844})
        troubles, requests = [], set()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: requests.add(request.url))

        def visit(*sections):
            page.goto(write_page(folder).as_uri())
            text = page.inner_text("body")
            bad = re.findall(r"undefined|NaN|\[object|Infinity|null", text)
            assert troubles == bad == [] and "" not in page.locator("[data-fill]").all_inner_texts()
            assert page.evaluate("document.documentElement.scrollWidth") == 390
            assert page.locator("h2").all_inner_texts() == [*sections]
            marks = page.locator(".plot circle, .plot polyline")  # inside their pictures
            for place, plot in marks.evaluate_all(
                "all => all.map(x => [x, x.ownerSVGElement].map(y => y.getBoundingClientRect()))"
            ):
                assert plot["top"] <= place["top"] and place["bottom"] <= plot["bottom"]
            return text, page.locator("h4").all_inner_texts()

        def numbers():
            nodes = page.locator("#detail [data-number]")
            return dict(nodes.evaluate_all("all => all.map(x => [x.dataset.number, x.innerText])"))

        parts = ["The result", "What the score costs", "Token by token", "The curves"]
        text, charts = visit(*parts)
        assert len(charts) == 14 and len(set(charts)) == 13  # "Score" twice
        for words in (
            *("What PPO did", "60 iterations · 8 responses in each · beta 0.1", "SFT 78 s"),
            *(
                "−0.33 ± 0.01",
                "0.987 ± 0.010",
                "best of 4",
                "on the 50 of",
                "0.860 ± 0.010",
                "0.834 ± 0.010",
            ),
            *("0.0088 ± 0.0100", "at 48 tokens loses 1", "pushed up", "A bee.", "% of responses"),
            *("different answers", "0.51 ± 0.01", "SFT loss", "1.93 ± 0.01"),
            *("something of note <b>", "penalty", "what the policy is trained on"),
            *("A frozen copy of the SFT model is the reference", "8 responses in each"),
        ):
            assert words in text, words
        assert "Each token costs" not in text
        ticks = page.locator("#stages .plot").first.locator("text").all_text_contents()
        assert max(float(x) for x in ticks if re.fullmatch(r"[\d.]+", x) and "." in x) < 1
        page.locator("#stop").fill("2")
        assert page.inner_text("#when") == "iteration 50 of 60"
        for row, i, clip in (
            *((0, 0, "pulled back up"), (0, 1, "in between"), (0, 5, "risen enough")),
            *((1, 0, "pulled back down"), (1, 2, "fallen enough")),
        ):
            token = page.locator(".response").nth(row).locator(".token").nth(i)
            token.click()
            texts = {
                name: f"{x[i]:.3f}"
                for name, x in response(*(BEE, RUDE)[row], 50).items()
                if name in NUMBERS
            }
            texts = {name: x.replace("-", "−" if float(x) else "") for name, x in texts.items()}
            assert numbers() == texts | {"clip": clip}
            assert ("clipped" in token.get_attribute("class")) == clip.endswith("enough")
        first, kl, clip = page.locator("#detail li").all_inner_texts()
        assert "earns 0.08" in first and "No token pays" in kl and clip.endswith(", on “alone”.")
        page.locator("details").evaluate("x => x.open = true")
        cells = page.locator("details tr").last.locator("td").all_inner_texts()
        assert cells[0] == "alone" and cells[-1] == "fallen enough" and len(cells) == 12
        for colour in ("kl", "value", "ratio"):
            page.locator("#colour").select_option(colour)
        assert "× " in page.inner_text("#high")
        largest = page.locator(".token").nth(5)
        assert "rgb(var(--up) / 1.000)" in largest.get_attribute("style")
        assert largest.inner_text() == "end"
        screenshot.take(page, folder / "tokens.png")
        assert (folder / "tokens.png").read_bytes()[1:4] == b"PNG"
        assert page.inner_text("#when") == "iteration 10 of 60"
        value = response(*BEE, 10)["value"][0]
        assert numbers()["value"] == f"{value:.3f}".replace("-", "−")
        assert not page.locator("#detail ol").is_visible()
        page.locator("#kind").select_option("sampled")
        assert page.locator(".response").count() == 1
        page.locator("#ppo .plot").nth(1).hover(position={"x": 200, "y": 50})
        keys = " ".join(page.locator("#ppo .keys").nth(1).inner_text().split())
        at = int(re.search(r"iteration (\d+)", keys)[1])
        assert 20 < at < 45 and f"KL {0.05 * at:.2f}" in keys

        (folder / "report.json").unlink()  # a run of another algorithm, that goes on
        write_jsonl(folder / "ppo.jsonl", [metric(1), metric(2)])
        few = {name: x for name, x in response(*BEE, 1).items() if name != "return"}
        more = {"settings": SETTINGS | {"algorithm": "REINFORCE"}, "tracked": []}
        write_jsonl(folder / "ppo_traces.jsonl", [trace(1, sampled=[few], **more)])
        text, charts = visit(*parts[1:])
        assert "What REINFORCE did" in text and "2 of 60 iterations" in text and "Length" in charts
        assert not re.search("PPO|Value loss|was expected", text)
        assert numbers().keys() == {*NUMBERS, "clip"} - {"reward", "value", "return"}
        own = {"algorithm": "DPO", "reference": "last.pt", "length_penalty": 0.5}
        write_jsonl(folder / "ppo_traces.jsonl", [trace(1, settings=SETTINGS | own, sampled=[])])
        sft = REPORT["sft"] | {"penalty": 0.004}
        report = REPORT | {"sft": sft, "seconds": {"ppo": metric(2)["seconds"]}, "notes": []}
        (folder / "report.json").write_text(json.dumps(report))
        text, _ = visit(parts[0], parts[1], parts[3])  # measured at its end, which came early
        for words in (
            *("What DPO did", "2 iterations · 8 pairs in each", "reference model’s score"),
            *("A frozen copy of last.pt", "Each token costs 0.5", "only watched"),
        ):
            assert words in text, words
        assert page.locator("#systems td").first.inner_text() == "reference"
        assert page.locator("#systems th").all_inner_texts()[1:4] == ["judge", "score", "penalty"]
        assert not re.search(
            "PPO|pushed|policy is trained on|higher scores|in score|beta × KL: what", text
        )
        settings = SETTINGS | {"algorithm": "best of n"}
        write_jsonl(folder / "ppo_traces.jsonl", [trace(1, settings=settings, sampled=[])])
        text, _ = visit(parts[0], parts[1], parts[3])
        assert "higher scores" in text and not re.search("PPO|pushed|policy is trained on", text)
        for name in ("ppo_traces.jsonl", "sft.jsonl", "rm.jsonl", "report.json"):
            (folder / name).unlink()
        visit(parts[1], parts[3])
        assert requests == {(folder / "report.html").as_uri()}
        browser.close()
