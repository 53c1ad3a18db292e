"""The page as a browser would parse it, and its lines against the numbers that they draw."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from run_lines import training_line, validation_line

from quaver.errors import ConfigError
from quaver.report import chart as charts
from quaver.report import render_report
from quaver.report.page import run_class

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Elements with their attributes, text and children; an element that is not closed is a failure."""

    def __init__(self, html):
        super().__init__()
        self.root = {"tag": "root", "attrs": {}, "children": [], "text": ""}
        self.open = [self.root]
        self.feed(html)
        self.close()
        assert [node["tag"] for node in self.open] == ["root"]

    def handle_starttag(self, tag, attrs):
        node = {"tag": tag, "attrs": dict(attrs), "children": [], "text": ""}
        self.open[-1]["children"].append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag, attrs):
        self.open[-1]["children"].append({"tag": tag, "attrs": dict(attrs), "children": [], "text": ""})

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag, tag

    def handle_data(self, data):
        for node in self.open:
            node["text"] += data

    def find(self, tag=None, within=None, **attrs):
        found = []
        for node in (within or self.root)["children"]:
            if tag in (None, node["tag"]) and all(
                node["attrs"].get(k.rstrip("_")) == v for k, v in attrs.items()
            ):
                found.append(node)
            found += self.find(tag, node, **attrs)
        return found


def read(path):
    return Page(path.read_text(encoding="utf-8"))


def words(node):
    return " ".join(node["text"].split())


def polylines(page, key, kind="line"):
    (figure,) = page.find("figure", id=f"chart-{key}")
    found = {}
    for line in page.find("polyline", figure):
        if kind in line["attrs"]["class"].split():
            points = [tuple(map(float, pair.split(","))) for pair in line["attrs"]["points"].split()]
            found.setdefault(int(line["attrs"]["data-run"]), []).append(points)
    return found


def rows(page, section):
    (node,) = page.find("section", id=section)
    return [[words(cell) for cell in row["children"]] for row in page.find("tr", node)]


def full_run(make_run, name="mxfp8", **changed):
    lines = [validation_line(0, 6.0, 8.0)]
    lines += [training_line(step, loss=6.0 - step, tokens_per_s=100.0 + step) for step in (1, 2, 3, 4)]
    lines += [validation_line(4, 1.5, 2.25), {"step": 4, "samples": [{"prompt": "def ", "text": "f(x):"}]}]
    entries = [
        {"fqn": fqn, "kind": "dense", "gemm": gemm, "format": "mxfp8_e4m3", "kernel": "reference", "count": 4}
        | {"recomputed": 4 if gemm == "fprop" else 0}
        for fqn in ("a", "b", "c")
        for gemm in ("fprop", "dgrad", "wgrad")
    ]
    documents = {
        "config": f"name: {name}\nseed: 1\nlow_precision:\n  enabled: true\ndata:\n  sources:\n  - path: x\n",
        "environment": {"parameters": 7_234_560, "versions": {"torch": "2.13.0"}},
        "replacement": [{"pattern": "layers.*", "hits": ["layers.0", "layers.1"]}],
        "ledger": {
            "recipe": "mxfp8_e4m3/mx_block/floor@1",
            "ok": True,
            "entries": entries,
            "idle_experts": ["e"],
        },
    }
    return make_run(name, lines, **(documents | changed))


def test_coordinates_are_those_of_the_numbers(make_run, tmp_path):
    page = read(render_report(full_run(make_run), tmp_path / "report.html"))
    ((points,),) = polylines(page, "loss").values()
    right = charts.NARROW - charts.MARGIN
    assert [x for x, _ in points] == [
        pytest.approx(charts.LEFT + (right - charts.LEFT) * step / 4, abs=0.06) for step in (1, 2, 3, 4)
    ]
    # losses 5, 4, 3, 2 over an axis from 2 - 5 % to 5 + 5 % of their range
    height = charts.BOTTOM - charts.TOP
    expected = [charts.BOTTOM - height * (loss - 1.85) / 3.3 for loss in (5, 4, 3, 2)]
    assert [y for _, y in points] == [pytest.approx(y, abs=0.06) for y in expected]


