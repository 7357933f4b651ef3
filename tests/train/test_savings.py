"""Each saving of the training step: without it the loss is the same, and the work another."""

import contextlib
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import heads.eagle
import heads.hydra
import heads.medusa
import heads.target
import heads.tiling
import train.step_cost
from heads.alignment import label_counts
from heads.divergences import Teacher
from heads.eagle import EagleHeads
from heads.target import TargetConfig
from train.savings import SAVINGS
from train.step_cost import DEPTH, OURS, Case, TrainingStep, inputs_of

REBOUND = (
    (heads.medusa, "find_anchors"),
    (heads.hydra, "find_anchors"),
    (heads.eagle, "find_anchors"),
    (heads.target, "one_document_rows"),
    (EagleHeads, "unroll"),
    (train.step_cost, "build_optimizer"),
)


@contextlib.contextmanager
def restored():
    """Bring back what a saving rebinds; and let even a tiny block of logits have several tiles."""
    with pytest.MonkeyPatch.context() as patch:
        for place, name in REBOUND:
            patch.setattr(place, name, getattr(place, name))
        patch.setattr(Teacher, "distinct", staticmethod(Teacher.distinct))
        patch.setattr(heads.tiling, "TILE_LOGITS", 1000)
        yield


class Work(TorchDispatchMode):
    """Counts the operations, by name and size of what they make."""

    def __init__(self):
        super().__init__()
        self.done: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = tuple(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self.done[str(func), sizes] += 1
        return result


def take_step(family: str):
    """Loss, gradients and work of one step."""
    model = TargetConfig("tiny", "random:llama", dtype="float32")
    step = TrainingStep(Case(family, 3, model, None, rows=2, tokens=24, supervised=0.6, threads=1), OURS)
    batch = step.batch
    counts_K = label_counts(batch.supervised_BT, batch.documents_BT, 3)
    torch.manual_seed(0)  # of EAGLE-1's noise
    with Work() as work:
        loss, _ = step.heads(step.source(batch), *inputs_of(batch), counts_K)
        loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in step.trainable.items()}
        step.optimizer.step()
    return loss.detach(), gradients, work.done


@pytest.mark.parametrize("family", DEPTH)
def test_without_a_saving_the_loss_is_the_same_and_the_work_is_not(family):
    with restored():
        loss, gradients, work = take_step(family)
    for name, saving in SAVINGS.items():
        if family not in saving.families:
            continue
        with restored():
            saving.undo()
            without, found, more = take_step(family)
        assert more != work, name
        torch.testing.assert_close(without, loss, rtol=1e-5, atol=1e-7, msg=name)
        for parameter, gradient in gradients.items():
            apart = (found[parameter] - gradient).norm() / gradient.norm()
            assert apart < 1e-5, (name, parameter)
