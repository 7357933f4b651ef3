"""The formula of a step's arithmetic against PyTorch's own count of the products that run."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from heads.alignment import find_anchors, label_counts
from heads.target import TargetConfig
from train.step_cost import OURS, Case, TrainingStep, inputs_of, load_or_make_target
from train.utilisation import heads_flops, measure_training, peak_flops, target_flops

CASE = Case("medusa", 4, TargetConfig("tiny", "random:llama"), None, 2, 120, 0.64, 1, 200)


def product(sum_shape, left_shape, right_shape, **_):
    return 2 * math.prod(left_shape) * right_shape[-1]


# PyTorch's own count leaves these out.
ADDED_IN_PLACE = {torch.ops.aten.addmm_: product, torch.ops.aten.baddbmm_: product}


@pytest.mark.parametrize(("family", "depth"), [("medusa", 4), ("eagle3", 5)])
def test_the_heads_formula_counts_the_products_that_run(family, depth):
    case = replace(CASE, family=family, depth=depth)
    step = TrainingStep(case, OURS)
    batch = step.batch
    features = step.source(batch)
    counts_K = label_counts(batch.supervised_BT, batch.documents_BT, depth)
    anchors = len(find_anchors(batch.ids_BT, batch.supervised_BT, batch.documents_BT, depth).rows_N)
    with FlopCounterMode(display=False, custom_mapping=ADDED_IN_PLACE) as counter:
        step.heads(features, *inputs_of(batch), counts_K)[0].backward()
    assert heads_flops(step.heads, case.rows, case.tokens, anchors) == pytest.approx(
        counter.get_total_flops(), rel=0.02
    )


def test_the_target_formula_counts_the_products_that_run():
    # In float16 no layer is packed for a CPU; eager attention computes both halves of the pairs in products of its own.
    target = load_or_make_target(replace(CASE.model, dtype="float16"), None, torch.device("cpu"))
    target.model.set_attn_implementation("eager")
    ids_BT, positions_BT = torch.zeros(2, 120, dtype=torch.long), torch.arange(120).expand(2, -1)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        target.features(ids_BT, positions_BT, torch.zeros_like(ids_BT))
    counts = counter.get_flop_counts()["Global"]
    products = counts[torch.ops.aten.mm] + counts[torch.ops.aten.bmm] / 2
    assert target_flops(target, 2, 120) == pytest.approx(products, rel=0.02)


def test_a_measured_step_says_what_it_needed_and_reached(monkeypatch):
    monkeypatch.setattr("train.utilisation.peak_flops", lambda name: 1e12)
    found = measure_training(CASE, rounds=2)
    assert found["tflop_per_s"] == pytest.approx(found["tflop"] / found["step_s"])
    assert found["tokens_per_s"] == pytest.approx(152 / found["step_s"], rel=0.05)
    assert found["mfu"] is None or found["mfu"] == pytest.approx(found["tflop_per_s"])


def test_heads_of_a_draft_vocabulary_train_on_the_device_of_the_target():
    step = TrainingStep(CASE, OURS)
    assert len(step.heads.d2t) == 200
    assert step.heads.lm_head().shape == (4, 200, 32)
    assert all(seconds > 0 for seconds in step().values())


def test_only_known_devices_have_a_peak():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H100 PCIe") is None
    assert peak_flops("CPU") is None