def test_axis_ticks_stand_where_their_labels_say(make_run, tmp_path):
    page = read(render_report(full_run(make_run), tmp_path / "report.html"))
    (figure,) = page.find("figure", id="chart-val_loss")
    ((points,),) = polylines(page, "val_loss").values()
    ticks = {words(text): float(text["attrs"]["y"]) for text in page.find("text", figure, class_="y")}
    assert set(ticks) == {"2", "3", "4", "5", "6"}
    assert ticks["6"] == pytest.approx(points[0][1], abs=0.11)  # the first validation loss is 6
    assert "nats per token" in words(figure)


def test_summary_ledger_replacements_and_samples(make_run, tmp_path):
    page = read(render_report(full_run(make_run), tmp_path / "report.html"))
    recipe = "mxfp8_e4m3/mx_block/floor@1"
    assert rows(page, "summary")[1] == [
        "mxfp8", recipe, "7.23M", "4", "256", "1.5000", "2.2500", "102",
    ]  # fmt: skip
    assert rows(page, "ledger")[1] == ["mxfp8", "mxfp8_e4m3", "dense", "12", "12", "12", "12", "1", "agrees"]
    assert rows(page, "replacements")[1] == ["layers.*", "2"]
    (samples,) = page.find("section", id="samples")
    assert [pre["text"] for pre in page.find("pre", samples)] == ["def f(x):"]
    assert "2.13.0" in words(page.find("section", id="config")[0])


def test_several_runs_are_overlaid_with_legend_differences_and_config_diff(make_run, tmp_path):
    off = {"recipe": None, "ok": True, "entries": [], "idle_experts": []}
    base = full_run(
        make_run,
        "bf16",
        ledger=off,
        replacement=[],
        config="name: bf16\nseed: 1\nmodel: {torch_dtype: bfloat16}\n",
    )
    other = full_run(make_run, "mxfp8")
    lines = (other / "metrics.jsonl").read_text().replace('"val_loss": 1.5', '"val_loss": 1.515')
    (other / "metrics.jsonl").write_text(lines)
    page = read(render_report([base, other], tmp_path / "report.html"))
    assert [words(item) for item in page.find("li")] == ["bf16", "mxfp8"]
    assert set(polylines(page, "loss")) == {0, 1}
    assert [row[1] for row in rows(page, "summary")[1:]] == ["bfloat16", "mxfp8_e4m3/mx_block/floor@1"]
    assert [row[6] for row in rows(page, "summary")[1:]] == ["–", "+1.00 %"]
    delta = polylines(page, "val_delta")
    assert delta[0][0][0][1] == delta[0][0][1][1] == delta[1][0][0][1]  # 0 % for the base, and at step 0
    assert delta[1][0][1][1] < delta[0][0][1][1]  # 1 % worse lies higher
    table = page.find("table", page.find("section", id="config")[0])[0]
    found = {
        words(r["children"][0]): [words(c) for c in r["children"][1:]] for r in page.find("tr", table)[1:]
    }
    assert found == {
        "name": ["bf16", "mxfp8"],
        "model.torch_dtype": ["bfloat16", "–"],
        "low_precision.enabled": ["–", "true"],
        "data.sources[0].path": ["–", "x"],
    }
    assert "low precision was off" in rows(page, "ledger")[1]


def test_non_finite_numbers_are_gaps_with_a_mark_and_counted(make_run, tmp_path):
    lines = [training_line(step, loss=float(step)) for step in range(1, 8)]
    lines[3] |= {"loss": "nan", "grad_norm": "inf", "skipped": 1}
    for line in lines[4:]:
        line["skipped"] = 1
    page = read(render_report(make_run("run", lines), tmp_path / "report.html"))
    assert [len(points) for points in polylines(page, "loss")[0]] == [3, 3]
    (figure,) = page.find("figure", id="chart-loss")
    (mark,) = [path for path in page.find("path", figure) if "gap" in path["attrs"]["class"].split()]
    assert words(mark) == "run, step 4: nan"
    assert words(page.find("span", figure, class_="badge bad")[0]) == "1 not finite"
    assert rows(page, "summary")[1][-2:] == ["1", "2"]


