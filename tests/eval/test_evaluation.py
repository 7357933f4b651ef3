"""One evaluation: the targets that it loads, and when it lets go of them."""

import gc
import json
import weakref

import pytest

import eval.evaluation
from eval.benchmark import ENGINE, GENERATE
from eval.config import from_hydra
from eval.evaluation import EvalConfig, evaluate
from heads.identity import identify
from heads.layout import save_heads

OTHER = f"{ENGINE}, bfloat16"


@pytest.fixture
def config(tmp_path, tiny_target, random_heads):
    target = tiny_target()
    save_heads(random_heads(target, num_heads=2), tmp_path / "heads", identify(target))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{i}", "prompt": f"say {i}"}) + "\n" for i in range(2)))
    values = {
        "model": {"name": "llama", "path": "random:llama", "dtype": "float32"},
        "source": str(tmp_path / "heads"),
        "prompts": [str(prompts)],
        "output": str(tmp_path / "report"),
        "other_dtypes": ["bfloat16"],
        "tree": {"source": "choices", "choices": [[0], [0, 0]]},
        "benchmark": {"max_new_tokens": 8, "probe_prompts": 1},
    }
    return from_hydra(EvalConfig, values)


@pytest.mark.parametrize("other_is_fastest", [True, False])
def test_a_target_in_another_dtype_is_loaded_once_and_kept_no_longer_than_it_is_timed(
    other_is_fastest, config, monkeypatch
):
    loaded, alive_while_decoding = {}, []
    load, run = eval.evaluation.load_target, eval.evaluation.run_benchmark

    def loading(model, device):
        assert model.dtype not in loaded, f"{model.dtype} is loaded twice"
        target = load(model, device)
        loaded[model.dtype] = weakref.ref(target)
        return target

    def probing(targets, prompts, benchmark):
        assert list(targets) == [ENGINE, OTHER]
        return {ENGINE: 2.0, OTHER: 3.0 if other_is_fastest else 1.0, GENERATE: 1.5}

    def running(*arguments):
        gc.collect()
        alive_while_decoding.append(loaded["bfloat16"]() is not None)
        yield from run(*arguments)
        gc.collect()

    def reporting(evaluation, folder):
        gc.collect()
        assert loaded["bfloat16"]() is None, "a second target is in memory while the report is written"
        return {"timed": set(evaluation.results[0].plain)}

    fakes = {"load_target": loading, "probe_plain": probing, "run_benchmark": running, "write_report": reporting}
    for name, fake in fakes.items():
        monkeypatch.setattr(eval.evaluation, name, fake)
    monkeypatch.setattr(eval.evaluation, "summary_figure", lambda summary, path: None)
    assert evaluate(config) == {"timed": {ENGINE, OTHER} if other_is_fastest else {ENGINE}}
    assert alive_while_decoding == [other_is_fastest]
    assert set(loaded) == {"float32", "bfloat16"}
