"""Merge a LoRA adapter into its target: the model directory that servers load, and that the heads belong to.

python scripts/merge_adapter.py model=llama3-8b adapter=outputs/medusa2/adapter output=outputs/medusa2/target
python scripts/export_heads.py model=llama3-8b model.path=outputs/medusa2/target heads=outputs/medusa2 format=vllm
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import hydra
import torch
from omegaconf import DictConfig
from rich.console import Console
from torch import Tensor, nn

from eval.config import from_hydra
from heads.adapters import apply_adapter, attach_adapter, merge_adapter
from heads.export.files import replacing
from heads.identity import public_name
from heads.target import TargetConfig, load_model
from train.adapter import DRIFT_FILE

PROBE_TOKENS = 64
# Relative to the largest logit. Float32 sums W x + (alpha / r) B A x in another order; bfloat16 rounds W + BA anew.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True)
class MergeConfig:
    """`conf/merge.yaml`. The merged model has the dtype in which `model.dtype` loads the target."""

    model: TargetConfig
    adapter: str
    output: str

    def __post_init__(self):
        if self.model.quantization is not None:
            raise ValueError(
                f"model.quantization={self.model.quantization}: weights are merged unquantised; set it to null"
            )


def merge(config: MergeConfig, console: Console) -> None:
    """Merge, compare the logits before and after, write the directory.

    Raises:
        ValueError: if the adapter does not fit the target, the output is in use, or the logits are not the same.
    """
    model, tokenizer = load_model(config.model, torch.device("cpu"))
    if config.model.adapter is not None:  # one below the other
        model = apply_adapter(model, config.model.adapter)
    adapted = attach_adapter(model, config.adapter)
    before = probe(model)
    merged = merge_adapter(adapted)
    difference = ((probe(merged) - before).abs().max() / before.abs().max()).item()
    if not difference <= LIMITS[merged.dtype]:
        raise ValueError(
            f"adapter={config.adapter}: merged in {merged.dtype}, logits differ from those with the adapter beside the "
            f"weights by {difference:.2g} of the largest; merge with model.dtype=float32"
        )
    with replacing(Path(config.output), ()) as fresh:
        merged.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        (fresh / "README.md").write_text(card(config))
    console.print(f"wrote {config.output}: logits within {difference:.1g} of those with the adapter", markup=False)
    console.print(drift_sentence(config.adapter) or "its drift from the original is not known", markup=False)


@torch.inference_mode()
def probe(model: Any) -> Tensor:
    """The logits [1, T, V] of some tokens, in float32."""
    size = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    ids_BT = torch.arange(PROBE_TOKENS)[None] * 7919 % size
    return model(input_ids=ids_BT, use_cache=False).logits.float()


def card(config: MergeConfig) -> str:
    """The README.md of the merged target."""
    name = public_name(config.model)
    lines = [
        f"# {name}, adapted\n",
        (
            f"{name} with a LoRA adapter merged into its weights, by Headstart. It is another model than {name} and "
            "gives other answers. Heads that were trained together with the adapter speed up this model alone; with "
            "them it gives exactly its own answers, not those of the original."
        ),
        drift_sentence(config.adapter),
        f"Licence of the original: {config.model.licence}",
    ]
    return "\n\n".join(line for line in lines if line) + "\n"


def drift_sentence(adapter: str) -> str:
    """What the training run measured of the adapter's effect, "" if it is not beside it."""
    path = Path(adapter) / DRIFT_FILE
    return json.loads(path.read_text())["sentence"] if path.is_file() else ""


@hydra.main(version_base="1.3", config_path="../conf", config_name="merge")
def main(composed: DictConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        merge(from_hydra(MergeConfig, composed), Console(soft_wrap=True, highlight=False))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
