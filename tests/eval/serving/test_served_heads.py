"""Which files an engine gets for which heads, and which heads it is not given."""

import pytest
import torch

from eval.serving.served_heads import served_heads
from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.export.kinds import WRITERS
from heads.identity import identify
from heads.layout import save_heads
from tests.heads.test_eagle import make

SOME_IDS = torch.arange(20, 220)


@pytest.fixture
def saved(tiny_target, random_heads, tmp_path):
    """saved(kind) -> the directory of heads as trained, which draft some of the token ids."""

    def save(kind: str):
        target = tiny_target()
        if kind == "medusa":
            heads = random_heads(target, num_heads=3, draft_ids=SOME_IDS)
        else:
            config = EagleConfig() if kind == "eagle" else Eagle3Config(taps=[0, 1, 2])
            heads = make(target, config, draft_ids=SOME_IDS)
        save_heads(heads, tmp_path / "run" / "heads", identify(target))
        return tmp_path / "run"

    return save


@pytest.mark.parametrize(
    ("kind", "form", "drafted"),
    [("eagle3", None, 200), ("eagle3", "speculators", 200), ("eagle", None, 320), ("medusa", "vllm", 320)],
)
def test_a_run_is_exported_and_an_export_is_taken_as_it_is(saved, tiny_target, tmp_path, kind, form, drafted):
    run = saved(kind)
    first = served_heads(str(run), tiny_target(), None, tmp_path / "check", form=form)
    assert (first.kind, first.format, first.chain) == (kind, form or "vllm", 3)
    assert first.directory == tmp_path / "check" / f"export-{first.format}"
    assert len(first.heads.d2t) == drafted
    again = served_heads(str(first.directory), tiny_target(), 2, tmp_path / "unused")
    assert (again.kind, again.format, again.chain, again.directory) == (kind, first.format, 2, first.directory)
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize(
    ("kind", "exported", "settings", "message"),
    [
        ("medusa", None, {"form": "speculators"}, "holds medusa heads, format=speculators takes eagle3 heads"),
        ("eagle", None, {"form": "speculators"}, "holds eagle heads, format=speculators takes eagle3 heads"),
        ("medusa", None, {"chain": 4}, "num_speculative_tokens=4 must be 1 to 3, the number of Medusa heads"),
        ("eagle3", "vllm", {"form": "speculators"}, "an export with format=vllm, not format=speculators; leave format"),
        ("eagle3", "speculators", {"form": "vllm"}, "format=speculators, not format=vllm; .* or give the run"),
        ("medusa", "fasterdecoding", {}, "format=fasterdecoding, whose biases vLLM drops .*; export them with format="),
    ],
)
def test_what_cannot_be_served_is_said(saved, tiny_target, tmp_path, kind, exported, settings, message):
    source, target = saved(kind), tiny_target()
    if exported is not None:
        more = {"expand_vocabulary": True} if kind == "medusa" else {}
        WRITERS[kind](source / "heads", tmp_path / "out", target, exported, **more)
        source = tmp_path / "out"
    with pytest.raises(ValueError, match=message):
        served_heads(str(source), target, settings.pop("chain", None), tmp_path / "check", **settings)
