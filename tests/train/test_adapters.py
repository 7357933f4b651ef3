"""Medusa-2: an adapter trained with the heads changes the target as it says, and nothing else."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file

from data.batches import Batch, Step
from eval.decode import AcceptanceConfig, cache_capacity, plain_generate, speculative_generate
from eval.drafting import build_drafter, for_serving
from eval.sampling import SamplingConfig
from eval.stopping import StopConditions
from eval.tree import Tree
from heads.family import DraftHeads
from heads.layout import load_heads
from heads.medusa import MedusaConfig, MedusaHeads
from heads.target import FINAL_NORM, Target, TargetConfig, load_target
from train import loop
from train.adapted_features import AdaptedFeatures
from train.adapter import Adapter, AdapterConfig
from train.config import TrainerConfig, from_hydra
from train.drift import answer_logits, divergence
from train.joint import Joint
from train.loop import train
from train.optimizer import set_learning_rate
from train.start import load_frozen_target

# Six steps, of which two are the heads' alone; strong enough to move a random target in four.
JOINT = (
    "adapter.r=4",
    "adapter.alpha=8",
    "adapter.warmup_share=0.34",
    "adapter.lm_weight=1.0",
    "adapter.lr_ratio=0.5",
    "trainer.lr=0.01",
)
IDS = list(range(65, 95))


def fresh(family: str = "llama", adapter: Path | None = None) -> Target:
    return load_target(TargetConfig("tiny", f"random:{family}", adapter=adapter and str(adapter)), "cpu")


def moved_adapter(target: Target, size: float = 0.05, **settings: Any) -> Adapter:
    """An adapter with a B that is not 0."""
    adapter = Adapter(target, AdapterConfig(r=4, alpha=8, **settings), seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter.parameters.values():
        parameter.data += size * torch.randn(parameter.shape, generator=generator)
    return adapter


def unpacked(family: str = "llama") -> Target:
    return load_target(TargetConfig("tiny", f"random:{family}"), "cpu", pack=False)


def logits(target: Target) -> torch.Tensor:
    return answer_logits(target, IDS[:1], IDS[1:])


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def a_batch(target: Target, rows: int = 2) -> Batch:
    ids_BT = torch.randint(0, target.vocab_size, (rows, 20), generator=torch.Generator().manual_seed(2))
    supervised_BT = torch.zeros(rows, 20, dtype=torch.bool)
    supervised_BT[:, 5:17] = True
    documents_BT = torch.zeros(rows, 20, dtype=torch.long)
    documents_BT[0, 11:] = 1
    positions_BT = torch.arange(20).repeat(rows, 1)
    positions_BT[0, 11:] -= 11
    return Batch(ids_BT, supervised_BT, documents_BT, positions_BT)


@dataclass
class JointRun:
    """A run of six steps on a tied target, with everything kept that the tests ask for."""

    directory: Path
    target: Target
    measured: list[torch.Tensor]  # the logits of the target when tau was measured, after steps 2, 4 and 6

    def adapter(self, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.directory / "checkpoints" / f"step-{step:06d}" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def joint_run(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> JointRun:
    """The heads of step 4 are its best."""
    targets, measured, taus = [], [], iter([1.5, 2.5, 2.0])

    def keeping(config, accelerator):
        targets.append(load_frozen_target(config, accelerator))
        return targets[0]

    def measuring(target, heads, prompts, tokens):
        assert heads.target is target
        measured.append(logits(target))
        return next(taus), [0.5]

    values = {
        "model": {"name": "tiny", "path": "random:llama-tied"},
        "heads": {"kind": "medusa", "num_heads": 3, "init": "target"},
        "data": {"train": [str(chats / "train.jsonl")], "heldout": [str(chats / "heldout.jsonl")], "max_length": 192},
        "trainer": {"steps": 6, "batch_size": 4, "eval_prompts": 2, "eval_tokens": 8, "eval_every": 2, "log_every": 1},
        "run_name": "run",
        "output_dir": str(tmp_path_factory.mktemp("joint") / "run"),
    }
    more = OmegaConf.from_dotlist(
        [*JOINT, f"data.cache_dir={chats}/cache", "trainer.save_every=1", "trainer.keep_last=6", "trainer.tracker=none"]
    )
    config = OmegaConf.merge(OmegaConf.create(values), more)
    assert isinstance(config, DictConfig)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.start.load_frozen_target", keeping)
        patch.setattr("train.run.measure_tau", measuring)
        train(from_hydra(config))
    return JointRun(Path(values["output_dir"]), targets[0], measured)


def test_a_joint_run_moves_heads_and_adapter_alone(joint_run):
    before = fresh("llama-tied").model.state_dict()
    after = {name.replace(".base_layer", ""): value for name, value in joint_run.target.model.state_dict().items()}
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all("lora_" in name for name in after.keys() - before.keys())
    moved = joint_run.adapter(6)
    assert len(moved) == 4 * 7 * 2
    assert all(tensor.abs().max() > 0 for tensor in moved.values())
    rows = [row for row in metrics(joint_run.directory) if "train/loss" in row]
    assert rows[-1]["train/ce"] < rows[0]["train/ce"]
    assert ["train/target_kl" in row for row in rows] == [False, False, True, True, True, True]
    assert abs(rows[2]["train/target_kl"]) < 1e-5 < rows[-1]["train/target_kl"]


def test_the_adapter_rests_while_the_heads_warm_up(joint_run):
    for name, start in joint_run.adapter(1).items():
        assert ("lora_B" in name) == (not start.any())  # B is 0: the adapted target starts as the original
        assert torch.equal(start, joint_run.adapter(2)[name])
        if "lora_B" in name:
            assert not torch.equal(start, joint_run.adapter(3)[name])
    root = joint_run.directory / "checkpoints"
    resting, moving = (load_file(root / f"step-00000{step}" / "optimizer.safetensors") for step in (2, 3))
    assert not [name for name in resting if "adapter." in name]
    assert len([name for name in moving if "adapter." in name]) == 3 * len(joint_run.adapter(1))


def test_tau_is_measured_on_the_target_as_it_is_adapted(joint_run):
    resting, middle, last = joint_run.measured
    assert torch.equal(resting, logits(unpacked("llama-tied")))
    assert (middle - last).abs().max() > 1e-4
    assert (logits(fresh("llama-tied", joint_run.directory / "adapter")) - middle).abs().max() < 1e-4


def test_the_adapter_of_the_best_heads_is_handed_out_with_its_drift(joint_run):
    handed_out = load_file(joint_run.directory / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(value, joint_run.adapter(4)[name]) for name, value in handed_out.items())
    assert any(not torch.equal(value, joint_run.adapter(6)[name]) for name, value in handed_out.items())
    drift = json.loads((joint_run.directory / "adapter" / "drift.json").read_text())
    assert drift["worst_kl"] >= drift["mean_kl"] > 0
    assert drift["prompts"] == 2
    assert f"{drift['mean_kl']:.4f} nats" in drift["sentence"]


def test_the_heads_belong_to_the_adapted_target_alone(joint_run):
    assert load_heads(joint_run.directory / "heads", fresh("llama-tied", joint_run.directory / "adapter")).depth == 3
    with pytest.raises(ValueError, match=r"weights_sha256=\w+, this one has \w+; .*model\.adapter=<run>/adapter"):
        load_heads(joint_run.directory / "heads", fresh("llama-tied"))
    other = joint_run.directory / "checkpoints" / "step-000006"  # the adapter of another step is another target
    with pytest.raises(ValueError, match="weights_sha256"):
        load_heads(joint_run.directory / "heads", fresh("llama-tied", other))


def greedy_is_plain_greedy(heads: DraftHeads, target: Target) -> bool:
    """Whether decoding with the heads gives, token for token, plain greedy decoding of `target`."""
    conditions = StopConditions(target.eos_ids, (), 24, target.max_context)
    drafter = build_drafter(for_serving(heads, target), Tree.from_choices([[0], [1], [0, 0]]))
    cache = target.new_cache(cache_capacity(len(IDS), conditions, 8))
    found = speculative_generate(target, drafter, IDS, conditions, AcceptanceConfig(), cache).tokens
    return found == plain_generate(target, IDS, conditions, SamplingConfig(), cache).tokens


def test_decoding_with_the_heads_is_plain_decoding_of_the_merged_target(joint_run):
    target = fresh("llama-tied", joint_run.directory / "adapter")
    assert greedy_is_plain_greedy(load_heads(joint_run.directory / "heads", target), target)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "depth"), [("hydra", "num_heads"), ("eagle", "num_steps"), ("eagle3", "num_steps")])
def test_other_families_train_with_an_adapter_too(make_config, tmp_path, kind, depth):
    config = make_config(*JOINT, "trainer.steps=4")
    heads_config = {"kind": kind, depth: 2, "objective": {"ce_weight": 1.0, "kl_weight": 0.5}}
    directory = train(from_hydra({**config.resolved(), "heads": heads_config}))
    target = fresh(adapter=tmp_path / "run" / "adapter")
    assert (logits(target) - logits(fresh())).abs().max() > 1e-3
    assert greedy_is_plain_greedy(load_heads(directory, target), target)


class StopError(Exception):
    pass


@pytest.mark.parametrize("stop", [pytest.param(1, marks=pytest.mark.slow), 4])  # in the heads' warm-up, and behind it
def test_six_joint_steps_equal_a_part_and_a_resume_and_the_rest(make_config, tmp_path, monkeypatch, stop):
    def stopping(step, *rest, original=loop.accumulate_gradients):
        if step.number == stop:
            raise StopError
        return original(step, *rest)

    overrides = (*JOINT, "trainer.save_every=1", "adapter.dropout=0.2", "adapter.targets=[q_proj,down_proj]")
    train(make_config(*overrides, f"output_dir={tmp_path}/straight"))
    stopped = (*overrides, f"output_dir={tmp_path}/stopped")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "accumulate_gradients", stopping)
        with pytest.raises(StopError):
            train(make_config(*stopped))
    train(make_config(*stopped, "resume=true"))
    for name in ("model", "adapter_model", "optimizer"):
        one, other = (
            load_file(tmp_path / run / "checkpoints" / "step-000006" / f"{name}.safetensors")
            for run in ("straight", "stopped")
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    with pytest.raises(ValueError, match=r"not those of the run \(adapter: .*'r': 4.* before, .*'r': 2"):
        train(make_config(*stopped, "adapter.r=2", "resume=true"))


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_off_is_the_original_and_on_is_what_merging_gives(family, tmp_path):
    target = unpacked(family)
    original = logits(target)
    adapter = moved_adapter(target)
    adapted = logits(target)
    assert (adapted - original).abs().max() > 0.1
    with adapter.off():
        assert torch.equal(logits(target), original)
    assert torch.equal(logits(target), adapted)
    adapter.save(tmp_path)
    merged = fresh(family, tmp_path)
    assert (logits(merged) - adapted).abs().max() < 1e-4
    adapter.sign()
    assert merged.adapter_sha256 == target.adapter_sha256 != ""
    again = Adapter(unpacked(family), AdapterConfig(r=4, alpha=8), seed=5)
    again.load(tmp_path)
    assert torch.equal(logits(again.target), adapted)


def test_an_adapter_starts_as_the_original_everywhere():
    target = unpacked()
    original = logits(target)
    Adapter(target, AdapterConfig(), seed=0)
    assert torch.equal(logits(target), original)
    assert divergence(original, logits(target)).abs().max() == 0


def test_the_learning_rate_of_the_adapter_is_a_share_and_starts_late(random_heads):
    target = unpacked()
    adapter = Adapter(target, AdapterConfig(r=4, lr_ratio=0.25, warmup_share=0.5), seed=0)
    config = TrainerConfig(lr=0.1, warmup_ratio=0.2, weight_decay=0.3)
    joint = Joint(random_heads(target), adapter, config, Accelerator(cpu=True))
    for fraction, heads_rate, adapter_rate in (
        (0.2, 0.1, 0.0),
        (0.5, None, 0.0),
        (0.55, None, 0.25 * 0.1 / 2),  # half of its own warm-up
        (0.6, 0.05, 0.25 * 0.1),
        (1.0, 0.0, 0.0),
    ):
        assert heads_rate in (None, pytest.approx(set_learning_rate(joint.optimizer, fraction, config)))
        *heads, last = joint.optimizer.param_groups
        assert last["lr"] == pytest.approx(adapter_rate)
        assert last["weight_decay"] == 0.0
        assert len(last["params"]) == len(adapter.parameters)
        assert all(group["lr"] == set_learning_rate(joint.optimizer, fraction, config) for group in heads)


def test_the_loss_and_its_gradient_are_those_of_a_naive_loop(random_heads):
    """Heads' loss through the features, and KL(original || adapted) where a supervised token follows."""
    target = unpacked()
    adapter = moved_adapter(target, lm_weight=3.0, warmup_share=0.0)
    heads = random_heads(target, num_heads=2)
    source = AdaptedFeatures(target, heads.training_taps, torch.float32, adapter)
    source.begin(0.0)
    batch = a_batch(target)
    counts_K = torch.tensor([18, 15])

    def gradients() -> dict[str, torch.Tensor]:
        found = {name: parameter.grad.clone() for name, parameter in adapter.parameters.items()}
        adapter.model.zero_grad()
        return found

    features = source(batch)
    inputs = (batch.ids_BT, batch.supervised_BT, batch.documents_BT, batch.positions_BT)
    heads_loss = heads(features, *inputs, counts_K)[0]
    own = source.own_loss(batch, features, Step(number=0, epoch=0, whole=batch, micro_batches=[batch]))
    (heads_loss + own).backward()
    ours = gradients()

    with torch.no_grad(), adapter.off():
        original_BTV = target.logits(target.features(batch.ids_BT, batch.positions_BT, batch.documents_BT)[FINAL_NORM])
    features = target.features(batch.ids_BT, batch.positions_BT, batch.documents_BT)
    adapted_BTV = target.logits(features[FINAL_NORM])
    terms = [
        divergence(original_BTV[row, [t]], adapted_BTV[row, [t]])[0].float()
        for row in range(2)
        for t in range(19)
        if batch.supervised_BT[row, t + 1] and batch.documents_BT[row, t] == batch.documents_BT[row, t + 1]
    ]
    assert len(terms) == 12 + 11
    expected = 3.0 * sum(terms) / len(terms)
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)
    assert source.metrics()["train/target_kl"] == pytest.approx(expected.item() / 3.0, rel=1e-4)
    (heads(features, *inputs, counts_K)[0] + expected).backward()
    for name, gradient in gradients().items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-5)


def test_dropout_acts_in_training_alone():
    target = unpacked()
    adapter = moved_adapter(target, dropout=0.5)
    source = AdaptedFeatures(target, (FINAL_NORM,), torch.float32, adapter)
    batch = a_batch(target)
    adapter.let_move(True)
    one, other = (source(batch)[FINAL_NORM] for _ in range(2))
    assert not torch.equal(one, other)
    assert torch.equal(logits(target), logits(target))


def test_gemma_and_others_with_several_kinds_of_masks_train_too():
    target = unpacked("gemma3")
    adapter = moved_adapter(target)
    adapter.let_move(True)
    heads = MedusaHeads(MedusaConfig(num_heads=2), target.hidden_size, target.vocab_size, torch.arange(50))
    heads.bind(target).initialise()
    source = AdaptedFeatures(target, heads.training_taps, torch.float32, adapter)
    batch = a_batch(target)
    inputs = (batch.ids_BT, batch.supervised_BT, batch.documents_BT, batch.positions_BT)
    heads(source(batch), *inputs, torch.tensor([18, 15]))[0].backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in adapter.parameters.values())
