"""The image of one chart of a run: what it shows, and that it agrees with the page's charts."""

import json
import math
import re
from xml.etree import ElementTree

import pytest
from planted_runs import plant_run
from small import client

from backend.paths import HOME
from backend.runs import EVENTS, METRICS
from webui.curves import Curves
from webui.images import chart_image

NAME = "<script>alert(1)</script> $x$"
DEFAULT = chart_image.View()
EVENTS_OF_RUN = [("saved", 20), ("loss spike", 30), ("resumed", 20)]


def texts(svg):
    """The texts of an image, with those of its axes: 10 to the power of 0 is 100."""
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return ["".join("".join(text.itertext()).split()) if len(text) else text.text for text in found]


def has_log_scale(svg):
    return any("\u00d710" in text for text in texts(svg))


def write(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def series(tmp_path, *points):
    write(tmp_path / "m", *points)
    curves = Curves(tmp_path / "m")
    curves.read()
    return curves.series()


def loss(tmp_path):
    points = [{"step": step, "loss": 2 + step % 3} for step in range(1, 41)]
    return series(tmp_path, *points, *({"step": s, "eval_loss": 1 + abs(s - 20) / 100} for s in (10, 20, 30, 40)))


def draw(found, key="loss", events=(), view=DEFAULT, kind="svg"):
    return chart_image.draw(NAME, key, found, events, view, kind)


def test_the_loss_has_both_curves_the_best_evaluation_and_events(tmp_path):
    found = loss(tmp_path)
    events = [{"kind": kind, "step": step} for kind, step in EVENTS_OF_RUN]
    shown = texts(draw(found, events=chart_image.all_events(events, [], found)))
    names = ["train", "validation", "best validation, 1 at step 20", "checkpoint", "evaluation", "resumed", "alert"]
    assert [text for text in shown if text in names] == names
    assert f"Loss: {NAME}" in shown
    assert b"<script" not in draw(found)
    assert draw(found, kind="png").startswith(b"\x89PNG")


def test_scores_are_in_percent_as_on_the_page(tmp_path):
    found = series(tmp_path, *({"step": step, "eval_rouge_l": step / 40} for step in (10, 20, 30)))
    assert {"40%", "60%"} <= set(texts(draw(found, key="eval_rouge_l")))
    assert "60%" not in texts(draw(loss(tmp_path)))
    points = [{"step": step, "eval_reward_accuracy": step / 40} for step in (10, 20, 30)]
    shown = texts(draw(series(tmp_path, {"step": 5, "reward_accuracy": 0.5}, *points), key="reward_accuracy"))
    assert "best validation, 75% at step 30" in shown


def test_smoothing_zoom_and_log_scale_are_those_of_the_page(tmp_path):
    found = loss(tmp_path)
    assert "train, smoothed" in texts(draw(found, view=chart_image.View(weight=0.5)))
    assert "train, smoothed" not in texts(draw(found))
    events = [{"kind": "saved", "step": 5}]
    assert "checkpoint" in texts(draw(found, events=events))
    zoomed = texts(draw(found, events=events, view=chart_image.View(low=10, high=20)))
    assert "checkpoint" not in zoomed and "20" in zoomed and "40" not in zoomed
    assert has_log_scale(draw(found, view=chart_image.View(log=True))) and not has_log_scale(draw(found))
    speed = series(tmp_path, {"step": 1, "tokens_per_second": 5}, {"step": 2, "tokens_per_second": 50})
    linear = [draw(speed, "tokens_per_second", view=chart_image.View(log=log)) for log in (False, True)]
    assert texts(linear[0]) == texts(linear[1]), "the page draws the throughput on a linear scale"


def test_the_x_axis_has_restarts_and_checkpoints_outside_the_curves(tmp_path):
    found = series(tmp_path, *({"step": step, "loss": 50 / step} for step in range(10, 41)))
    shown = texts(draw(found, events=[{"kind": "resumed", "step": 0}, {"kind": "saved", "step": 50}]))
    assert {"0", "50", "resumed", "checkpoint"} <= set(shown)
    one = texts(draw(series(tmp_path, {"step": 7, "loss": 2})))
    assert {"6.00", "8.00"} <= set(one)


def test_a_zoom_has_the_best_evaluation_and_the_heights_of_its_steps(tmp_path):
    found = loss(tmp_path)
    assert any("best" in text for text in texts(draw(found, view=chart_image.View(low=15, high=25))))
    assert not any("best" in text for text in texts(draw(found, view=chart_image.View(low=30, high=40))))
    high = series(tmp_path, *({"step": step, "loss": value} for step, value in ((1, 900), (2, 3), (3, 4), (4, 0.001))))
    for log in (False, True):
        heights = texts(draw(high, view=chart_image.View(low=2, high=3, log=log)))
        assert not {"800", "900", "102", "10\u22122"} & set(heights), heights


def test_an_image_without_values(tmp_path):
    assert "No values were logged" in texts(draw(series(tmp_path), "kl"))


def test_one_evaluation_is_not_the_best(tmp_path):
    shown = texts(draw(series(tmp_path, {"step": 1, "loss": 2}, {"step": 1, "eval_loss": 2})))
    assert "validation" in shown and not any("best" in text for text in shown)


def test_of_equal_evaluations_none_is_the_best(tmp_path):
    shown = texts(draw(series(tmp_path, *({"step": step, "eval_loss": 2} for step in (1, 2)))))
    assert "validation" in shown and not any("best" in text for text in shown)


def test_equal_values_are_an_equal_image(tmp_path):
    found = loss(tmp_path)
    assert draw(found) == draw(found) and draw(found, kind="png") == draw(found, kind="png")


def test_events_are_listed_once(tmp_path):
    found = series(tmp_path, {"step": 1, "eval_loss": 2, "eval_kl": 1}, {"event": "resumed", "step": 1})
    events = [{"kind": "saved", "step": 1, "text": "Saved."}, {"kind": "resumed", "step": 1, "text": ""}]
    marks = chart_image.all_events(events, [1, 9], found)
    assert [(mark["kind"], mark["step"]) for mark in marks] == [
        ("saved", 1), ("resumed", 1), ("saved", 9), ("evaluation", 1),
    ]  # fmt: skip


def test_smoothed_has_no_bias_at_the_start():
    assert chart_image.smoothed([1, 2, 3], [4.0, 4.0, 4.0], 0.9)[1] == pytest.approx([4, 4, 4])
    assert chart_image.smoothed([1, 2], [0.0, 3.0], 0.5)[1] == pytest.approx([0, 2])


def test_the_charts_are_those_of_the_page():
    script = (HOME / "webui/static/charts.js").read_text()
    table = script[script.index("export const CHARTS") : script.index("@returns {Chart}")]
    rows = re.split(r'(?=trainAndEval\("|key: ")', table)[1:]
    assert len(rows) == len(chart_image.CHARTS)
    for row, (key, chart) in zip(rows, chart_image.CHARTS.items(), strict=True):
        both = row.startswith("trainAndEval")
        assert f'"{key}", "{chart.title}"' in row if both else f'key: "{key}"' in row and f'"{chart.title}"' in row
        flags = [both or "smooth: true" in row, "log: true" in row, "marksBest: true" in row, "numbered: true" in row]
        assert flags == [chart.smooth, chart.log, bool(chart.best), chart.numbered], key
        assert chart.second == f"eval_{key}" if both else f'second: "{chart.second}"' in row or not chart.second


# -- the route ---------------------------------------------------------------------------------------------------


@pytest.fixture
def api(tmp_path):
    (tmp_path / "runs").mkdir()
    with client(tmp_path / "runs") as opened:
        yield opened


@pytest.fixture
def base(tmp_path, api):
    points = [{"step": step, "loss": 2 + step % 3} for step in range(1, 41)]
    happened = [{"kind": "saved", "step": 7, "text": "Saved.", "time": 1}]
    return f"/api/runs/{plant_run(tmp_path / 'runs', 'try', {METRICS: points, EVENTS: happened}).id}"


def test_both_kinds_are_downloaded(api, base):
    svg = api.get(f"{base}/charts/loss.svg")
    assert svg.headers["content-type"].startswith("image/svg+xml") and "checkpoint" in texts(svg.content)
    assert svg.headers["content-disposition"] == f'attachment; filename="{base.rpartition("/")[2]}-loss.svg"'
    png = api.get(f"{base}/charts/loss.png")
    assert png.headers["content-type"] == "image/png" and png.content.startswith(b"\x89PNG")
    report = api.get(f"{base}/report.svg")
    assert report.headers["content-disposition"].startswith("attachment;") and "train, smoothed" in texts(
        report.content
    )


def test_parameters_of_the_page(api, base):
    assert "train, smoothed" in texts(api.get(f"{base}/charts/loss.svg?smoothing=0.6").content)
    assert "train, smoothed" in texts(api.get(f"{base}/charts/loss.svg?smoothing=1e9").content)
    plain = texts(api.get(f"{base}/charts/loss.svg").content)
    assert "train, smoothed" not in plain and "40" in plain
    zoomed = texts(api.get(f"{base}/charts/loss.svg?x0=10&x1=20").content)
    assert "checkpoint" not in zoomed and "40" not in zoomed
    assert texts(api.get(f"{base}/charts/loss.svg?x0=20&x1=10").content) == plain, "no range"
    images = [api.get(f"{base}/charts/loss.svg?{parameters}").content for parameters in ("log=true", "", "")]
    assert has_log_scale(images[0]) and not has_log_scale(images[1]) and images[1] == images[2]


@pytest.mark.parametrize("part", ["charts/nothing.png", "charts/loss.pdf", "charts/loss", "report.pdf", "report.json"])
def test_unknown_images_are_404(api, base, part):
    response = api.get(f"{base}/{part}")
    assert response.status_code == 404 and response.json()["error"]


def test_no_line_is_drawn_where_points_are_missing() -> None:
    x, y = chart_image.with_gaps([1, 2, 50, 51], [4.0, 3.0, 2.0, 1.0], [(2, 49)])
    assert x == [1, 2, 26.0, 50, 51]
    assert y[:2] == [4.0, 3.0]
    assert math.isnan(y[2])
    assert chart_image.with_gaps([1, 2], [4.0, 3.0], [(2, 49)]) == ([1, 2], [4.0, 3.0])
