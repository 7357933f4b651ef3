"""Every family by the same commands: trained on a few answers until it knows them, it drafts them by heart."""

import json

import pytest

from eval.config import from_hydra
from eval.evaluation import EvalConfig, evaluate
from scripts.regenerate import RegenerateConfig, regenerate
from train.config import from_hydra as train_config
from train.loop import train

pytestmark = pytest.mark.slow  # four runs and twelve evaluations: a minute

MODEL = {"name": "tiny", "path": "random:llama"}
CHAIN = {"source": "choices", "choices": [[0], [0, 0], [0, 0, 0]]}
STATIC = {"source": "choices", "choices": [[0], [1], [0, 0], [1, 0], [0, 1], [0, 0, 0]]}
DYNAMIC = {"source": "dynamic", "nodes": 7, "depth": 3, "expand": 2}
FAMILIES = {
    "medusa": {"num_heads": 3, "objective": {"decay": 1.0}},
    "hydra": {"num_heads": 3, "objective": {"decay": 1.0}},
    "eagle": {"num_steps": 3, "noise": 0.0, "objective": {"ce_weight": 1.0, "kl_weight": 0.0, "decay": 1.0}},
    "eagle3": {"num_steps": 3, "objective": {"ce_weight": 1.0, "kl_weight": 0.0, "decay": 1.0}},
}


@pytest.fixture(scope="module", params=FAMILIES)
def run(request, tmp_path_factory):
    """A run directory of one family, fitted to two greedy answers of the tiny target."""
    folder = tmp_path_factory.mktemp(request.param)
    prompts, answers = folder / "prompts.jsonl", folder / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{i}", "prompt": f"say {i * i}"}) + "\n" for i in range(2)))
    regenerate(
        from_hydra(
            RegenerateConfig,
            {"model": MODEL, "prompts": [str(prompts)], "output": str(answers), "max_new_tokens": 48},
        )
    )
    data = {"train": [str(answers)], "heldout": [str(prompts)], "max_length": 128, "cache_dir": str(folder / "cache")}
    trainer = {"steps": 200, "batch_size": 2, "micro_batch_size": 2, "lr": 1e-2, "eval_prompts": 1, "tracker": "none"}
    train(
        train_config(
            {
                "model": MODEL,
                "heads": {"kind": request.param, **FAMILIES[request.param]},
                "data": data,
                "trainer": trainer,
                "run_name": "tiny",
                "output_dir": str(folder / "run"),
            }
        )
    )
    return folder


@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
def test_what_was_learnt_by_heart_is_drafted_by_heart(run, shape):
    tree = {"chain": CHAIN, "static": STATIC, "dynamic": DYNAMIC}[shape]
    if shape == "dynamic" and run.name.startswith("medusa"):
        tree = {"calibration": [str(run / "prompts.jsonl")], "nodes": 7}  # Medusa's own: searched
    summary = evaluate(
        from_hydra(
            EvalConfig,
            {
                "model": MODEL,
                "source": str(run / "run"),
                "prompts": [str(run / "prompts.jsonl")],
                "output": str(run / shape),
                "tree": tree,
                "benchmark": {"max_new_tokens": 40, "probe_prompts": 1},
            },
        )
    )
    assert summary is not None
    assert summary["greedy_equal"] is True
    assert summary["tau"] >= 0.95 * 4
