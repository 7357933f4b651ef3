"""The feature store: the target's features of prepared samples on disk, written once and read by many training runs.

    index.json               what the features are of, how they are stored, how many shards there are
    shard-00000.safetensors  documents one after the other (`shard_tensors`)
    shard-00000.sha256       its checksum, as `sha256sum --check` reads it

A document is the token ids of one prepared sample, and is found by their hash. Of each tap, a shard holds only the
positions that training reads; the others come back as `FeatureStore.fill`. Nothing here knows a model: who writes
(data/feature_writer.py) says which positions of which taps, and what they are features of.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data.feature_precision import SCALES, VALUES, bytes_per_row, decode
from data.prepared import file_sha256

# Shapes: T tokens of a document, S documents of a shard, N rows of a tap in a shard, D hidden

FORMAT, FORMAT_VERSION = "headstart-features", 1
INDEX_FILE = "index.json"
KEYS, LENGTHS, OFFSETS, POSITIONS = "keys", "lengths", "offsets", "positions"
EXTRACT_AGAIN = "run scripts/extract_features.py again with the settings that made it: it writes only what is missing"


@dataclass(frozen=True)
class Layout:
    """How rows are stored: `width` numbers in `precision`; of the taps in `whole`, the rows of all positions."""

    taps: tuple[str, ...]
    whole: tuple[str, ...]
    width: int
    precision: str

    def row_bytes(self, tap: str) -> int:
        """Bytes of one stored row; rows of a tap that is not whole carry their positions."""
        return bytes_per_row(self.precision, self.width) + (0 if tap in self.whole else torch.int32.itemsize)

    def parts(self, tap: str) -> list[str]:
        """Names of the tensors with one entry per stored row."""
        names = [VALUES] + [SCALES] * (self.precision == "int8") + [POSITIONS] * (tap not in self.whole)
        return [tensor_name(tap, name) for name in names]


@dataclass(frozen=True)
class Index:
    """`made_for`: what the features are of, plain JSON values that only their owner understands."""

    made_for: dict[str, Any]
    layout: Layout
    shards: int
    documents: int

    def to_json(self) -> str:
        """The content of index.json."""
        values = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    @classmethod
    def read(cls, directory: Path) -> "Index":
        """Raises ValueError if there is no index or not one of ours."""
        path = directory / INDEX_FILE
        try:
            values = json.loads(path.read_text())
            found = (values["format"], values["format_version"])
            if found != (FORMAT, FORMAT_VERSION):
                raise ValueError(f"it is {found}, not {(FORMAT, FORMAT_VERSION)}")
            stored = values["layout"]
            layout = Layout(tuple(stored["taps"]), tuple(stored["whole"]), stored["width"], stored["precision"])
            return cls(values["made_for"], layout, values["shards"], values["documents"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{directory} holds no features that can be read ({INDEX_FILE}: {error}); give the directory that "
                "scripts/extract_features.py named, or run it again"
            ) from error


def document_key(ids_T: Tensor) -> bytes:
    """What a document is found by: sha256 of its token ids as little-endian int64."""
    return hashlib.sha256(ids_T.to("cpu", torch.int64).numpy().astype("<i8", copy=False).tobytes()).digest()


def tensor_name(tap: str, part: str) -> str:
    """The name of one of a tap's tensors in a shard."""
    return f"{tap}/{part}"


def shard_path(directory: Path, number: int) -> Path:
    """Where shard `number` lies."""
    return directory / f"shard-{number:05d}.safetensors"


def checksum_path(shard: Path) -> Path:
    """Where the checksum of a shard lies."""
    return shard.with_suffix(".sha256")


def fault_of(shard: Path) -> str | None:
    """What is wrong with a shard on disk, None if its bytes are those that were written."""
    if not shard.exists():
        return "is missing"
    if not checksum_path(shard).exists():
        return f"has lost its checksum {checksum_path(shard).name}"
    if checksum_path(shard).read_text() != checksum_line(shard, file_sha256(shard)):
        return "is damaged: its bytes are not those that were written"
    return None


