"""The drawings of RESULTS.md show what is computed and what was measured. Run: python -m pytest tests/test_drawings.py"""

import json
import re
import statistics
from xml.etree import ElementTree

import pytest

from bench import drawings
from cli import ROOT
from plumbing.settings import UserError

RESULTS = json.loads((ROOT / "bench" / "results.json").read_text())
NAMES = ("clip", "loop", "passes")


def read(drawing, folder):
    """-> its elements without name spaces, as (tag, attributes, text)."""
    drawing.write(folder / "x.svg")
    return [(node.tag.split("}")[1], node.attrib, node.text or "") for node in ElementTree.parse(folder / "x.svg").iter()]


def points(attributes):
    return [tuple(map(float, pair.split(","))) for pair in attributes["points"].split()]


def texts(elements):
    """-> (x, y, words, size, anchor) of each text that is not turned."""
    return [(float(at["x"]), float(at["y"]), words, drawings.SIZES[at["class"].split()[0]], at["text-anchor"])
            for tag, at, words in elements if tag == "text" and "transform" not in at]  # fmt: skip


@pytest.fixture
def shapes(tmp_path):
    """name -> the elements of that drawing."""
    return {name: read(drawing, tmp_path) for name, drawing in drawings.drawings(RESULTS).items()}


# All three


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_is_made_again_from_the_results_alone(tmp_path, name):
    drawings.drawings({"passes": RESULTS["passes"]})[name].write(tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_bytes() == (ROOT / "bench" / f"{name}.svg").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_says_what_it_is_and_has_no_size_but_that_of_its_place(shapes, name):
    (root, at, _), (title, _, said), (about, _, described), *_ = shapes[name]
    assert (root, title, about) == ("svg", "title", "desc") and len(said) > 20 and len(described) > 60
    assert at["viewBox"].startswith("0 0 760 ") and "width" not in at and "height" not in at


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return sum(w * (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4) for w, x in zip((0.2126, 0.7152, 0.0722), parts))


def contrast(a, b):
    """As the web's accessibility guidelines define it: 1 to 21."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", NAMES)
def test_every_colour_has_one_value_for_light_pages_and_one_for_dark_ones_and_all_can_be_read(shapes, name):
    css = next(text for tag, _, text in shapes[name] if tag == "style")
    light, dark = css.split("@media (prefers-color-scheme: dark) {")
    assert css.count("{") == css.count("}") and dark.rstrip().endswith("}")
    used = {kind for _, at, _ in shapes[name] for kind in at.get("class", "").split()}
    schemes = []
    for rules in (light, dark):
        colours = dict(re.findall(r"\.([\w-]+) \{ (?:fill|stroke): (#\w{6});", rules))
        assert used - {*drawings.SIZES} <= colours.keys()
        assert all(colours[kind] == colours[f"{kind}-line"] for kind in ("ink", "soft", "blue", "orange", "rule"))
        for kind in ("ink", "soft", "blue", "orange"):
            assert min(contrast(colours[kind], colours[behind]) for behind in ("page", "tint")) >= 4.5
        schemes.append(colours)
    assert not set(schemes[0].values()) & set(schemes[1].values())
    assert luminance(schemes[0]["page"]) == 1 and luminance(schemes[1]["page"]) < 0.01
    assert all(re.search(rf"\.{size} {{ font-size: \d+px; }}", light) for size in drawings.SIZES)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_written_over_something_else_or_over_the_edge(shapes, name):
    height, boxes = float(shapes[name][0][1]["viewBox"].split()[3]), []
    for x, y, words, size, anchor in texts(shapes[name]):
        wide = 0.55 * size * len(words)  # of a wide font
        left = {"start": x, "middle": x - wide / 2, "end": x - wide}[anchor]
        boxes.append((left, y - 0.75 * size, left + wide, y + 0.25 * size, words))
    for i, (a, b, c, d, words) in enumerate(boxes):
        assert 0 <= a and c <= 760 and 0 <= b and d <= height, words
        for e, f, g, h, others in boxes[:i]:
            assert c <= e or g <= a or d <= f or h <= b, (words, others)
    assert min(size for *_, size, _ in texts(shapes[name])) >= 16  # half of that on the screen of a phone


# The clipped objective


def axis(elements, left, right, below):
    """From the numbers beside its axes, how a panel is to be read: -> functions from x to ratio, from y to objective."""
    ticks = [(x, y, float(words.replace("−", "-"))) for x, y, words, *_ in texts(elements) if re.fullmatch(r"−?[\d.]+", words)]
    bottom = [(x, value) for x, y, value in ticks if left < x < right and y > below]
    side = [(y - 5, value) for x, y, value in ticks if left - 60 < x < left and y < below]

    def reader(marks):
        (a, low), (b, high) = marks[0], marks[-1]
        assert len(marks) == 3 and low != high
        return lambda place: low + (place - a) * (high - low) / (b - a)

    return reader(bottom), reader(side)


@pytest.mark.parametrize("clip_eps", [0.2, 0.3])
@pytest.mark.parametrize("advantage, left, right", [(1, 56, 368), (-1, 430, 742)])
def test_the_curve_is_the_clipped_objective_and_the_dashed_line_the_one_without_a_clip(tmp_path, clip_eps, advantage, left, right):
    shapes = read(drawings.draw_clip(clip_eps), tmp_path)
    ratio, objective = axis(shapes, left, right, 262)
    curves = {"objective": [], "unclipped": []}
    for tag, at, _ in shapes:
        if tag == "polyline" and "data-curve" in at and left <= points(at)[0][0] <= right:
            curves[at["data-curve"]] += [(ratio(x), objective(y)) for x, y in points(at)]
    assert len(curves["objective"]) == 27 and curves["objective"][0][0] == pytest.approx(0.4, abs=1e-3)
    assert curves["objective"][-1][0] == pytest.approx(1.6, abs=1e-3)
    for x, y in curves["objective"]:
        assert y == pytest.approx(min(x * advantage, min(max(x, 1 - clip_eps), 1 + clip_eps) * advantage), abs=1e-3)
    assert [x for x, _ in curves["unclipped"]] == pytest.approx([0.4, 1.6], abs=1e-3)
    assert all(y == pytest.approx(x * advantage, abs=1e-3) for x, y in curves["unclipped"])
    (band,) = [at for tag, at, _ in shapes if at.get("class") == "tint" and left <= float(at["x"]) <= right]
    assert ratio(float(band["x"])) == pytest.approx(1 - clip_eps, abs=1e-3)
    assert ratio(float(band["x"]) + float(band["width"])) == pytest.approx(1 + clip_eps, abs=1e-3)


CASES = {  # (advantage, ratio): slope, what is said
    (1, 0.6): (1, "comes back"), (1, 1.0): (1, "rises"), (1, 1.4): (0, "risen enough"),
    (-1, 0.6): (0, "fallen enough"), (-1, 1.0): (-1, "falls"), (-1, 1.4): (-1, "comes back"),
}  # fmt: skip


def test_each_of_the_six_cases_has_its_slope_its_words_its_colour_and_its_arrow(shapes):
    clip, arrows, dots = shapes["clip"], {}, {}
    for (advantage, ratio), (slope, words) in CASES.items():
        assert drawings.objective(ratio, advantage, 0.2)[1] == slope and drawings.said_of(ratio, slope) == words
    said = sorted((x, words) for x, _, words, *_ in texts(clip) if words in {words for _, words in CASES.values()})
    assert [words for _, words in said] == [words for _, words in CASES.values()]
    slopes = sorted((x, words) for x, _, words, *_ in texts(clip) if words.startswith("slope"))
    assert [words for _, words in slopes] == [f"slope {slope}".replace("-", "−") for slope, _ in CASES.values()]
    for tag, at, _ in clip:
        if "data-case" in at:
            arrows[tuple(map(float, at["data-case"].split()))] = points(at)
        if tag == "circle":
            dots[float(at["cx"])] = at["class"]
    assert [x for x, _ in said] == [x for x, _ in slopes] == sorted(dots)
    assert [dots[x] for x in sorted(dots)] == ["blue" if slope else "orange" for slope, _ in CASES.values()]
    assert arrows.keys() == {case for case, (slope, _) in CASES.items() if slope}
    for case, ((x, y), (end, level)) in arrows.items():
        assert y == level and (end - x) * CASES[case][0] > 20 and x in dots
    curves = [(points(at)[0][0], at["class"]) for _, at, _ in clip if at.get("data-curve") == "objective"]
    assert [kind.removesuffix("-line") for _, kind in sorted(curves)] == [dots[x] for x in sorted(dots)]


# The loop


def test_the_loop_has_four_numbered_phases_from_top_to_bottom_and_names_what_flows(shapes):
    loop = texts(shapes["loop"])
    numbers = [(words, y) for x, y, words, *_ in loop if re.fullmatch(r"\d", words)]
    assert [words for words, _ in numbers] == list("1234") and numbers == sorted(numbers, key=lambda number: number[1])
    phases = [words for x, y, words, *_ in sorted(loop, key=lambda text: text[1]) if x == 50 and len(words) > 1]
    assert phases == ["sample", "score", "reward", "update"]
    assert {words for *_, words, _, _ in loop} >= {"Policy", "vocabulary head", "value head", "Reward model", "Reference"}
    flows = {words for *_, words, _, _ in loop}
    assert flows >= {"prompts", "responses", "log pi", "values", "score", "log ref", "advantages, returns"}
    assert [words for tag, at, words in shapes["loop"] if "transform" in at] == ["gradient"]


def test_what_is_frozen_has_a_dashed_frame_and_what_is_trained_a_solid_one(shapes):
    boxes = [at for tag, at, _ in shapes["loop"] if tag == "rect" and at["class"].endswith("-line")]
    inside = {}
    for x, y, words, *_ in texts(shapes["loop"]):
        for at in boxes:
            a, b, width, height = (float(at[key]) for key in ("x", "y", "width", "height"))
            if a < x < a + width and b < y < b + height:
                inside[words] = "stroke-dasharray" in at
    assert inside["Policy"] is inside["value head"] is False
    assert inside["Reward model"] is inside["Reference"] is True
    assert all(inside[words] for words in ("learned; frozen", "SFT; frozen")) and not inside["starts as the SFT model; trained"]


def test_every_arrow_of_the_loop_leads_from_one_box_to_another_and_has_its_head_at_its_end(shapes):
    boxes = [[float(at[key]) for key in ("x", "y", "width", "height")]
             for tag, at, _ in shapes["loop"] if tag == "rect" and float(at["height"]) < 600]  # fmt: skip

    def touches(x, y):
        return [(a, b) for a, b, w, h in boxes if (a <= x <= a + w and y in (b, b + h)) or (b <= y <= b + h and x in (a, a + w))]

    lines = [points(at) for tag, at, _ in shapes["loop"] if tag == "polyline"]
    heads = [points(at) for tag, at, _ in shapes["loop"] if tag == "polygon"]
    ends = []
    for line, (tip, *wings) in zip(lines, heads, strict=True):
        (a, b), (x, y) = line[-2:]
        assert sum(side[0] for side in wings) / 2 == pytest.approx(x + (x - tip[0])) and touches(*tip)
        assert (x == a == tip[0] and (tip[1] - y) * (y - b) > 0) or (y == b == tip[1] and (tip[0] - x) * (x - a) > 0)
        ends.append((touches(*line[0]), touches(*tip)))
    assert [not start for start, _ in ends].count(True) == 1 and not ends[0][0]  # the prompts come from outside
    policy, update = (104.0, 52.0), (104.0, 526.0)
    assert (ends[-1][0], ends[-1][1]) == ([update], [policy])  # the gradient closes the loop
    assert all(start != end for start, end in ends)


# Several passes


def test_the_lines_and_bands_of_the_passes_are_what_was_measured(shapes):
    measured, elements, seen = RESULTS["passes"], shapes["passes"], []
    for name, left in (("clip_frac", 64), ("approx_kl", 308), ("ratio_max", 552)):
        marks = [(y - 5, float(words)) for x, y, words, *_ in texts(elements) if x == left - 8]
        (a, low), (b, high) = marks[0], marks[-1]
        assert low == (1 if name == "ratio_max" else 0) and all(abs(y) < 1e3 for y, _ in marks)
        (line,) = [points(at) for _, at, _ in elements if at.get("data-curve") == name]
        (band,) = [points(at) for _, at, _ in elements if at.get("data-band") == name]
        values = [low + (y - a) * (high - low) / (b - a) for _, y in line + band]
        lower, middle, upper = zip(*measured[name], strict=True)
        assert values == pytest.approx([*middle, *lower, *upper[::-1]], abs=1e-3 * (high - low))
        across = [x for x, _ in line]
        assert [x for x, _ in band] == across + across[::-1] and left <= across[0] and across[-1] <= left + 184
        assert [float(at["cx"]) for tag, at, _ in elements if tag == "circle" and left <= float(at["cx"]) < left + 184] == across
        numbers = [(x, words) for x, y, words, *_ in texts(elements) if y == 276 and left <= x < left + 184]
        assert numbers == [(x, str(i + 1)) for i, x in enumerate(across)]
        seen += across
    assert len(seen) == 12
    said = " ".join(words for _, _, words, *_ in texts(elements))
    assert f"iterations {measured['first']} to {measured['last']} of {measured['steps']}." in said


def test_what_results_md_says_of_the_passes_is_so():
    for name in drawings.METRICS:
        medians = [middle for _, middle, _ in RESULTS["passes"][name]]
        assert len(medians) == 4 and medians == sorted(medians) and all(a <= b <= c for a, b, c in RESULTS["passes"][name])
    assert RESULTS["passes"]["clip_frac"][0][1] < 0.005  # "almost no ratio leaves the range"


@pytest.mark.parametrize("top, expected", [
    (0.0879, [0, 0.025, 0.05, 0.075, 0.1]), (0.066, [0, 0.025, 0.05, 0.075]), (5.2, [0, 2, 4, 6]), (1.0, [0, 0.25, 0.5, 0.75, 1.0]),
    (0.2, [0, 0.05, 0.1, 0.15, 0.2]), (40, [0, 10, 20, 30, 40]), (33, [0, 10, 20, 30, 40]), (7.4, [0, 2.5, 5, 7.5]),
    (0.0, [0, 0.25, 0.5, 0.75, 1.0]),
])  # fmt: skip
def test_the_marks_of_an_axis_are_few_and_round(top, expected):
    assert drawings.ticks(top) == pytest.approx(expected)


def write_log(folder, rows):
    (folder / "ppo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_summary_of_a_log_is_the_quartiles_over_the_middle_half_of_its_iterations(tmp_path):
    def row(i):
        return {"step": i, "passes": [{name: k * 100 + i + 0.5 * p for k, name in enumerate(drawings.METRICS)} for p in range(3)]}

    write_log(tmp_path, [row(i) for i in range(1, 21)])
    got = drawings.summary(tmp_path)
    assert (got["steps"], got["first"], got["last"]) == (20, 6, 15)
    for k, name in enumerate(drawings.METRICS):
        for p in range(3):
            values = [k * 100 + i + 0.5 * p for i in range(6, 16)]
            low, middle, high = got[name][p]
            assert middle == statistics.median(values) and (low, high) == (middle - 2.25, middle + 2.25)


@pytest.mark.parametrize("rows, says", [
    (None, "not found; train_ppo.py --epochs 4"), ([{"step": i} for i in range(9)], "--epochs 2"),
    ([{"step": i, "passes": []} for i in range(7)], "at least 8 iterations"),
])  # fmt: skip
def test_another_log_is_refused(tmp_path, rows, says):
    if rows is not None:
        write_log(tmp_path, rows)
    with pytest.raises(UserError, match=says):
        drawings.summary(tmp_path)


def test_a_new_log_replaces_its_part_of_the_results_alone(tmp_path, monkeypatch):
    (tmp_path / "bench").mkdir()
    results = tmp_path / "bench" / "results.json"
    results.write_text(json.dumps({"seeds": [1, 2], "passes": RESULTS["passes"]}))
    assert drawings.ROOT == ROOT
    monkeypatch.setattr(drawings, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["drawings.py"])
    drawings.main()
    first = {name: (tmp_path / "bench" / f"{name}.svg").read_bytes() for name in NAMES}
    assert all(first[name] == (ROOT / "bench" / f"{name}.svg").read_bytes() for name in NAMES)
    write_log(tmp_path, [{"passes": [dict.fromkeys(drawings.METRICS, 2.0 + i) for i in range(2)]}] * 8)
    monkeypatch.setattr("sys.argv", ["drawings.py", "--passes", str(tmp_path)])
    drawings.main()
    assert json.loads(results.read_text()) == {"seeds": [1, 2], "passes": drawings.summary(tmp_path)}
    assert (tmp_path / "bench" / "passes.svg").read_bytes() != first["passes"]
    assert (tmp_path / "bench" / "clip.svg").read_bytes() == first["clip"]
