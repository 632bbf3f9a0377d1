"""The curves of runs. Run: python -m pytest tests/test_plot.py (needs matplotlib; .ci/run installs it)"""

import json
import math
import os
import sys
from xml.etree import ElementTree

import pytest

from cli import run
from plumbing import plot
from plumbing.settings import UserError

if not os.environ.get("NO_SKIP"):
    pytest.importorskip("matplotlib")
from matplotlib.colors import to_hex


def log(folder, stage, rows):
    folder.mkdir(exist_ok=True)
    (folder / f"{stage}.jsonl").write_text("".join(json.dumps({"step": i} | row) + "\n" for i, row in enumerate(rows, 1)))
    return str(folder)


def figure(*folders):
    return plot.draw(plot.read_runs(list(folders)))


def axis(drawing, title):
    (found,) = [axis for axis in drawing.axes if axis.get_title() == title]
    return found


def data(line):
    return list(zip(*(values.tolist() for values in line.get_data()), strict=True))


PLOT = "plumbing/plot.py"


# Reading


def test_half_a_last_line_and_what_is_no_row_are_left_out(tmp_path):
    (tmp_path / "sft.jsonl").write_bytes(b'{"step": 1, "loss": 2.0}\n\n7\n{"loss": 3}\n{"step": 2, "loss": 1.5}\n{"st\xc3')
    assert plot.read_log(tmp_path / "sft.jsonl") == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}]


def test_the_stages_come_in_their_order_and_only_those_that_are_there(tmp_path):
    a, b = log(tmp_path / "a", "ppo", [{"kl": 1}]), log(tmp_path / "b", "sft", [{"loss": 1}])
    runs = plot.read_runs([a, b])
    assert list(runs) == ["sft", "ppo"] and runs == {"sft": {b: [{"step": 1, "loss": 1}]}, "ppo": {a: [{"step": 1, "kl": 1}]}}


def test_a_folder_without_a_log_and_a_log_without_a_step_are_refused(tmp_path):
    log(tmp_path / "a", "rm", [])
    with pytest.raises(UserError, match=f"{tmp_path}: no sft.jsonl, rm.jsonl or ppo.jsonl"):
        plot.read_runs([str(tmp_path / "a"), str(tmp_path)])
    with pytest.raises(UserError, match="a: no step is logged yet"):
        plot.read_runs([str(tmp_path / "a")])


def test_what_is_no_finite_number_is_left_out():
    rows = [{"step": 1, "x": 1}, {"step": 2}, {"step": 3, "x": None}, {"step": 4, "x": math.nan}, {"step": 5, "x": 2.5}]
    assert plot.series([*rows, {"step": 6, "x": math.inf}, {"step": 7, "x": [1]}], "x") == ([1, 5], [1, 2.5])


# Parts


@pytest.mark.parametrize("n, most, sizes", [(3, 5, [1, 1, 1]), (5, 5, [1] * 5), (12, 5, [2, 2, 3, 2, 3]), (1, 5, [1])])
def test_a_run_is_cut_into_parts_of_equal_length(n, most, sizes):
    steps, values = list(range(10, 10 + n)), [float((7 * i) % 5) for i in range(n)]
    middle, means, low, high = plot.parts(steps, values, most)
    start = 0
    for i, size in enumerate(sizes):
        piece = values[start : start + size]
        assert (low[i], high[i]) == (min(piece), max(piece)) and means[i] == pytest.approx(sum(piece) / size)
        assert middle[i] == 10 + start + (size - 1) / 2
        start += size
    assert len(middle) == len(means) == len(low) == len(high) == len(sizes) and start == n


def test_a_long_log_becomes_a_hundred_points(tmp_path):
    folder = log(tmp_path / "a", "sft", [{"loss": 1 + 1 / i} for i in range(1, 20_001)])
    points = data(axis(figure(folder), "SFT: loss").lines[0])
    assert len(points) == 100 and points[0][0] == 100.5
    assert points[-1][1] == pytest.approx(sum(1 + 1 / i for i in range(19_801, 20_001)) / 200)


# The picture


