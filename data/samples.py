"""Conversations -> the flat arrays of prepared data."""

import logging
from array import array
from collections.abc import Collection, Mapping
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from data.conversations import Conversation
from data.prepared import PreparedData, Summary, category_index
from data.problems import Problems, RowError
from data.render import Sample, render, render_said, supervised_spans, truncate, without_end

logger = logging.getLogger(__name__)


class SampleBuilder:
    """Renders, truncates and counts. Flat arrays, since lists of Python ints take ten times the memory."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Collection[int],
        template_kwargs: Mapping[str, Any],
        max_length: int,
    ) -> None:
        self.tokenizer, self.eos_ids = tokenizer, frozenset(eos_ids)
        self.template_kwargs, self.max_length = dict(template_kwargs), max_length
        self.ids, self.supervised, self.offsets = array("i"), array("B"), array("q", [0])
        self.categories: list[str] = []
        self.num_truncated = self.num_unsupervised = self.num_turns = self.num_turns_without_end = 0

    def add(self, conversation: Conversation, problems: Problems) -> None:
        """Adds the samples of one conversation; one that cannot be rendered goes to `problems`."""
        try:
            samples = self._samples(conversation)
        except RowError as error:
            problems.add(conversation.origin, error)
            return
        for sample in samples:
            self._add_sample(sample)

    def _samples(self, conversation: Conversation) -> list[Sample]:
        tools = {"tools": conversation.tools} if conversation.tools else {}
        template_kwargs = {**self.template_kwargs, **tools}
        about = {"category": conversation.category, "origin": conversation.origin}
        messages, answer_ids = conversation.messages, conversation.answer_ids
        if answer_ids is not None:
            return [render_said(messages, answer_ids, self.tokenizer, template_kwargs, **about)]
        samples = render(messages, self.tokenizer, self.eos_ids, template_kwargs, **about)
        if not conversation.finished:
            samples[-1] = without_end(samples[-1], self.eos_ids)
        return samples

    def _add_sample(self, sample: Sample) -> None:
        spans = supervised_spans(sample)
        self.num_turns += len(spans)
        self.num_turns_without_end += sum(sample.ids[stop - 1] not in self.eos_ids for _, stop in spans)
        self.num_truncated += len(sample.ids) > self.max_length
        cut = truncate(sample, self.max_length)
        if cut is None:
            self.num_unsupervised += 1
            return
        self.ids.extend(cut.ids)
        self.supervised.extend(cut.supervised)
        self.offsets.append(len(self.ids))
        self.categories.append(cut.category)

    def finish(self, problems: Problems, digest: str) -> PreparedData:
        """The prepared data. Raises ValueError if no sample is left."""
        summary = Summary(
            num_rows=problems.num_rows,
            num_samples=len(self.categories),
            num_tokens=len(self.ids),
            num_supervised=sum(self.supervised),
            num_truncated=self.num_truncated,
            num_unsupervised_after_truncation=self.num_unsupervised,
            num_turns=self.num_turns,
            num_turns_without_end=self.num_turns_without_end,
            problems=dict(problems.counts),
        )
        if not self.categories:
            raise ValueError(
                f"no sample has a supervised token within max_length={self.max_length} ({summary}); "
                "raise data.max_length or give other sources"
            )
        if self.num_turns_without_end:
            logger.warning(
                "%d of %d answers end in no eos id %s: the heads learn no end of turn from them",
                self.num_turns_without_end,
                self.num_turns,
                sorted(self.eos_ids),
            )
        category_S, names = category_index(self.categories)
        return PreparedData(
            ids_N=torch.tensor(self.ids, dtype=torch.int32),
            supervised_N=torch.tensor(self.supervised, dtype=torch.uint8),
            offsets_S1=torch.tensor(self.offsets, dtype=torch.int64),
            category_S=category_S,
            category_names=names,
            summary=summary,
            digest=digest,
        )
