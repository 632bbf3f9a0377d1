"""The page of a run in a browser: numbers, slider, colours, keyboard, phone. Run: python -m pytest tests/test_browser.py

Needs playwright (pip install playwright) and Chromium (Debian: apt-get install chromium); .ci/run installs both if it can.
"""

import json
import os
import re
import shutil

import pytest

from plumbing.page import write_page
from runs import BEE, REPORT, RUDE, SETTINGS, STOPS, response, trace, write_jsonl, write_run

if not os.environ.get("NO_SKIP"):
    pytest.importorskip("playwright.sync_api")
from playwright.sync_api import sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if not CHROMIUM:
    pytest.skip("there is no Chromium here (Debian: apt-get install chromium)", allow_module_level=True)

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
NUMBERS = ("log_pi", "log_old", "log_ref", "kl", "reward", "value", "return", "advantage", "whitened", "ratio")


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as it:
        chromium = it.chromium.launch(executable_path=CHROMIUM, args=FLAGS)  # its profile is a new, empty folder
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser):
    """visit(folder) writes its page and opens it; whatever goes wrong there, or leaves the page, fails the test."""
    troubles, contexts = [], []

    def visit(folder, size=WIDE, scheme="light", **more):
        path = write_page(folder)
        contexts.append(browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce", **more))
        page = contexts[-1].new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: troubles.append(request.url) if request.url != path.as_uri() else None)
        page.set_default_timeout(5000)
        page.goto(path.as_uri())
        text = page.inner_text("body")
        assert not re.search(r"undefined|NaN|\[object|Infinity|null", text)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert troubles == []


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path)


def numbers(page):
    """What the panel shows of the token that is looked at: {name in the file: text}."""
    nodes = page.locator("#panel [data-number]")
    return dict(nodes.evaluate_all("nodes => nodes.map(node => [node.dataset.number, node.textContent])"))


def minus(text):
    """As numbers are written on the page: with a minus sign that is one, and without it before 0."""
    return text.replace("-", "" if float(text) == 0 else "−")


def as_shown(response, i):
    """What numbers() should be, from the file."""
    return {name: minus(f"{response[name][i]:.3f}") for name in NUMBERS} | {"clip": response["clip"][i]}


def token(page, row, i):
    return page.locator(f'.token[data-row="{row}"][data-token="{i}"]')


def at(page):
    """-> row and token that are looked at; that token alone can be reached with the Tab key."""
    looked_at, reached = (
        page.locator(f".token[{attribute}]").evaluate_all("nodes => nodes.map(node => [+node.dataset.row, +node.dataset.token])")
        for attribute in ("aria-current", 'tabindex="0"')
    )
    assert len(looked_at) == 1 and looked_at == reached
    return tuple(looked_at[0])


def test_the_numbers_of_a_token_are_those_of_the_file_whether_it_is_clicked_pointed_at_or_reached_by_key(folder, visit):
    page = visit(folder)
    bee, rude = (response(*x, 1) for x in (BEE, RUDE))  # the highest score stands first
    assert page.locator(".response").count() == 2 and at(page) == (0, 0)
    assert [node.get_attribute("aria-label") for node in page.locator(".response").all()] == ["response 1", "response 2"]
    assert token(page, 0, 5).get_attribute("aria-label") == f"token 6, the end token, advantage {bee['advantage'][5]:.2f}, clipped"
    assert page.locator("#panel h3").inner_text() == "Token 1 of 6: “A”" and numbers(page) == as_shown(bee, 0)
    for i in range(6):
        token(page, 0, i).click()
        assert at(page) == (0, i) and numbers(page) == as_shown(bee, i)
    assert page.locator("#panel h3").inner_text() == "Token 6 of 6: the end token"
    token(page, 1, 2).hover()
    assert at(page) == (0, 5) and numbers(page) == as_shown(rude, 2)
    page.locator("h2").first.hover()
    assert numbers(page) == as_shown(bee, 5)
    keys = "Home ArrowRight ArrowRight ArrowDown ArrowRight ArrowLeft ArrowDown ArrowUp End ArrowDown ArrowUp Home ArrowLeft"
    to = [(0, 0), (0, 1), (0, 2), (1, 2), (1, 2), (1, 1), (1, 1), (0, 1), (0, 5), (1, 2), (0, 2), (0, 0), (0, 0)]
    for key, place in zip(keys.split(), to, strict=True):
        page.keyboard.press(key)
        assert at(page) == place and numbers(page) == as_shown((bee, rude)[place[0]], place[1]), key
        assert page.evaluate("document.activeElement.dataset.token") == str(place[1])


