"""One benchmark to be asked of one model: which questions, under which settings, what is missing, what failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from opd_recipes.eval.asking import Settings, images_hash, prompt_hash
from opd_recipes.eval.benchmarks import Benchmark
from opd_recipes.eval.question import Question
from opd_recipes.eval.store import Recorded, Store
from opd_recipes.registry import RecipeError


@dataclass
class Job:
    """See the module.

    Args:
        benchmark: Reads and scores the replies.
        load: Gives the questions, always in the same order; with their images, or without, which is fast.
        settings: None where nothing is asked, only scored.
        store: Where the replies are.
        label: What progress calls it.
        data: Where the questions lie, for messages.
        split: Of the benchmark; None: all.
        limit: Only the first so many questions.

    Attributes:
        questions: Those of this run, without images; filled by :meth:`prepare`.
        recorded: Replies so far, by question.
        failures: Questions without a reply, with the reason.
        wanted: Ids that have no reply yet.
    """

    benchmark: Benchmark
    load: Callable[[bool], Iterator[Question]]
    settings: Settings | None
    store: Store
    label: str = ""
    data: str = ""
    split: str | None = None
    limit: int | None = None
    questions: list[Question] = field(default_factory=list)
    recorded: dict[str, Recorded] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> dict:
        assert self.settings is not None
        return self.settings.fingerprint(self.benchmark.name, self.split)

    def prepare(self) -> None:
        """Read the questions and the replies so far, and check that they belong together.

        Raises:
            RecipeError: They do not, or there is no question.
        """
        if self.settings is not None:
            self.store.agree(self.fingerprint)
        else:
            self.store.agree({"benchmark": self.benchmark.name, "split": self.split}, ("benchmark", "split"))
        self.questions = [question.without_images() for question in islice(self.load(False), self.limit)]
        if not self.questions:
            raise RecipeError(f"{self.benchmark.name}: {self.data} has no question")
        self.recorded = self.store.recorded()
        known = {question.id for question in self.questions}
        if self.limit is None and (lost := sorted(self.recorded.keys() - known)):
            raise RecipeError(self._changed(lost, "is not in the data any more"))
        if changed := [question.id for question in self.questions if not self._same_text(question)]:
            raise RecipeError(self._changed(changed, "has another text now"))
        self.failures = dict.fromkeys(self.wanted, "not asked") | {
            name: reason for name, reason in self.store.read_failures().items() if name in self.wanted
        }

    @property
    def wanted(self) -> dict[str, None]:
        """Ids without a reply, in order."""
        return {question.id: None for question in self.questions if question.id not in self.recorded}

    def to_ask(self) -> Iterator[Question]:
        """The missing questions with their images.

        Raises:
            RecipeError: Images of a question that has a reply are not those that were asked about.
        """
        wanted = self.wanted
        for question in islice(self.load(True), self.limit):
            if question.id in wanted:
                yield question
            elif self.recorded[question.id].images != images_hash(question):
                raise RecipeError(self._changed([question.id], "has other images now"))

    def _same_text(self, question: Question) -> bool:
        past = self.recorded.get(question.id)
        return past is None or past.prompt == prompt_hash(question)

    def _changed(self, names: list[str], how: str) -> str:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        return (
            f"{self.store.folder}: question {names[0]!r}{more}, which has a reply, {how}: {self.data} is not what was asked. "
            f"Name another --out, or remove {self.store.folder} to ask everything again"
        )
