"""Reading the `.wandb` file of an offline run: W&B's own records, as `wandb sync` would upload them."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, FILE_HEADER, HEADER = 32768, 7, struct.Struct("<IHB")  # of a chunk: checksum, length, type
LAST = (1, 4)  # types of the chunk that ends a record: the only one, or the last of several


@dataclass
class OfflineRun:
    """One offline run. artifacts: by name, each {"type", "metadata", "files"}."""

    id: str
    group: str
    job_type: str
    project: str
    config: dict[str, Any]
    summary: dict[str, Any]
    artifacts: dict[str, dict[str, Any]]


def read_run(path: Path) -> OfflineRun:
    """Read one `.wandb` file."""
    found = list(records(path.read_bytes()))
    run = next(record.run for record in found if record.HasField("run"))
    summaries = [item for record in found if record.HasField("summary") for item in record.summary.update]
    logged = [record.artifact for record in found if record.HasField("artifact")]
    return OfflineRun(
        id=run.run_id,
        group=run.run_group,
        job_type=run.job_type,
        project=run.project,
        config={item.key: json.loads(item.value_json) for item in run.config.update},
        summary={item.key or item.nested_key[0]: json.loads(item.value_json) for item in summaries},
        artifacts={
            artifact.name: {
                "type": artifact.type,
                "metadata": json.loads(artifact.metadata),
                "files": sorted(entry.path for entry in artifact.manifest.contents),
            }
            for artifact in logged
        },
    )


def records(content: bytes) -> Iterator[Record]:
    """The records of a file: a header, then blocks of chunks, as in LevelDB's log format."""
    place, payload = FILE_HEADER, b""
    while place + HEADER.size <= len(content):
        if BLOCK - place % BLOCK < HEADER.size:  # no chunk starts in the rest of the block
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(content, place)
        place += HEADER.size
        payload += content[place : place + length]
        place += length
        if kind in LAST:
            yield Record.FromString(payload)
            payload = b""