def test_each_folder_has_a_colour_and_each_metric_a_panel_with_lines_bands_and_dots(tmp_path):
    a = log(tmp_path / "a", "rm", [{"loss": 0.7, "accuracy": 0.5}, {"loss": 0.6, "accuracy": 0.75, "val_accuracy": 0.7}])
    log(tmp_path / "a", "ppo", [{"kl": 0.0}, {"kl": 1.5}])
    b = log(tmp_path / "b", "rm", [{"loss": 0.65, "accuracy": 0.625, "val_accuracy": 0.6}])
    drawing = figure(a, b)
    titles = [axis.get_title() for axis in drawing.axes]
    assert titles == [f"{plot.TITLES[stage]}: {name}" for stage in ("rm", "ppo") for name in plot.STAGES[stage]]
    first, dots, second, more = axis(drawing, "reward model: accuracy").lines
    assert (data(first), data(second)) == ([(1, 0.5), (2, 0.75)], [(1, 0.625)])
    assert (data(dots), data(more)) == ([(2, 0.7)], [(1, 0.6)])
    assert [line.get_linestyle() for line in (first, dots)] == ["-", "None"] and dots.get_marker() == more.get_marker() == "o"
    assert [line.get_color() for line in (first, dots, second, more)] == ["#0072b2"] * 2 + ["#d55e00"] * 2
    band, other = axis(drawing, "reward model: accuracy").collections
    assert [to_hex(x.get_facecolor()[0]) for x in (band, other)] == ["#0072b2", "#d55e00"]
    kl = axis(drawing, "PPO: kl")
    assert (kl.get_ylabel(), kl.get_xlabel()) == ("nats per response", "iteration") and len(kl.lines) == 2
    assert data(kl.lines[0]) == [(1, 0.0), (2, 1.5)]
    assert axis(drawing, "reward model: loss").get_xlabel() == "step"
    (legend,) = drawing.legends
    assert [text.get_text() for text in legend.get_texts()] == [a, b]
    assert [line.get_color() for line in legend.get_lines()] == ["#0072b2", "#d55e00"]
    assert "means over parts" in drawing.get_supxlabel() and "validation" in drawing.get_supxlabel()
    rows = {title: axis(drawing, title).get_subplotspec().rowspan.start for title in titles}
    assert [rows[title] for title in titles] == [0] * 4 + [1] * 4 + [2] * 4
    assert all(axis.get_ylabel() for axis in drawing.axes)


def test_a_band_goes_from_the_smallest_to_the_largest_value_of_each_part(tmp_path):
    values = [math.sin(i) for i in range(250)]
    (band,) = axis(figure(log(tmp_path / "a", "ppo", [{"score": x} for x in values])), "PPO: score").collections
    middle, _, low, high = plot.parts(list(range(1, 251)), values)
    corners = {tuple(point) for path in band.get_paths() for point in path.vertices.tolist()}
    assert corners >= {*zip(middle, low, strict=True), *zip(middle, high, strict=True)}


@pytest.mark.parametrize("low, scale, marks", [(0.5, "log", {0.5, 1.0, 2.0, 5.0}), (2.0, "linear", None), (0.0, "linear", None)])
def test_a_loss_that_falls_far_has_a_logarithmic_axis_with_plain_numbers(tmp_path, low, scale, marks):
    drawing = figure(log(tmp_path / "a", "sft", [{"loss": x, "lr": x} for x in (7.0, 3.0, low)]))
    loss = axis(drawing, "SFT: loss")
    assert (loss.get_yscale(), axis(drawing, "SFT: lr").get_yscale()) == (scale, "linear")
    if marks:
        bottom, top = loss.get_ylim()
        assert {x for x in loss.get_yticks() if bottom <= x <= top} == marks
        assert loss.yaxis.get_major_formatter()(0.5) == "0.5" and len(loss.get_yticks(minor=True)) == 0


def test_more_folders_than_colours_differ_by_their_lines(tmp_path):
    folders = [log(tmp_path / f"{i}", "rm", [{"loss": 1.0 + i}]) for i in range(9)]
    looks = [(line.get_color(), line.get_linestyle()) for line in axis(figure(*folders), "reward model: loss").lines[::2]]
    assert len(set(looks)) == 9 and looks[0][0] == looks[7][0] and looks[0][1] != looks[7][1]


def test_a_picture_is_written_beside_the_log_or_where_it_is_wanted(tmp_path):
    folder = log(tmp_path / "_a$b$", "sft", [{"loss": 2.0}])  # characters that matplotlib would take for its own
    assert run(PLOT, folder) == (0, f"wrote {folder}/curves.svg\n", "")
    words = [node.text for node in ElementTree.parse(f"{folder}/curves.svg").iter() if node.tag.endswith("}text")]
    assert {folder, "SFT: loss", "nats per token", "step", plot.NOTE} <= set(words)
    assert run(PLOT, folder, "--to", tmp_path / "x.png")[0] == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name, says", [("x.pdf", "should end in .svg or .png"), ("none/x.svg", "No such file")])
def test_a_picture_that_cannot_be_written_is_refused_in_one_line(tmp_path, name, says):
    status, _, error = run(PLOT, log(tmp_path / "a", "sft", [{"loss": 2.0}]), "--to", tmp_path / name)
    assert status == 2 and says in error and str(tmp_path / name) in error and error.count("\n") == 1


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, error = run(PLOT, log(tmp_path / "a", "sft", [{"loss": 2.0}]))
    assert (status, error) == (2, "plot.py: the package matplotlib is missing; pip install matplotlib\n")
