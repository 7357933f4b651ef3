"""Feature stores as training needs them: what they must be made for, how they are filled, when they are refused."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.feature_plan import Document, Plan, Positions, make_plan
from data.feature_writer import StoreWriter
from data.features import FeatureStore, Index, Layout
from data.prepared import PreparedData
from heads.family import DraftHeads
from heads.identity import identify
from heads.reads import DOCUMENT, FUTURE, Reads, holds, positions_read, training_reads
from heads.target import FINAL_NORM, Target, dtype_name
from train.features import FeatureSource, document_features

# Shapes: T tokens of a document, D hidden

SAMPLED = 64  # numbers of each of the decoder's parameters that its digest covers
DATA, READS, DEPTH = "data", "reads", "depth"


def open_source(
    target: Target,
    heads: DraftHeads,
    prepared: PreparedData,
    dtype: torch.dtype,
    keep: bool,
    directory: str | None,
) -> FeatureSource:
    """The features for training `heads` in `dtype`; from the store in `directory` if there is one.

    Raises:
        ValueError: if the store is not one for this target, these heads and this data.
    """
    store = None if directory is None else open_store(Path(directory), target, heads, prepared)
    return FeatureSource(target, heads.training_taps, dtype, keep, store)


def plan_store(target: Target, heads: DraftHeads, prepared: PreparedData, precision: str, shard_bytes: float) -> Plan:
    """What a store for training `heads` on `prepared` holds."""
    reads = training_reads(heads)
    whole = tuple(tap for tap, kinds in reads.items() if DOCUMENT in kinds)
    layout = Layout(heads.training_taps, whole, target.hidden_size, precision)
    return make_plan(prepared, layout, _positions(heads, layout), made_for(target, heads, prepared), shard_bytes)


def _positions(heads: DraftHeads, layout: Layout) -> Positions:
    """What training reads of the taps that are not whole."""
    partial = {tap: kinds for tap, kinds in training_reads(heads).items() if tap not in layout.whole}

    def positions(ids_T: Tensor, supervised_T: Tensor) -> dict[str, Tensor]:
        return {tap: positions_read(kinds, ids_T, supervised_T, heads.depth) for tap, kinds in partial.items()}

    return positions


def store_directory(root: Path, index: Index) -> Path:
    """Where the store lies below `root`: named by a digest of everything that its content depends on."""
    return root / hashlib.sha256(index.to_json().encode()).hexdigest()[:16]


def fill_store(
    directory: Path, plan: Plan, target: Target, on_documents: Callable[[int, int], None] = lambda tokens, size: None
) -> None:
    """Run the target over what `directory` lacks. `on_documents` hears of tokens and bytes that are done.

    Raises:
        ValueError: before anything is written, if it does not fit on the disk.
    """
    taps = plan.index.layout.taps

    def run(documents: list[Document]) -> Iterator[dict[str, Tensor]]:
        for document in documents:
            yield document_features(target, plan.ids(document), taps)
            on_documents(document.tokens, plan.document_bytes(document))

    with StoreWriter(directory, plan).open() as writer:
        found = set(range(len(plan.shards))) - set(writer.missing)
        for document in (document for number in sorted(found) for document in plan.shards[number]):
            on_documents(document.tokens, plan.document_bytes(document))
        for number in writer.missing:
            writer.write(number, run(plan.shards[number]))


def naive_bytes(plan: Plan) -> int:
    """What other trainers' dumps of the same features take: taps and `final_norm` of every position in 16 bits."""
    layout = plan.index.layout
    return sum(plan.prepared.lengths) * len({*layout.taps, FINAL_NORM}) * layout.width * torch.bfloat16.itemsize


def made_for(target: Target, heads: DraftHeads, prepared: PreparedData) -> dict[str, Any]:
    """What decides the features and which of them are stored; `name` of the target included, its path not."""
    identity = {f"target.{name}": value for name, value in asdict(identify(target)).items()}
    return {
        **identity,
        "target.revision": target.config.revision,
        "target.dtype": dtype_name(target.dtype),
        "target.blocks_sha256": blocks_sha256(target),
        DATA: prepared.digest,
        READS: {tap: sorted(kinds) for tap, kinds in training_reads(heads).items()},
        DEPTH: heads.depth,
    }


def blocks_sha256(target: Target) -> str:
    """sha256 of some numbers of every parameter of the decoder: a fine-tune of its blocks alone has another."""
    digest = hashlib.sha256()
    for name, parameter in sorted(target.decoder.named_parameters()):
        sample = parameter.detach().flatten()[:SAMPLED].to("cpu", torch.float32)
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def open_store(directory: Path, target: Target, heads: DraftHeads, prepared: PreparedData) -> FeatureStore:
    """Open a store for training: one of this run's data, or of other data with the same documents and more.

    Raises:
        ValueError: naming what it was made for otherwise, what it lacks, or a shard that is missing or damaged.
    """
    store = FeatureStore(directory)
    stored, needed = store.index.made_for, made_for(target, heads, prepared)
    for name in needed:
        if name not in {DATA, READS, DEPTH} and stored.get(name) != needed[name]:
            raise ValueError(
                f"trainer.features={directory} was made for {name}={stored.get(name)}, this run has {needed[name]}; "
                "give the features of this run, extracted by scripts/extract_features.py with its model=, heads= "
                "and data= settings"
            )
    _check_reads(directory, stored, training_reads(heads), heads.depth)
    if stored.get(DATA) != prepared.digest:
        _check_documents(store, heads, prepared)
    return store


def _check_documents(store: FeatureStore, heads: DraftHeads, prepared: PreparedData) -> None:
    positions = _positions(heads, store.index.layout)
    samples = map(prepared.sample, range(len(prepared)))
    lacking = sum(not store.holds(ids_T, positions(ids_T, supervised_T)) for ids_T, supervised_T in samples)
    if lacking:
        store.check()  # damaged bytes can hide a document
        raise ValueError(
            f"trainer.features={store.directory} was made from other data: it lacks what {lacking} of this run's "
            f"{len(prepared)} documents need; extract with this run's data= settings (scripts/extract_features.py)"
        )


def _check_reads(directory: Path, stored: dict[str, Any], needed: Reads, depth: int) -> None:
    problem = None
    for tap, kinds in needed.items():
        held = frozenset(stored[READS].get(tap, ()))
        if tap not in stored[READS]:
            problem = f"taps={list(stored[READS])}, this run reads {tap}"
        elif not holds(held, kinds):
            problem = f"{tap} at positions {sorted(held)}, this run reads {sorted(kinds)}"
        elif FUTURE in kinds and DOCUMENT not in held and depth > stored[DEPTH]:
            problem = f"depth={stored[DEPTH]}, this run has {depth}"
    if problem:
        raise ValueError(
            f"trainer.features={directory} was made for {problem}; extract with this run's heads= settings "
            "(scripts/extract_features.py)"
        )
