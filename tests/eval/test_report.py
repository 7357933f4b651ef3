"""The summary's keys and sentences, and files that are whole, escaped and self-contained."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eval.plots import summary_figure
from eval.records import Cycle, Divergence, Evaluation, PromptResult, Timing
from eval.report import last_line, merge, summarise, write_report

KEYS = {
    *("tau", "alpha", "alpha_counts", "speedup", "speedup_any_dtype", "tokens_per_s", "greedy_equal"),
    *("categories", "predicted_tau", "plain_settings", "fastest_plain", "time_share", "prefill", "equality"),
    *(
        "tree",
        "cost_ms",
        "acceptance",
        "lossless",
        "heads",
        "kind",
        "target",
        "settings",
        "verdict",
        "prompts",
    ),
}
HOSTILE = "<script>alert(1)</script>|$x$"


def result(index: int, category: str = "math", speed: float = 2.0, **changes) -> PromptResult:
    """14 tokens in 5 cycles; plain decoding takes 0.1 s each, decoding with heads `speed` times less."""
    cycles = [Cycle(3, count, count + 1, count) for count in (3, 0, 2, 3, 1)]
    plain = [Timing(14, 0.2, 1.4 * noise) for noise in (1.0, 1.1, 0.9)]
    heads = [Timing(14, 0.3, 1.4 / speed, 0.1 / speed, 0.7 / speed)]
    base = PromptResult(f"{category}-{index}", category, 20, 15, {"eager": plain}, heads, cycles, True, index=index)
    return replace(base, **changes)


def evaluation(results: list[PromptResult], **changes) -> Evaluation:
    base = Evaluation(
        *("runs/heads", "medusa", "target", "greedy"),
        lossless=True,
        depth=4,
        tree=[[0], [0, 0], [0, 0, 0]],
        results=results,
        settings={"seed": 1, "path": Path("x"), "limit": float("inf")},
        cost_ms={"plain": 10.0, "verify 8": 12.0, "verify 16": 15.0, "draft": 1.0},
    )
    return replace(base, **changes)


SIX = [result(index, "math" if index % 2 else "qa") for index in range(6)]


def test_summary_has_its_keys_and_is_json():
    summary = summarise(evaluation(SIX))
    assert set(summary) == KEYS
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["settings"] == {"dtype": "float32", "seed": 1, "path": "x", "limit": None}


def test_summary_numbers():
    summary = summarise(evaluation(SIX))
    assert summary["tau"] == pytest.approx(2.8)
    assert summary["alpha"] == pytest.approx([4 / 5, 3 / 4, 2 / 3, None])
    assert summary["alpha_counts"] == [[24, 30], [18, 24], [12, 18], [0, 0]]
    assert summary["speedup"] == pytest.approx({"median": 2.0, "low": 2.0, "high": 2.0})
    assert summary["tokens_per_s"] == pytest.approx({"plain": 10.0, "heads": 20.0})
    assert summary["predicted_tau"] == pytest.approx(
        {"pooled_alpha": 0.75, "depth": 3, "constant_alpha": 2.734375, "chain": 2.8, "measured": 2.8}
    )
    assert summary["time_share"] == pytest.approx({"draft": 1 / 14, "verify": 0.5, "rest": 6 / 14})
    assert summary["prefill"]["plain_tokens_per_s"] == pytest.approx(100.0)
    assert summary["prefill"]["end_to_end_tokens_per_s"] == pytest.approx({"plain": 15 / 1.6, "heads": 15.0})
    assert summary["tree"][1] == {"node": [0, 0], "offered": 30, "accepted": 18, "rate": pytest.approx(0.6)}
    assert last_line(summary) == "tau=2.80 speedup=2.00 [2.00, 2.00]"


def test_categories_and_prompts():
    summary = summarise(evaluation([*SIX, result(6, "qa", speed=1.0)]))
    assert list(summary["categories"]) == ["qa", "math"]
    assert summary["categories"]["math"]["speedup"]["median"] == pytest.approx(2.0)
    assert summary["categories"]["qa"]["speedup"]["median"] == pytest.approx(4 / 2.5)
    assert summary["categories"]["qa"]["prompts"] == 4
    row = summary["prompts"][0]
    assert row["emitted"] == [0, 1, 1, 1, 2]
    assert row["spread"] == pytest.approx({"plain": 1 / 0.9 - 1 / 1.1, "heads": 0.0})


def test_a_prompt_that_ends_at_once_counts_but_has_no_rates():
    silent = result(6, "silent", plain={"eager": [Timing(0, 0.2, 0.0)]}, heads=[Timing(0, 0.3, 0.0)], cycles=[])
    summary = summarise(evaluation([*SIX, silent]))
    assert summary["speedup"]["median"] == pytest.approx(2.0)
    assert summary["categories"]["silent"]["tau"] is None
    assert summary["categories"]["silent"]["speedup"] == {"median": None, "low": None, "high": None}


def test_other_dtypes_inform_but_do_not_set_the_baseline():
    faster = [replace(r, plain={**r.plain, "half": [Timing(14, 0.1, 0.5)]}) for r in SIX]
    summary = summarise(evaluation(faster, settings={"other_dtype_settings": ["half"]}))
    assert summary["fastest_plain"] == "eager"
    assert summary["speedup"]["median"] == pytest.approx(2.0)
    assert summary["speedup_any_dtype"]["median"] == pytest.approx(0.5 / 0.7)
    assert summary["plain_settings"]["half"] == pytest.approx(28.0)
    assert "another dtype (half) it is 0.71x, slower than without heads" in summary["verdict"]
    assert summarise(evaluation(faster))["fastest_plain"] == "half"


@pytest.mark.parametrize(
    ("speed", "advice"),
    [
        (0.8, "Leave the heads off"),
        (1.19, "Leave the heads off"),
        (1.3, "help a little"),
        (1.6, "worth serving"),
    ],
)
def test_verdict_follows_the_speedup(speed: float, advice: str):
    verdict = summarise(evaluation([result(index, speed=speed) for index in range(6)]))["verdict"]
    assert advice in verdict
    assert f"tau is 2.80 and decoding runs at {speed:.2f}x [{speed:.2f}, {speed:.2f}]" in verdict
    assert verdict.endswith("on all 6 prompts.")


def test_verdict_owns_up_to_few_prompts_and_wide_intervals():
    assert "fewer than 5 prompts" in summarise(evaluation(SIX[:2]))["verdict"]
    mixed = [result(index, speed=speed) for index, speed in enumerate((3, 3, 0.8, 0.8, 3, 0.9))]
    assert "interval reaches below 1.2x" in summarise(evaluation(mixed))["verdict"]


def test_verdict_calls_a_divergence_a_bug_only_where_it_is_one():
    astray = result(6, equal=False, divergence=Divergence(7, 11, 12, 0.031))
    exact, rounded = (summarise(evaluation([*SIX, astray], dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert exact["greedy_equal"] is False
    assert exact["equality"]["divergences"] == [
        {"prompt": "math-6", "position": 7, "plain_token": 11, "heads_token": 12, "margin": 0.031}
    ]
    assert "1 of 7 prompts, which is a bug (largest top-2 logit margin there: 0.031)" in exact["verdict"]
    assert "bug" not in rounded["verdict"]
    assert "largest top-2 logit margin there being 0.031" in rounded["verdict"]


def test_lossy_and_sampled_runs_say_so():
    sampled = [replace(r, equal=None) for r in SIX]
    lossy = summarise(evaluation(sampled, acceptance="typical", lossless=False))
    assert lossy["greedy_equal"] is None
    assert "typical acceptance is lossy" in lossy["verdict"]
    assert "was not compared" in summarise(evaluation(sampled, acceptance="sampling"))["verdict"]


def test_nothing_to_report_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match="no results"):
        write_report(evaluation([]), tmp_path / "report")
    assert not (tmp_path / "report").exists()
    with pytest.raises(ValueError, match="needs a baseline"):
        summarise(evaluation([result(0, plain={})]))


def test_merge_equals_a_single_process():
    whole = evaluation(SIX)
    assert merge([evaluation(SIX[0::2]), evaluation(SIX[1::2])]) == whole
    contiguous = [replace(r, index=0) for r in SIX]
    assert merge([evaluation(contiguous[:4]), evaluation(contiguous[4:])]) == evaluation(contiguous)


def test_merge_refuses_parts_that_do_not_belong_together():
    with pytest.raises(ValueError, match="differ in kind: 'eagle3' and 'medusa'"):
        merge([evaluation(SIX[:3]), evaluation(SIX[3:], kind="eagle3")])
    with pytest.raises(ValueError, match="'math-3' was measured by two processes"):
        merge([evaluation(SIX[:4]), evaluation(SIX[3:])])
    with pytest.raises(ValueError, match="no evaluation to merge"):
        merge([])


class Checker(HTMLParser):
    """Collects unbalanced tags, repeated ids and whatever a browser would fetch."""

    VOID = frozenset({"meta", "br", "link", "img", "hr", "input"})

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in {"src", "href", "xlink:href"} and not (value or "").startswith("#"):
                self.fetched.append(value or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    astray = Divergence(7, 11, 12, 0.031)
    hostile = result(6, HOSTILE, name=HOSTILE, equal=False, divergence=astray)
    folder = tmp_path_factory.mktemp("report")
    write_report(evaluation([*SIX, hostile], target=HOSTILE, settings={"note": HOSTILE}), folder)
    return folder


def test_three_files_and_no_leftovers(written: Path):
    assert sorted(path.name for path in written.iterdir()) == ["report.html", "report.json", "report.md"]
    assert set(json.loads((written / "report.json").read_text())) == KEYS | {"training", "other_runs"}


def test_html_is_well_formed_and_self_contained(written: Path):
    text = (written / "report.html").read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open
    assert not checker.fetched
    assert not checker.tags & {"script", "link", "img", "iframe"}
    assert len(checker.ids) == len(set(checker.ids))
    assert "url(http" not in text
    assert "@import" not in text
    assert text.count("<svg") == 6


def test_names_are_escaped_everywhere(written: Path):
    page, markdown = ((written / name).read_text(encoding="utf-8") for name in ("report.html", "report.md"))
    assert "<script" not in page + markdown
    assert "&lt;script&gt;alert(1)&lt;/script&gt;|$x$" in page
    rows = [re.sub(r"\\\|", "", line) for line in markdown.splitlines() if "alert(1)" in line and line[0] == "|"]
    assert rows
    assert {row.count("|") for row in rows} <= {6, 9}


def test_page_and_figure_of_a_bare_evaluation(tmp_path: Path):
    """No tree, no cost, no timed parts, one category, names outside the font."""
    bare = [result(index, "数学", heads=[Timing(14, 0.3, 0.7)]) for index in range(2)]
    summary = write_report(evaluation(bare, tree=[], cost_ms={}), tmp_path)
    assert (tmp_path / "report.html").read_text(encoding="utf-8").count("<svg") == 3
    summary_figure(summary, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_figure_is_1600_by_700(tmp_path: Path):
    summary_figure(summarise(evaluation(SIX)), tmp_path / "figure.png")
    header = (tmp_path / "figure.png").read_bytes()[16:24]
    assert (int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")) == (1600, 700)