def test_a_run_of_non_finite_numbers_alone_and_one_without_validation(make_run, tmp_path):
    page = read(render_report(make_run("run", [training_line(1, loss="nan")]), tmp_path / "report.html"))
    assert polylines(page, "loss") == {}
    assert "Nothing was measured." in words(page.find("figure", id="chart-val_loss")[0])
    assert rows(page, "summary")[1][5] == "–"


def test_long_runs_are_thinned_to_a_small_page_that_keeps_spikes(make_run, tmp_path):
    lines = [training_line(step, loss=3.0, grad_norm=1.0) for step in range(1, 100_001)]
    lines[54_320]["loss"] = 4.0
    for name in ("a", "b"):
        make_run(name, lines)
    path = render_report([tmp_path / "a", tmp_path / "b"], tmp_path / "report.html")
    assert path.stat().st_size < 2_000_000
    page = read(path)
    (raw,) = polylines(page, "loss", "raw")[0]
    assert 400 < len(raw) < 900
    highest = min(raw, key=lambda point: point[1])
    width = charts.WIDE - charts.MARGIN - charts.LEFT
    assert highest[0] == pytest.approx(charts.LEFT + width * 54_321 / 100_000, abs=0.06)
    (mean,) = polylines(page, "loss", "mean")[0]
    assert len(mean) == charts.MEANS


def test_many_runs_stay_small_and_told_apart(make_run, tmp_path):
    lines = [training_line(step, loss=3.0 + math.sin(step)) for step in range(1, 2001)]
    runs = [make_run(f"run-{index:02}", lines) for index in range(20)]
    path = render_report(runs, tmp_path / "report.html")
    assert path.stat().st_size < 2_000_000
    assert len({run_class(index) for index in range(20)}) == 20


def test_the_page_refers_to_nothing_outside_itself_and_runs_nothing(make_run, tmp_path):
    path = render_report([full_run(make_run, "a"), full_run(make_run, "b")], tmp_path / "report.html")
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert not page.find("script")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", html)
    references = [
        value
        for node in page.find()
        for name, value in node["attrs"].items()
        if name in {"src", "href", "srcset", "data", "action", "poster", "xlink:href"}
        or name.startswith("on")
    ]
    assert references == ["data:,"]


def test_text_of_a_run_is_escaped_everywhere(make_run, tmp_path):
    evil = "<script>alert(1)</script>\"'&"
    run = make_run(
        "run<b>",
        [training_line(1), {"step": 1, "samples": [{"prompt": evil, "text": evil}]}],
        config=json.dumps({"name": evil, evil: 1}),  # JSON is YAML
        environment={evil: evil},
        replacement=[{"pattern": evil, "hits": []}],
        ledger={
            "recipe": evil,
            "ok": False,
            "entries": [
                {"fqn": "a", "kind": evil, "gemm": "fprop", "format": evil, "kernel": "r", "count": 1}
            ],
        },
    )
    page = read(render_report([run, full_run(make_run)], tmp_path / "report.html"))
    assert not page.find("script")
    assert not page.find("b")
    assert page.find("pre")[0]["text"] == evil + evil
    assert "differs" in rows(page, "ledger")[1]


def test_text_that_utf8_lacks_is_escaped(make_run, tmp_path):
    line = '{"step": 1, "samples": [{"prompt": "a\\ud800", "text": "\\u0000\\u0007b"}]}'
    run = make_run("run", [], text=json.dumps(training_line(1)) + "\n" + line + "\n")
    assert "a\\ud800" in page_text(render_report(run, tmp_path / "report.html"))


def page_text(path):
    return read(path).find("section", id="samples")[0]["text"]


