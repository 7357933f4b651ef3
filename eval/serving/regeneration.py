"""The target answers prompts by a server: every answer checked, then a row of the log as if it were made in-process.

What an answer must pass:
    its prompt   the tokens that the server read are those that training will put before the answer; a difference
                 (another chat template) stops the run, since heads would be trained on a prompt that is not served
    its end      "stop" ends with one of the target's end-of-text ids; "length" is kept without an end, so that
                 none is supervised; what a server ended (content_filter ...) is a failed answer
    its text     made from the token ids where the server gives them, thoughts and tool calls in it as they were
                 said. Without ids, an answer from which the server took such parts out stops the run
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.problems import Problems, RowError
from data.regenerate import AnswerLog, Job, said_row, text_row
from eval.serving.answering import Answered, AnsweringClient
from eval.serving.completion import Completion
from eval.serving.failures import UNREACHABLE, RequestFailed
from eval.serving.load import run_load

logger = logging.getLogger(__name__)

NEAR = 6  # tokens shown on either side of a difference


@dataclass
class Intake:
    """Takes in what comes of each job. total: answers of the run, those already in the log included.

    retokenised: answers without ids whose count of tokens is not that of their text in our tokens.
    """

    log: AnswerLog
    tokenizer: Any
    eos_ids: Sequence[int]
    total: int
    max_failed_share: float
    on_answer: Callable[[int], None] = lambda tokens: None
    problems: Problems = field(default_factory=Problems)
    retokenised: int = 0
    prompts_unknown: bool = False

    def take(self, answered: Answered) -> None:
        """Append the answer to the log, or count the job as failed; one that met no server is only still to be done.

        Raises:
            ValueError: if no answer of this server can be used, or too many failed.
        """
        job, completion = answered.job, answered.completion
        if completion is None:
            assert answered.failure is not None
            if answered.failure != UNREACHABLE:
                self._fail(job, answered.failure, f"{answered.detail}, after {answered.retries} retries")
            return
        self._require_same_prompt(job, completion)
        try:
            row = self._row(job, completion)
        except RequestFailed as failure:
            self._fail(job, failure.kind, failure.detail)
            return
        self.log.append([row])
        self.on_answer(completion.tokens)

    def closing(self) -> str:
        """What a person must know about the run besides its answers; "" if there is nothing."""
        counts = ", ".join(f"{kind}: {count}" for kind, count in self.problems.counts.most_common())
        notes = []
        if counts:
            notes.append(f"{self.problems.counts.total()} failed ({counts}); run again to ask for them again")
        if self.retokenised:
            notes.append(f"{self.retokenised} may have been said in other tokens, whose ids the server does not give")
        return "; ".join(notes)

    def _fail(self, job: Job, kind: str, detail: str) -> None:
        self.problems.add(job.name, RowError(kind, detail))
        failed = self.problems.counts.total()
        if failed <= self.problems.num_shown:
            logger.warning("%s failed, %s: %s", job.name, kind, detail)
        if failed > self.max_failed_share * self.total:
            shown = "".join(f"\n  {name}: {text}" for name, text in self.problems.examples)
            raise ValueError(
                f"{failed} of {self.total} answers failed, more than max_failed_share={self.max_failed_share}; "
                f"mend the cause and run again, or raise max_failed_share. The first are:{shown}"
            )

    def _require_same_prompt(self, job: Job, completion: Completion) -> None:
        theirs, count = completion.prompt_ids, completion.prompt_tokens
        if theirs == job.ids:
            return
        if theirs is not None:
            said = _difference(job.ids, theirs, self.tokenizer)
        elif count is not None and count != len(job.ids):
            said = f"it has {count} tokens there and {len(job.ids)} here"
        else:
            if count is None and not self.prompts_unknown:
                self.prompts_unknown = True
                logger.warning("the server does not say what prompts it reads: its chat template is not checked")
            return
        raise ValueError(
            f"prompt {job.prompt.name}: the server reads another prompt than training would, {said}. Heads would be "
            "trained on another prompt than is served: let the server use the chat template of model.path, and "
            "give its chat_template_kwargs as model.template_kwargs="
        )

    def _row(self, job: Job, completion: Completion) -> dict[str, Any]:
        if completion.ids is not None:
            return said_row(job, self._said(completion, completion.ids), self.tokenizer, self.eos_ids)
        if completion.taken_out:
            raise ValueError(
                f"{job.name}: the server takes {' and '.join(completion.taken_out)} out of the text and gives no token "
                "ids, so what the target said is lost; start it without parsers (vLLM: --reasoning-parser, "
                "--tool-call-parser), or take one that gives token ids"
            )
        ids = self.tokenizer.encode(completion.text, add_special_tokens=False)
        self.retokenised += completion.tokens != len(ids) + (completion.finish == "stop")
        return text_row(job, completion.text, completion.finish, completion.tokens)

    def _said(self, completion: Completion, ids: list[int]) -> list[int]:
        """The ids of an answer, its end of turn included; some servers leave that out."""
        if completion.finish == "stop" and (not ids or ids[-1] not in self.eos_ids):
            if completion.stop is None or completion.stop not in self.eos_ids:
                raise RequestFailed(
                    "no end of turn",
                    f"it stopped at {completion.stop or ids[-1:]}, where the target's ends are {list(self.eos_ids)}",
                )
            return [*ids, completion.stop]
        if not ids:
            raise RequestFailed("no tokens", "an answer without a token, not even an end")
        return ids


async def answer_by_server(client: AnsweringClient, jobs: Sequence[Job], intake: Intake) -> None:
    """Ask all `jobs`, `client.config.concurrency` at a time; what is answered is in the log at once.

    Raises:
        ValueError: if the server cannot be used, or too many answers failed.
        ServerGone: if it takes no connections any more; the answers under way are taken in first.
    """
    await client.find_model()
    await run_load(client, jobs, client.config.concurrency, intake.take)


def _difference(ours: Sequence[int], theirs: Sequence[int], tokenizer: Any) -> str:
    """Where two prompts part, and what each says there."""
    both = zip(ours, theirs, strict=False)
    place = next((place for place, (own, other) in enumerate(both) if own != other), min(len(ours), len(theirs)))
    near = slice(max(0, place - NEAR), place + NEAR)
    return f"from token {place} on: {tokenizer.decode(theirs[near])!r} there, {tokenizer.decode(ours[near])!r} here"
