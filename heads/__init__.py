"""The families of heads, by the name that configs and exported files use."""

import torch

from heads.eagle import Eagle1Heads
from heads.eagle3 import Eagle3Heads
from heads.family import DraftHeads
from heads.hydra import HydraHeads
from heads.medusa import MedusaHeads

HEADS: dict[str, type[DraftHeads]] = {
    "medusa": MedusaHeads,
    "hydra": HydraHeads,
    "eagle": Eagle1Heads,
    "eagle3": Eagle3Heads,
}


@torch.no_grad()
def fresh_copy(heads: DraftHeads, dtype: torch.dtype = torch.float32) -> DraftHeads:
    """New heads like these, in `dtype`, on the same target, with their buffers; parameters are to be filled."""
    with torch.random.fork_rng(devices=[]):  # what they start from is no draw of the run's
        copy = HEADS[heads.kind](heads.config, heads.hidden_size, heads.vocab_size, heads.draft_ids)
    copy = copy.to(dtype).bind(heads.target)
    stored = copy.state_dict().keys()  # the other buffers follow from the target
    for name, buffer in heads.named_buffers():
        if name in stored:
            copy.get_buffer(name).copy_(buffer)
    return copy
