"""From heads and a draft tree to a drafter: the one place that knows which family drafts how."""

import torch

from eval.drafters import Drafter, MedusaDrafter
from eval.eagle_stepper import EagleStepper
from eval.hydra_stepper import HydraStepper
from eval.level_drafter import DynamicDrafter, DynamicTree, StaticDrafter, Stepper
from eval.sampling import Coin, SamplingConfig
from eval.tree import Tree
from heads import fresh_copy
from heads.eagle import EagleHeads
from heads.family import DraftHeads
from heads.hydra import HydraHeads
from heads.medusa import MedusaHeads
from heads.packed import can_pack, pack_linears
from heads.target import Target


def for_serving(heads: DraftHeads, target: Target) -> DraftHeads:
    """Bring heads into the dtype and layout that the target decodes in; they cannot be trained after it."""
    heads = heads.to(target.dtype).eval()
    if target.device.type == "cpu" and can_pack(target.dtype):
        pack_linears(heads)
        heads.pack_lm_head()
    return heads


@torch.no_grad()
def as_served(heads: DraftHeads, target: Target) -> DraftHeads:
    """A copy of heads in training, as `for_serving` decodes saved ones; the heads themselves stay as they are."""
    copy = fresh_copy(heads, target.dtype)
    for name, parameter in heads.named_parameters():
        copy.get_parameter(name).copy_(parameter)
    return for_serving(copy, target)


def build_drafter(
    heads: DraftHeads, tree: Tree | DynamicTree, sampling: SamplingConfig | None = None, coin: Coin | None = None
) -> Drafter:
    """How `heads` propose `tree`; with `sampling` the drafts are drawn by `coin`, else the likeliest are taken.

    Raises:
        ValueError: if these heads cannot draft this tree, or cannot draw it.
    """
    if isinstance(heads, MedusaHeads):
        if isinstance(tree, DynamicTree):
            raise ValueError("Medusa heads guess all levels at once and have no dynamic tree; use a static one")
        return MedusaDrafter(heads, tree, sampling, coin)
    if isinstance(tree, Tree):
        return StaticDrafter(_stepper(heads), tree, sampling, coin)
    if sampling is not None:
        raise ValueError(
            "a dynamic tree chooses among its drafts by their likelihood, which would bias sampled ones; "
            "use acceptance.drafts=top, or a static tree"
        )
    return DynamicDrafter(_stepper(heads), tree)


def deepest_draft(heads: DraftHeads) -> int | None:
    """Levels of the deepest tree that these heads can draft; None for any number."""
    return heads.depth if isinstance(heads, MedusaHeads) else _stepper(heads).max_depth


def _stepper(heads: DraftHeads) -> Stepper:
    if isinstance(heads, HydraHeads):
        return HydraStepper(heads)
    assert isinstance(heads, EagleHeads)
    return EagleStepper(heads)
