"""The families of heads, by the name that configs and exported files use."""

from heads.medusa import MedusaHeads

HEADS = {"medusa": MedusaHeads}
