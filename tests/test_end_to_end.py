"""From the target's own answers to heads that it decodes with: what is trained is what is served."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from eval.config import from_hydra
from eval.evaluation import EvalConfig, evaluate
from heads.export.medusa_reader import import_heads
from heads.layout import load_heads
from heads.target import TargetConfig, load_target
from scripts.export_heads import ExportConfig, export
from scripts.regenerate import RegenerateConfig, regenerate
from train.config import from_hydra as train_config
from train.loop import train

MODEL = {"name": "tiny", "path": "random:llama"}
CHAIN = [[0], [0, 0], [0, 0, 0]]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Heads fitted to six greedy answers of the tiny target until they know them by heart."""
    folder = tmp_path_factory.mktemp("run")
    prompts = folder / "prompts.jsonl"
    kinds = ("chat", "code")
    rows = [{"id": f"p{i}", "category": kinds[i % 2], "prompt": f"say {i * i}"} for i in range(6)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    regenerate(
        from_hydra(
            RegenerateConfig,
            {"model": MODEL, "prompts": [str(prompts)], "output": str(folder / "answers.jsonl"), "max_new_tokens": 48},
        )
    )
    train(
        train_config(
            {
                "model": MODEL,
                "heads": {"kind": "medusa", "num_heads": 3, "objective": {"decay": 1.0}},
                "data": {
                    "train": [str(folder / "answers.jsonl")],
                    "heldout": [str(prompts)],
                    "max_length": 128,
                    "cache_dir": str(folder / "cache"),
                },
                "trainer": {
                    "steps": 250,
                    "batch_size": 6,
                    "micro_batch_size": 6,
                    "lr": 1e-2,
                    "eval_prompts": 2,
                    "eval_tokens": 16,
                    "tracker": "none",
                },
                "run_name": "tiny",
                "output_dir": str(folder / "heads-run"),
            }
        )
    )
    return folder


def settings(run: Path, **changes) -> dict:
    base = {
        "model": MODEL,
        "source": str(run / "heads-run"),
        "prompts": [str(run / "prompts.jsonl")],
        "tree": {"source": "choices", "choices": CHAIN},
        "benchmark": {"max_new_tokens": 48, "probe_prompts": 1},
    }
    return {**base, **changes}


def test_heads_that_know_the_answers_emit_almost_depth_plus_one(run):
    summary = evaluate(from_hydra(EvalConfig, settings(run)))
    assert summary is not None
    assert summary["greedy_equal"] is True
    assert summary["tau"] >= 0.95 * (len(CHAIN) + 1)
    assert set(summary["categories"]) == {"chat", "code"}
    for name in ("report.json", "report.md", "report.html", "summary.png"):
        assert (run / "heads-run" / name).stat().st_size > 0
    assert json.loads((run / "heads-run" / "report.json").read_text())["tau"] == summary["tau"]


@pytest.mark.slow
def test_a_searched_tree_is_at_least_as_good_as_its_first_branch(run, tmp_path):
    tree = {"calibration": [str(run / "prompts.jsonl")], "nodes": 6, "calibration_tokens": 32}
    summary = evaluate(from_hydra(EvalConfig, settings(run, tree=tree, output=str(tmp_path))))
    assert summary is not None
    assert len(summary["tree"]) <= 6
    assert summary["greedy_equal"] is True
    assert summary["tau"] > 3


def test_an_export_read_back_drafts_the_same(run):
    export(from_hydra(ExportConfig, {"model": MODEL, "source": str(run / "heads-run"), "format": "vllm"}))
    target = load_target(TargetConfig(**MODEL), "cpu")
    back = import_heads(run / "heads-run" / "export-vllm", target, "vllm")
    for name, tensor in load_heads(run / "heads-run" / "heads", target).state_dict().items():
        assert tensor.equal(back.state_dict()[name]), name


@pytest.mark.slow
def test_two_processes_count_what_one_counts(run, tmp_path):
    single = evaluate(from_hydra(EvalConfig, settings(run, output=str(tmp_path / "one"))))
    assert single is not None
    config = tmp_path / "eval.yaml"
    OmegaConf.save(OmegaConf.create(settings(run, output=str(tmp_path / "two"))), config)
    program = (
        "import sys\nfrom omegaconf import OmegaConf\nfrom eval.config import from_hydra\n"
        "from eval.evaluation import EvalConfig, evaluate\n"
        "evaluate(from_hydra(EvalConfig, OmegaConf.load(sys.argv[1])))\n"
    )
    (tmp_path / "two.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29671"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(tmp_path / "two.py"), str(config)], check=True, env=environment)
    both = json.loads((tmp_path / "two" / "report.json").read_text())
    for key in ("tau", "alpha", "alpha_counts", "tree", "greedy_equal"):
        assert both[key] == single[key], key
    assert [row["name"] for row in both["prompts"]] == [row["name"] for row in single["prompts"]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "nowhere"}, "heads=nowhere holds no config.json"),
        ({"model": {"name": "other", "path": "random:llama-tied"}}, "weights_sha256|template|tokenizer|tie"),
        ({"tree": {"source": "choices", "choices": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}}, "is at depth 4 but the"),
        ({"tree": {"source": "mc_sim_7b_64"}}, "mc_sim_7b_63"),
        ({"tree": {"source": "auto"}}, "tree.source=auto needs tree.calibration"),
        ({"prompts": ["missing.jsonl"]}, "missing.jsonl"),
        (
            {"benchmark": {"acceptance": {"rule": "lucky"}}},
            "acceptance.rule=lucky must be greedy, sampling, block or typical",
        ),
        ({"benchmark": {"max_new_token": 3}}, "unknown setting benchmark.max_new_token"),
        ({"limit": "few"}, "setting limit"),
    ],
)
def test_wrong_input_is_answered_by_name(run, changes, message):
    with pytest.raises(ValueError, match=message):
        evaluate(from_hydra(EvalConfig, settings(run, **changes)))