def checksum_line(shard: Path, digest: str) -> str:
    """The content of a checksum file."""
    return f"{digest}  {shard.name}\n"


class Shard:
    """One shard, memory-mapped: a document costs the bytes of its rows."""

    def __init__(self, path: Path, layout: Layout):
        self.path, self.layout, self.checked = path, layout, False
        if not path.exists():
            raise ValueError(f"{path} is missing; {EXTRACT_AGAIN}")
        try:
            self.file = safe_open(path, "pt")
            self.keys = [bytes(key) for key in self.file.get_tensor(KEYS).numpy()]
            self.lengths = self.file.get_tensor(LENGTHS).tolist()
            self.offsets = {tap: self.file.get_tensor(tensor_name(tap, OFFSETS)).tolist() for tap in layout.taps}
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}); {EXTRACT_AGAIN}") from error

    def check(self) -> None:
        """Compare the bytes with the checksum, once. Raises ValueError that names the shard."""
        if not self.checked and (fault := fault_of(self.path)):
            raise ValueError(f"{self.path} {fault}; {EXTRACT_AGAIN}")
        self.checked = True

    def read(self, row: int, tap: str, dtype: torch.dtype, fill: float) -> Tensor:
        """The features [T, D] of document `row` at a tap."""
        rows = slice(*self.offsets[tap][row : row + 2])
        parts = {name.rpartition("/")[2]: self.file.get_slice(name)[rows] for name in self.layout.parts(tap)}
        features_ND = decode(parts, dtype)
        if POSITIONS not in parts:
            return features_ND
        features_TD = torch.full((self.lengths[row], self.layout.width), fill, dtype=dtype)
        features_TD[parts[POSITIONS].long()] = features_ND
        return features_TD

    def holds(self, row: int, tap: str, read_T: Tensor) -> bool:
        """Whether document `row` has a row of a tap that is not whole wherever `read_T` (bool) is true."""
        rows = slice(*self.offsets[tap][row : row + 2])
        missing_T = read_T.clone()
        missing_T[self.file.get_slice(tensor_name(tap, POSITIONS))[rows].long()] = False
        return not missing_T.any()


class FeatureStore:
    """The features in `directory`, by token ids. A shard's checksum is compared when it is first read from.

    fill: what positions hold that are not stored. Nothing that trains may read them: NaN must change no loss.

    Raises:
        ValueError: naming the directory or the shard, if one is missing or damaged.
    """

    fill = 0.0

    def __init__(self, directory: Path):
        self.directory, self.index = directory, Index.read(directory)
        self.shards = [Shard(shard_path(directory, n), self.index.layout) for n in range(self.index.shards)]
        self.places = {key: (shard, row) for shard in self.shards for row, key in enumerate(shard.keys)}

    def holds(self, ids_T: Tensor, reads: dict[str, Tensor]) -> bool:
        """Whether a document is stored, with all that is read of the taps that are not whole: bool [T] by tap."""
        place = self.places.get(document_key(ids_T))
        return place is not None and all(place[0].holds(place[1], tap, read_T) for tap, read_T in reads.items())

    def check(self) -> None:
        """Compare all shards with their checksums. Raises ValueError that names the damaged one."""
        for shard in self.shards:
            shard.check()

    def read(self, ids_T: Tensor, taps: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
        """{tap: [T, D]} of one document, on the CPU.

        Raises:
            ValueError: if the document is not stored, or its shard is damaged.
        """
        place = self.places.get(document_key(ids_T))
        if place is None:
            self.check()  # damaged bytes can hide a document
            raise ValueError(
                f"{self.directory} has no features of a document of {len(ids_T)} tokens that begins with "
                f"{ids_T[:8].tolist()}; extract them: scripts/extract_features.py with this run's model=, heads= "
                "and data= settings"
            )
        shard, row = place
        shard.check()
        return {tap: shard.read(row, tap, dtype, self.fill) for tap in taps}
