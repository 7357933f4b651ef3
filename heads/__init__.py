"""The families of heads, by the name that configs and exported files use."""

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