def test_the_tab_key_goes_through_slider_responses_colours_and_tokens(folder, visit):
    page = visit(folder)
    page.locator("#stop").focus()
    seen = []
    for _ in range(4):
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.name || document.activeElement.className"))
        page.keyboard.press("Tab")
    assert seen == ["stop", "kind", "colour", "token"]


def test_the_slider_goes_through_training_by_mouse_and_by_keyboard(folder, visit):
    page = visit(folder)
    stop, when = page.locator("#stop"), page.locator("#when")
    assert page.locator("#stops").inner_text().split() == ["1", "10", "50"] and when.inner_text() == "iteration 1 of 60"
    stop.scroll_into_view_if_needed()
    box = stop.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 8, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, middle, steps=3)
    assert when.inner_text() == "iteration 10 of 60" and numbers(page) == as_shown(response(*BEE, 10), 0)
    page.mouse.move(box["x"] + box["width"] - 2, middle, steps=3)
    page.mouse.up()
    assert when.inner_text() == "iteration 50 of 60" and numbers(page) == as_shown(response(*BEE, 50), 0)
    token(page, 1, 1).click()
    stop.focus()
    for key, step in (("Home", 1), ("ArrowRight", 10), ("ArrowRight", 50), ("ArrowLeft", 10), ("End", 50)):
        page.keyboard.press(key)
        assert when.inner_text() == f"iteration {step} of 60" and stop.get_attribute("aria-valuetext") == f"iteration {step}"
        assert at(page) == (1, 1) and numbers(page) == as_shown(response(*RUDE, step), 1)
        assert page.evaluate("document.activeElement.id") == "stop"


NAMES = {(84, 154, 214): "blue", (236, 142, 58): "orange", (28, 92, 156): "blue", (156, 76, 12): "orange"}


def colours(page):
    """The tints of all tokens: -> [row][token] of blue or orange, and the strength from 0 to 1."""
    tints = page.locator(".tokens").evaluate_all(
        "rows => rows.map(row => [...row.querySelectorAll('.token')].map(node => getComputedStyle(node).backgroundColor))"
    )
    numbers = [[[*map(float, re.findall(r"[\d.]+", tint))] for tint in row] for row in tints]
    return [[(NAMES[tuple(x[:3])], (*x, 1.0)[3]) for x in row] for row in numbers]


def expected_colours(of):
    """The same from the numbers that a colour stands for; full at the 95th percentile of all iterations and responses."""
    everything = [response(*x, step) for step in STOPS for x in (RUDE, BEE, BEE)]  # tracked, and sampled
    sizes = sorted(abs(x) for row in everything for x in of(row))
    scale = max(sizes[int(0.95 * (len(sizes) - 1))], 1e-3)

    def tint(x):
        return "blue" if x > 0 else "orange", min(1, abs(x) / scale)

    return [[tint(x) for x in of(response(*row, 50))] for row in (BEE, RUDE)]


