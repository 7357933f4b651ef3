"""Prepared data: all samples of a split as flat tensors, and the safetensors file that holds them.

# Shapes: N tokens of all samples one after the other, S samples, V vocabulary
"""

import hashlib
import json
import logging
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.disk import whole, write_whole, writing

logger = logging.getLogger(__name__)

RUN_AGAIN = "run again"


@dataclass(frozen=True)
class Summary:
    """What became of the rows. A sample is one training sequence; a conversation may give several."""

    num_rows: int
    num_samples: int
    num_tokens: int
    num_supervised: int
    num_truncated: int
    num_unsupervised_after_truncation: int
    num_turns: int
    num_turns_without_end: int  # answers in which no eos id follows: the heads learn no end of turn from them
    problems: dict[str, int]

    def __str__(self) -> str:
        counts = asdict(self)
        problems = counts.pop("problems")
        lines = [f"{name.removeprefix('num_').replace('_', ' ')}: {count}" for name, count in counts.items()]
        return "; ".join(lines + [f"left out ({reason}): {count}" for reason, count in problems.items()])


@dataclass(frozen=True, eq=False)
class PreparedData:
    """Samples of one split. `digest` identifies the content and everything that it was made with."""

    ids_N: Tensor  # int32
    supervised_N: Tensor  # uint8
    offsets_S1: Tensor  # int64, S + 1: sample i is offsets[i] : offsets[i + 1]
    category_S: Tensor  # int32, index into category_names
    category_names: list[str]
    summary: Summary
    digest: str

    def __len__(self) -> int:
        return len(self.offsets_S1) - 1

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        """Token ids (T,) int64 and supervised (T,) bool of one sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start, stop = self.offsets_S1[index : index + 2].tolist()
        return self.ids_N[start:stop].long(), self.supervised_N[start:stop].bool()

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return self.offsets_S1.diff().tolist()

    @cached_property
    def categories(self) -> list[str]:
        """Category of each sample, "" where the row named none."""
        return [self.category_names[index] for index in self.category_S.tolist()]

    @property
    def supervised_tokens(self) -> int:
        """Supervised tokens of all samples."""
        return self.summary.num_supervised

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often each id is supervised, (V,) int64: what the draft vocabulary is chosen by.

        Raises ValueError if the data holds an id outside `vocab_size` (the target's, not the tokenizer's).
        """
        largest = int(self.ids_N.max())
        if largest >= vocab_size:
            raise ValueError(
                f"the data holds token id {largest}, vocab_size={vocab_size} does not; "
                "prepare the data with the target's own tokenizer"
            )
        return torch.bincount(self.ids_N[self.supervised_N.bool()].long(), minlength=vocab_size)

    def save(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Writes <digest>.safetensors, then <digest>.json, whose hash vouches for the first."""
        with writing(folder, f"{RUN_AGAIN}, or give another data.cache_dir"):
            folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            "ids": self.ids_N,
            "supervised": self.supervised_N,
            "offsets": self.offsets_S1,
            "category": self.category_S,
        }
        data_file = folder / f"{self.digest}.safetensors"
        with whole(data_file, RUN_AGAIN) as partial:
            save_file(tensors, partial)
        text = json.dumps(
            {
                "key": self.digest,
                "sha256": file_sha256(data_file),
                "summary": asdict(self.summary),
                "category_names": self.category_names,
                **manifest,
            },
            indent=2,
        )
        write_whole(folder / f"{self.digest}.json", text + "\n", RUN_AGAIN)

    @classmethod
    def load(cls, folder: Path, digest: str) -> "PreparedData | None":
        """The stored data, or None if there is none or it is damaged (then a warning says so)."""
        manifest_file, data_file = folder / f"{digest}.json", folder / f"{digest}.safetensors"
        if not manifest_file.exists():
            return None
        try:
            manifest = json.loads(manifest_file.read_text())
            if file_sha256(data_file) != manifest["sha256"]:
                raise ValueError("its bytes are not those that were written")
            tensors = load_file(data_file)
            return cls(
                ids_N=tensors["ids"],
                supervised_N=tensors["supervised"],
                offsets_S1=tensors["offsets"],
                category_S=tensors["category"],
                category_names=manifest["category_names"],
                summary=Summary(**manifest["summary"]),
                digest=digest,
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning(
                "prepared data %s is damaged (%s: %s); it is built again",
                data_file,
                type(error).__name__,
                error,
            )
            return None


def category_index(categories: list[str]) -> tuple[Tensor, list[str]]:
    """Index of each category, (S,) int32, and the sorted names."""
    names = sorted(Counter(categories))
    position = {name: index for index, name in enumerate(names)}
    return torch.tensor([position[category] for category in categories], dtype=torch.int32), names


def file_sha256(path: Path) -> str:
    """sha256 of the file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
