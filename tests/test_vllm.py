"""A real vLLM, installed by the check itself, serves tiny EAGLE-3 heads token by token and count by count as we decode.

Two starts of vLLM: about a minute, and two more where it is not installed yet.
"""

import pytest

from eval.config import from_hydra
from eval.serving.check_config import ServeCheckConfig
from eval.serving.engine_check import check_engine
from eval.serving.environment import EngineUnavailable
from tests.eval.serving.tiny_heads import save_target, tiny_target, train_heads, write_prompts

pytestmark = pytest.mark.slow


def test_vllm_does_what_our_decoder_does(tmp_path):
    target = save_target(tiny_target(), tmp_path / "tiny-8")
    known = write_prompts(tmp_path / "known.jsonl", [f"say {word}" for word in "abcd"])
    unknown = write_prompts(tmp_path / "unknown.jsonl", [f"say {word}" for word in "xyz"])
    run = train_heads(target, known, "eagle3", tmp_path)
    settings = {"model": target, "source": str(run), "prompts": [known, unknown], "max_new_tokens": 40}
    try:
        summary = check_engine(from_hydra(ServeCheckConfig, settings))
    except EngineUnavailable as missing:
        pytest.skip(str(missing))
    assert summary["failures"] == []
    assert (summary["texts_equal"], summary["counters_equal"]) == (7, 7)
    accepted = summary["engine"]["accepted"]
    assert summary["engine"]["drafts"] > accepted[0] > accepted[2] > 0
    assert summary["settings"]["version"].startswith("0.32.0")