MODES = {
    "advantage": (lambda row: row["advantage"], "worse than expected", "better than expected"),
    "kl": (lambda row: [-x for x in row["kl"]], "more probable than in the reference", "less probable"),
    "value": (lambda row: row["value"], "little is expected", "much is expected"),
    "ratio": (lambda row: [a - b for a, b in zip(row["log_pi"], row["log_old"])], "less probable than before", "more probable"),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colours_show_advantage_kl_value_or_ratio_chosen_by_mouse_or_by_keyboard(folder, visit, scheme):
    page = visit(folder, scheme=scheme)
    page.locator("#stop").focus()
    page.keyboard.press("End")

    def assert_coloured_by(mode):
        of, low, high = MODES[mode]
        for shown, wanted in zip(colours(page), expected_colours(of), strict=True):
            for (colour, strength), (right, size) in zip(shown, wanted, strict=True):
                assert strength == pytest.approx(size, abs=0.006) and (colour == right or size < 0.01)
        assert low in page.locator("#low").inner_text() and high in page.locator("#high").inner_text()
        assert page.locator("input[name=colour]:checked").get_attribute("value") == mode

    assert_coloured_by("advantage")
    if scheme == "dark":
        return
    for name, mode in (("ratio", "ratio"), ("KL", "kl"), ("value", "value"), ("advantage", "advantage")):
        page.locator("#colours label", has_text=re.compile(f"^{name}$")).click()
        assert_coloured_by(mode)
    for mode in ("kl", "value", "ratio", "advantage"):
        page.keyboard.press("ArrowRight")
        assert_coloured_by(mode)


def test_the_ends_of_the_scale_are_numbers(folder, visit):
    page = visit(folder)
    sizes = sorted(abs(x) for step in STOPS for row in (RUDE, BEE, BEE) for x in response(*row, step)["advantage"])
    size = f"{float(f'{sizes[int(0.95 * (len(sizes) - 1))]:.2g}'):g}"
    assert page.locator("#low").inner_text() == f"−{size}: worse than expected"
    assert page.locator("#high").inner_text() == f"+{size}: better than expected"


def test_tokens_on_which_the_clip_acts_have_a_bar(folder, visit):
    page = visit(folder)
    for stop, step in enumerate(STOPS):
        page.locator("#stop").fill(str(stop))
        for row, x in enumerate((BEE, RUDE)):
            clip = response(*x, step)["clip"]
            tokens = page.locator(f'.token[data-row="{row}"]')
            barred = tokens.evaluate_all("nodes => nodes.map(node => node.classList.contains('clipped'))")
            assert barred == [case in ("risen enough", "fallen enough") for case in clip]
    assert {case for step in STOPS for x in (BEE, RUDE) for case in response(*x, step)["clip"]} == {
        "in between", "risen enough", "fallen enough", "pulled back up", "pulled back down"}  # fmt: skip


def test_three_sentences_say_why_the_first_token_has_its_advantage_who_paid_the_most_kl_and_where_the_clip_acts(folder, visit):
    page = visit(folder)
    page.locator("#stop").fill("2")
    bee = response(*BEE, 50)
    paid, returned, value, advantage = abs(0.1 * sum(bee["kl"])), *(bee[name][0] for name in ("return", "value", "advantage"))
    first, second, clip = page.locator("#story li").all_inner_texts()
    assert first == (
        f"The first token, “A”, has an advantage of +{advantage:.2f}. Its return is {returned:.2f}: a return counts everything "
        "that comes from its token on, and the score, 2.00, comes with the last token, while the KL on the way costs "
        f"{paid:.2f}. But before this token a value of {value:.2f} was expected, and "
        f"{returned:.2f} − {value:.2f} = {advantage:.2f}."
    )
    most = max(bee["kl"])
    assert bee["kl"].index(most) == 1
    assert second == f"The most KL has token 2, “bee”: {most:.2f} nats, and pays 0.1 × {most:.2f} = {0.1 * most:.3f} for it."
    assert clip == (
        "The clip acts on 4 of 6 tokens: “eats”, “nectar”, “.”, the end token. After this iteration their ratio is beyond 0.8 "
        "or 1.2, on the side to which the advantage pushes. Further steps on this batch would not push on."
    )
    token(page, 1, 0).click()
    rude = response(*RUDE, 50)
    first, second, clip = page.locator("#story li").all_inner_texts()
    earned = abs(0.1 * sum(rude["kl"]))
    assert first.startswith(f"The first token, “Leave”, has an advantage of −{-rude['advantage'][0]:.2f}. Its return is −")
    assert f"the score, −1.50, comes with the last token, while the KL on the way earns {earned:.2f}. " in first
    assert second == "No token pays for KL: none is more probable than in the reference."
    assert clip.startswith("The clip acts on 1 of 3 tokens: “alone”. ")
    page.locator("#stop").fill("0")
    rude = response(*RUDE, 1)
    low, high = min(rude["ratio"]), max(rude["ratio"])
    assert page.locator("#story li").all_inner_texts()[2] == (
        f"The clip acts on no token: the ratios are between {low:.2f} and {high:.2f}, and none is beyond 0.8 or 1.2 on the side to "
        "which its advantage pushes. (One beyond them on the other side is pushed back.)"
    )
    page.locator("#story summary").click()
    cells = [row.split("\t") for row in page.locator("#numbers tbody").inner_text().splitlines()]
    assert len(cells) == 3 and [row[0].strip() for row in cells] == ["Leave", "me", "alone"]
    for i, row in enumerate(cells):
        assert row[1:] == [minus(f"{rude[name][i]:.2f}") for name in NUMBERS] + [rude["clip"][i]]


def test_the_numbers_come_with_their_reasons(folder, visit):
    page = visit(folder)
    page.locator("#stop").fill("2")
    bee = response(*BEE, 50)

    def reasons():
        return [x.replace("−", "-") for x in page.locator("#panel dd.why").all_inner_texts()]

    first = reasons()
    assert first[0].endswith("the policy gives it 32 %") and first[1].endswith(": 49 %") and first[2].endswith(": 37 %")
    assert first[3].endswith("more probable than in the reference")
    assert first[4] == f"the price of the KL, -0.1 × {bee['kl'][0]:.2f}; the score comes at the last token only"
    assert first[6] == "all rewards from this token to the last, added up"
    assert first[7] == f"return less value, {bee['return'][0]:.2f} - 0.50: better than expected"
    assert first[8].startswith(f"({bee['advantage'][0]:.2f} - 0.25) / 0.50: ")
    assert first[9] == f"pi / old: the token is now {100 * (1 - bee['ratio'][0]):.1f} % less probable"
    assert first[10] == "below 0.8, moved there by other tokens, but its own advantage says up: not clipped"
    token(page, 0, 5).click()
    last = reasons()
    assert last[3].endswith("less probable than in the reference")
    assert last[4] == f"the price of the KL, -0.1 × {bee['kl'][5]:.2f}, and here, at the last token, the score, 2.00"
    assert last[9].endswith("% more probable") and last[10].startswith("clipped: above 1.2 already")
    token(page, 0, 1).click()
    assert reasons()[9].endswith("no more and no less probable")
    assert reasons()[10] == "the ratio is between 0.8 and 1.2: nothing is clipped"
    token(page, 1, 2).click()
    assert reasons()[10].startswith("clipped: below 0.8 already") and ": worse than expected" in reasons()[7]
    token(page, 1, 0).click()
    assert reasons()[10].startswith("above 1.2, moved there by other tokens") and reasons()[8].startswith("(-1.92 - 0.25) / 0.50: ")


def test_new_responses_of_an_iteration_take_the_place_of_the_tracked_ones(folder, visit):
    page = visit(folder)
    token(page, 1, 2).click()
    page.locator("#kinds label").nth(1).click()
    assert page.locator(".response").count() == 1 and at(page) == (0, 2)
    assert "were sampled in this iteration" in page.inner_text("#explain")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".response").count() == 2 and "sampled in iteration 1." in page.inner_text("#explain")


