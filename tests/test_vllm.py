"""A real vLLM, installed by the check itself, serves tiny heads token by token and count by count as we decode.

EAGLE-3 in its own format is served in `test_smollm2_served` and in `test_literal_command`.
Four starts of vLLM: about two minutes, and two more where it is not installed yet.
"""

from dataclasses import dataclass
from typing import Any

import pytest

from eval.config import from_hydra
from eval.serving.check_config import ServeCheckConfig
from eval.serving.engine import EngineClient
from eval.serving.engine_check import check_engine, serving
from eval.serving.environment import EngineUnavailable
from eval.serving.vllm_engine import VllmEngine, cpu_python
from tests.eval.serving.tiny_heads import save_target, tiny_target, train_heads, write_prompts

pytestmark = pytest.mark.slow

TOKENS, CHAIN = 40, 3


@dataclass(frozen=True)
class Setting:
    """A target on disk, prompts whose answers heads are trained on, all prompts, and vLLM that serves it plainly."""

    target: dict[str, Any]
    known: str
    prompts: list[str]
    plain: EngineClient


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    target = save_target(tiny_target(), folder / "tiny-8")
    known = write_prompts(folder / "known.jsonl", [f"say {word}" for word in "abcd"])
    unknown = write_prompts(folder / "unknown.jsonl", [f"say {word}" for word in "xyz"])
    try:
        engine = VllmEngine(cpu_python(), target["path"], heads=None, dtype="float32", max_context=128)
    except EngineUnavailable as missing:
        pytest.skip(str(missing))
    config = from_hydra(ServeCheckConfig, {"model": target, "source": "none", "output": str(folder)})
    with serving(config, engine, with_heads=False) as plain:
        yield Setting(target, known, [known, unknown], plain)


@pytest.mark.parametrize(("kind", "form"), [("eagle3", "speculators"), ("eagle", "vllm"), ("medusa", "vllm")])
def test_vllm_does_what_our_decoder_does(setting, tmp_path, kind, form):
    run = train_heads(setting.target, setting.known, kind, tmp_path)
    asked = {"prompts": setting.prompts, "max_new_tokens": TOKENS, "num_speculative_tokens": CHAIN, "format": form}
    config = from_hydra(ServeCheckConfig, {"model": setting.target, "source": str(run), **asked})
    summary = check_engine(config, setting.plain)
    assert summary["failures"] == []
    assert (summary["texts_equal"], summary["counters_equal"]) == (7, 7)
    accepted = summary["engine"]["accepted"]
    assert summary["engine"]["drafts"] > accepted[0] > accepted[2] > 0
    assert (summary["settings"]["kind"], summary["settings"]["format"]) == (kind, form)
    assert summary["settings"]["version"].startswith("0.32.0")