def test_runs_of_one_name_are_told_apart_by_their_path(make_run, tmp_path):
    runs = [make_run(f"{parent}/run", [training_line(1)]) for parent in ("one", "two")]
    page = read(render_report(runs, tmp_path / "report.html"))
    assert [words(item) for item in page.find("li")] == ["one/run", "two/run"]
    with pytest.raises(ConfigError, match="given twice"):
        render_report([runs[0], runs[0]], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="no run was given"):
        render_report([], tmp_path / "report.html")


def test_broken_files_beside_the_metrics_are_named(make_run, tmp_path):
    bad = {
        "environment.json": "[]", "ledger.json": '{"entries": [], "idle_experts": []}',
        "replacement.json": '[{"hits": []}]', "config.yaml": "a: [1\n",
    }  # fmt: skip
    for index, (name, text) in enumerate(bad.items()):
        run = make_run(f"run-{index}", [training_line(1)])
        (run / name).write_text(text)
        with pytest.raises(ConfigError, match=re.escape(name)):
            render_report(run, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_only_an_earlier_report_is_overwritten(make_run, tmp_path):
    run, out = make_run("run", [training_line(1)]), tmp_path / "report.html"
    first = render_report(run, out).read_text(encoding="utf-8")
    assert render_report(run, out).read_text(encoding="utf-8") == first
    (tmp_path / "notes.html").write_text("mine")
    with pytest.raises(ConfigError, match="not overwritten"):
        render_report(run, tmp_path / "notes.html")
    assert (tmp_path / "notes.html").read_text() == "mine"
    with pytest.raises(ConfigError, match="not a file"):
        render_report(run, tmp_path)
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory") as caught:
        render_report(run, tmp_path / "absent" / "report.html")
    assert caught.value.where == str(tmp_path / "absent" / "report.html")
    assert ".part" not in str(caught.value)
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_it(make_run, tmp_path, dark):
    page = render_report(full_run(make_run), tmp_path / "report.html")
    shot = tmp_path / "shot.png"
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command += ["--window-size=1280,1400", f"--screenshot={shot}", *(["--force-dark-mode"] if dark else [])]
    subprocess.run([*command, page.as_uri()], check=True, capture_output=True, timeout=60)
    image = pytest.importorskip("PIL.Image").open(shot).convert("RGB")
    paper = image.getpixel((3, 3))
    assert (sum(paper) < 120) == dark
    blue = (0x5A, 0xAE, 0xEA) if dark else (0x00, 0x72, 0xB2)
    assert sum(pixel == blue for pixel in image.crop((0, 300, 1280, 1400)).getdata()) > 500


def test_an_unfinished_last_line_is_noted_on_the_page(make_run, tmp_path):
    text = json.dumps(training_line(1)) + '\n{"step": 2, "lo'
    page = read(render_report(make_run("killed", [], text=text), tmp_path / "report.html"))
    (summary,) = page.find("section", id="summary")
    assert "killed: the last line of metrics.jsonl is incomplete" in " ".join(words(summary).split())


def test_control_characters_of_samples_are_shown_not_obeyed(make_run, tmp_path):
    sample = {"prompt": "a\tb\n", "text": "\x1b[2J\u202e\x00é"}
    page = read(
        render_report(make_run("run", [training_line(1), {"step": 1, "samples": [sample]}]), tmp_path / "r")
    )
    assert page.find("pre")[0]["text"] == "a\tb\n" + r"\x1b[2J\u202e\x00é"


def test_columns_of_trouble_stand_only_where_there_is_some(make_run, tmp_path):
    calm, trouble = make_run("calm", [training_line(1)]), make_run("trouble", [training_line(1, skipped=1)])
    heads = [
        words(read(render_report(runs, tmp_path / "r.html")).find("section", id="summary")[0])
        for runs in ([calm], [calm, trouble])
    ]
    assert ["Skipped" in head for head in heads] == [False, True]
    assert not any("Non-finite" in head for head in heads)