def test_above_each_response_stand_its_score_and_how_often_it_is_written(folder, visit):
    page = visit(folder)
    bee, rude = page.locator(".response .small").all_inner_texts()
    odds = sum(response(*BEE, 1)["log_old"])
    assert bee.startswith("score 2.00 · judge 2.5 · KL 0.06 nats · the policy writes it once in ")
    assert int(bee.split("once in ")[1].removesuffix(" tries").replace(",", "")) == pytest.approx(2.718281828**-odds, abs=1)
    share = 100 * 2.718281828 ** sum(response(*RUDE, 1)["log_old"])
    assert rude == f"score −1.50 · judge −1.0 · KL −0.12 nats · the policy writes it {share:.1f} % of the time"


# The rest of the page


def test_the_table_and_the_facts_are_those_of_the_report(folder, visit):
    page = visit(folder)
    rows = [row.replace("−", "-").split("\t") for row in page.locator("#systems").inner_text().splitlines()]
    assert rows[0][1:] == ["judge", "score", "KL, nats", "ended", "length, tokens"]
    assert rows[1] == ["SFT", "-0.33 ± 0.04", "-0.01 ± 0.03", "0.00 ± 0.00", "1.000 ± 0.000", "9.90 ± 0.09"]
    assert [row[0] for row in rows[1:]] == ["SFT", "best of 4", "best of 16", "PPO", "PPO, unseen", "best possible"]
    assert rows[2][4:] == ["–", "–"] and rows[5][1] == "–" and rows[6][1] == "3.00"
    text = page.inner_text("body")
    for said in ("Optimality 0.860 ± 0.011", "score − 0.1 × KL", "on the unseen prompts 0.834 ± 0.015", "Wins 0.906 ± 0.005",
                 "on the 50 of these prompts", "cut off at 48 tokens loses 1 of score", "a nat costs 0.1 of score",
                 "Gap of SFT 0.0207 ± 0.0017", "Gap of the reward model 0.0088 ± 0.0026"):  # fmt: skip
        assert said in text, said
    facts = "60 iterations, 8 responses in each, beta 0.1, learning rate 0.0006, seed 0, SFT 78 s, reward model 2 min, PPO 30 s"
    assert page.inner_text("#facts") == facts.replace(", ", " · ")
    assert page.locator(".pair").all_inner_texts() == [
        "What does a bee eat?\nSFT model · score −0.50 · judge −1.5\nBees </script> bamboo.\n"
        "PPO · score 1.50 · judge 2.0 · KL 2.50\nA bee eats nectar."]  # fmt: skip


def readings(page, title):
    """The numbers of a chart at its cursor: {name: text}, and where the cursor is."""
    figure = page.locator("figure", has=page.locator("h4", has_text=re.compile(f"^{re.escape(title)}$"))).last
    keys = figure.locator(".keys > span").all_inner_texts()
    return dict(re.fullmatch(r"\s*(.+) (\S+)", key).groups() for key in keys[:-1]), keys[-1]


def test_the_curves_can_be_read_at_their_end_and_wherever_the_cursor_is(folder, visit):
    page = visit(folder)
    assert readings(page, "Score") == ({"score": "1.80", "score − beta × KL": "1.50", "judge": "2.00"}, "iteration 60")
    assert readings(page, "KL") == ({"KL": "3.00", "beta × KL": "0.30"}, "iteration 60")
    assert readings(page, "Clip fraction") == ({"pass 1": "6.0", "pass 2": "12.0"}, "iteration 60")
    assert readings(page, "Explained variance") == ({"explained": "0.60", "a constant": "0.00"}, "iteration 60")
    assert readings(page, "Length")[0] == {"length": "70.0"} and readings(page, "Ended")[0] == {"ended": "75.0"}
    assert readings(page, "Value loss")[0] == {"value loss": "0.050"} and readings(page, "Entropy")[0] == {"entropy": "0.02"}
    assert readings(page, "Policy loss")[0] == {"policy loss": "−0.001"}
    sft = {"training": "0.083", "validation": "0.200", "entropy floor": "0.486"}
    assert readings(page, "SFT: loss") == (sft, "step 60")
    assert readings(page, "Reward model: loss")[0] == {"training": "0.083", "validation": "0.200", "floor": "0.365"}
    assert readings(page, "Reward model: pairs right")[0] == {"training": "80.0", "validation": "80.0", "ceiling": "82.7"}
    chart = page.locator("#ppo svg.plot").nth(1)
    chart.focus()
    page.keyboard.press("ArrowLeft")
    assert readings(page, "KL")[1] == "iteration 59"
    steps = {"Home": 1, "ArrowRight": 2, "PageUp": 12, "PageDown": 2, "ArrowLeft": 1, "End": 60}
    for key, step in [*steps.items(), ("ArrowRight", 60)]:
        page.keyboard.press(key)
        assert readings(page, "KL")[1] == f"iteration {step}" and readings(page, "KL")[0]["KL"] == f"{0.05 * step:.2f}"
        assert readings(page, "Length")[0] == {"length": f"{10 + step:.1f}"}  # all charts of the stage move together
    box = chart.bounding_box()
    chart.hover(position={"x": box["width"] * (42 + 310 * 39 / 59) / 360, "y": box["height"] / 2})
    assert readings(page, "KL") == ({"KL": "2.00", "beta × KL": "0.20"}, "iteration 40")
    assert page.locator("#ppo .cursor").evaluate_all("all => new Set(all.map(x => x.getAttribute('visibility'))).size") == 1
    cursor = page.locator("#ppo .cursor").first
    assert cursor.get_attribute("visibility") == "visible"
    assert float(cursor.get_attribute("x1")) == pytest.approx(42 + 310 * 39 / 59)
    assert readings(page, "Score")[0]["judge"] == "2.00"  # of iteration 50, the nearest
    page.locator("h1").hover()
    assert readings(page, "KL")[1] == "iteration 60" and cursor.get_attribute("visibility") == "hidden"


def places(page, selector):
    """The corners of a line in a picture."""
    points = page.locator(selector).first.get_attribute("points")
    return [tuple(map(float, point.split(","))) for point in points.split()]


def test_a_curve_goes_through_its_numbers_in_the_units_of_its_axes(folder, visit):
    page = visit(folder)
    line = places(page, "#ppo figure:nth-of-type(2) svg.plot polyline")  # KL: 0.05, 0.10, ... 3.00
    texts = page.locator("#ppo figure:nth-of-type(2) svg.plot text")
    labels = {text: (float(x), float(y)) for text, x, y in texts.evaluate_all(
        "nodes => nodes.map(node => [node.textContent, node.getAttribute('x'), node.getAttribute('y')])")}  # fmt: skip
    assert len(line) == 60 and {"nats per response", "iteration", "0", "1", "2", "3", "20", "40", "60"} == labels.keys()
    for step in (20, 40, 60):  # at each label of an axis, the line is where its number is: 1, 2 and 3 nats
        x, y = line[step - 1]
        assert x == pytest.approx(labels[str(step)][0], abs=0.1) and y == pytest.approx(labels[str(step // 20)][1] - 4, abs=0.1)


def test_score_and_judge_stand_against_kl_with_the_limit_and_best_of_n(folder, visit):
    page = visit(folder)
    score, judge = page.locator("#frontier svg.plot").all()
    told = "SFT model: KL 0.00, score −0.01; PPO: KL 2.73, score 1.47; the best at this beta: KL 2.89, score 1.60"
    assert score.get_attribute("aria-label") == f"Score against KL. {told}"
    assert "judge 2.63" in judge.get_attribute("aria-label") and "judge 2.73" in judge.get_attribute("aria-label")
    keys = page.locator("#frontier .keys").first.locator("span").all_inner_texts()
    names = ["the limit", "the best at beta 0.1", "this run", "best of 4, 16", "SFT model", "PPO at its end"]
    assert [key.strip() for key in keys] == names
    assert page.locator("#frontier .keys").last.locator("span").first.inner_text().strip() == "the same policies"
    limit, path = (places(page, f"#frontier figure:first-of-type svg.plot > polyline:nth-of-type({i})") for i in (1, 2))
    assert len(limit) == 3 and [x for x, _ in limit] == sorted(x for x, _ in limit) and len(path) == 30


@pytest.mark.parametrize("size, scheme", [(WIDE, "dark"), (PHONE, "light")])
def test_nothing_is_wider_than_the_screen_and_the_ink_can_be_read(folder, visit, size, scheme):
    page = visit(folder, size, scheme)
    for stop in range(3):
        page.locator("#stop").fill(str(stop))
        page.locator("#story summary").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    paper, ink = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    dark, light = (sum(map(int, re.findall(r"\d+", colour))) for colour in ((paper, ink) if scheme == "dark" else (ink, paper)))
    assert dark < 100 and light > 650


def test_on_a_phone_the_numbers_stand_below_the_response_that_is_tapped(folder, visit):
    page = visit(folder, PHONE, has_touch=True)
    panels = [page.locator(f".response:nth-child({i}) #panel") for i in (1, 2)]
    assert [panel.count() for panel in panels] == [1, 0]
    token(page, 1, 1).tap()
    assert [panel.count() for panel in panels] == [0, 1]
    assert at(page) == (1, 1) and numbers(page) == as_shown(response(*RUDE, 1), 1)
    page.set_viewport_size(WIDE)
    page.wait_for_selector(".view > #panel")  # the page hears of its new width a moment later
    assert page.locator(".view > #panel").count() == 1 and numbers(page) == as_shown(response(*RUDE, 1), 1)


def test_texts_are_shown_as_they_are_and_never_run(folder, visit):
    page = visit(folder)
    assert page.locator("img").count() == 0
    prompt = page.locator(".response .prompt").nth(1).inner_text()
    assert prompt.startswith('Who are you? </script><img src=x onerror="alert(1)"> \\u0007\\u202e')
    odd = response(["\n", " a\tb", "\x1b[0m", "<b>"], 1.0, "one\n\ttwo", 1)
    write_jsonl(folder / "ppo_traces.jsonl", [trace(1, tracked=[odd])])
    page = visit(folder)
    assert page.locator(".token").all_text_contents() == ["↵", " a⇥b", "\\u001b[0m", "<b>"]
    assert page.locator(".response .prompt").text_content() == "one\n⇥two"
    assert page.locator("#panel h3").inner_text() == "Token 1 of 4: “↵”"


# Parts that are not there


def test_without_a_report_or_a_judge_the_page_says_nothing_of_them(folder, visit):
    (folder / "report.json").unlink()
    text = visit(folder).inner_text("body")
    assert "The judge knows the truth" in text and "judge 2.5" in text and "never asks, grades a few" in text
    rows = [trace(step) for step in STOPS]
    for line in rows:
        del line["judge"]
        for x in line["tracked"] + line["sampled"]:
            x.pop("judge", None)
    write_jsonl(folder / "ppo_traces.jsonl", rows)
    page = visit(folder)
    text = page.inner_text("body").lower()
    assert page.locator("#result").count() == 0
    assert page.locator("nav a").all_inner_texts() == ["What the score costs", "Token by token", "The curves"]
    for word in ("judge", "best of n", "optimality", "the limit", "floor", "ceiling", "unseen"):
        assert word not in text, word
    assert page.locator("#frontier figure").count() == 1 and page.locator("#ppo figure").count() == 9 and at(page) == (0, 0)
    assert page.locator(".response .small").first.inner_text().startswith("score 2.00 · KL")


def test_without_traces_and_logs_of_the_stages_there_are_the_result_and_the_curves_of_ppo(folder, visit):
    for name in ("ppo_traces.jsonl", "sft.jsonl", "rm.jsonl"):
        (folder / name).unlink()
    page = visit(folder)
    assert page.locator("#tokens").count() == page.locator("#stages").count() == 0 and page.locator("#ppo figure").count() == 9
    assert page.locator("nav a").all_inner_texts() == ["The result", "What the score costs", "The curves"]
    assert "cut off at" not in page.inner_text("body")


def test_without_a_price_a_clip_or_a_reward_model_the_words_are_others(folder, visit):
    settings = {"kl_coef": 0.0, "clip_eps": None, "reward": "my:score", "missing_eos_penalty": 0.0, "ref_update_every": 7}
    rows = [trace(10, settings=SETTINGS | settings, kl_coef=0.0, tracked=[response(*BEE, 10, beta=0)])]
    write_jsonl(folder / "ppo_traces.jsonl", rows)
    (folder / "report.json").write_text(json.dumps(REPORT | {"beta": 0, "rm": {}, "optimum": REPORT["optimum"][1:]}))
    page = visit(folder)
    text = page.inner_text("body")
    for said in ("my:score, takes the place", "it is 0: moving away costs nothing", "replaced by the policy every 7 iterations",
                 "It costs nothing in this run.", "this run has no clip", "the KL costs nothing"):  # fmt: skip
        assert said in text, said
    for word in ("reward model, learned", "pays for it", "Orange tokens", "A bar below", "loses", "score − beta", "Reward model:"):
        assert word not in text, word
    assert readings(page, "KL")[0] == {"KL": "3.00"} and readings(page, "Score")[0].keys() == {"score", "judge"}
    assert page.locator("#stop").count() == 0 and page.locator("#when").inner_text() == "iteration 10 of 60"
    first, paid, clip = page.locator("#story li").all_inner_texts()
    assert "on the way" not in first and paid.endswith("nats; in this run that costs nothing.")
    assert clip.startswith("This run has no clip")
    assert numbers(page)["clip"] == "none"
    page.locator("#colours label").nth(1).click()
    assert "In this run it costs nothing." in page.inner_text("#explain")


def test_other_returns_than_plain_sums_are_explained(folder, visit):
    write_jsonl(folder / "ppo_traces.jsonl", [trace(1, settings=SETTINGS | {"gamma": 0.9, "lam": 0.5, "kl_horizon": 5000.0})])
    page = visit(folder)
    assert page.locator("#panel dd.why").nth(6).inner_text() == (
        "all rewards from this token to the last, added up; each counts 0.9 times the one before; in part as the later values "
        "foresee them (lambda 0.5)"
    )
    assert "on the way" not in page.locator("#story li").first.inner_text()
    assert "at the start of this run" in page.inner_text("header")


def test_of_a_long_response_the_middle_is_left_out_and_counted(folder, visit, monkeypatch):
    monkeypatch.setattr("plumbing.page.BUDGET", 60_000)
    write_jsonl(folder / "ppo_traces.jsonl", [trace(1, tracked=[response([f" {i}" for i in range(900)], 1.0, "?", 1)], sampled=[])])
    page = visit(folder)
    assert page.locator(".left-out").inner_text() == "… 500 tokens …" and page.locator(".token").count() == 400
    token(page, 0, 199).click()
    assert page.locator("#panel h3").inner_text() == "Token 200 of 900: “199”"
    page.keyboard.press("ArrowRight")
    assert page.locator("#panel h3").inner_text() == "Token 701 of 900: “700”"


def test_numbers_that_are_none_are_dashes(folder, visit):
    line = trace(1)
    for x in line["tracked"]:
        x["log_ref"][0] = x["kl"][0] = x["ratio"][1] = None
        x["ratio"][2] = 1.004
    write_jsonl(folder / "ppo_traces.jsonl", [line])
    page = visit(folder)
    shown = numbers(page)
    assert shown["log_ref"] == shown["kl"] == "–" and shown["log_pi"] != "–"
    assert page.locator("#panel dd.why").nth(2).inner_text() == "not a finite number"
    token(page, 0, 2).click()
    assert page.locator("#panel dd.why").nth(9).inner_text() == "pi / old: the token is now 0.4 % more probable"
    token(page, 0, 0).click()
    for mode in range(4):
        page.locator("#colours label").nth(mode).click()
        assert at(page) == (0, 0)
