"""The benchmarks by name: ``BENCHMARKS["vstar"].load("data/vstar")`` gives questions, ``read`` reads a reply, ``score`` scores
replies. Questions, prompts and scores are those of each benchmark's authors; docs/eval.md says what could be verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from opd_recipes.eval import extraction, layouts_custom, layouts_general, layouts_search
from opd_recipes.eval.extraction import Extracted
from opd_recipes.eval.layouts import chosen
from opd_recipes.eval.question import KINDS, Category, ImageSource, Kind, Question, Reply, Scores
from opd_recipes.eval.scores import Accuracy, Circular, CvBench, MeanOf, MmeRealWorld, Pairs, Pope, score
from opd_recipes.registry import RecipeError

__all__ = ["BENCHMARKS", "KINDS", "Benchmark", "Category", "ImageSource", "Kind", "Question", "Reply", "Scores"]

#: From a local copy, a split or None, and whether images are wanted, to questions.
Loader = Callable[[Path, str | None, bool], Iterator[Question]]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Args:
        name: As the command knows it.
        title: As its authors call it.
        source: Paper and published data set.
        layout: What lies where in a local copy, in words.
        loader: Reads it.
        scoring: Its numbers.
        splits: Parts that can be loaded alone.
        max_tokens: Default limit of a reply without thinking: room for reasoning in the reply, as in the papers' protocol.
    """

    name: str
    title: str
    source: str
    layout: str
    loader: Loader
    scoring: Accuracy
    splits: tuple[str, ...] = ()
    max_tokens: int = 1024

    def load(self, path: str | PathLike[str], split: str | None = None, *, images: bool = True) -> Iterator[Question]:
        """Questions of a local copy, one after the other, always in the same order.

        Images may be large and are in memory for as long as their question is: keep ``question.without_images()``.

        Args:
            path: Folder or file.
            split: One of ``splits``; None: all (of ZoomBench the full images).
            images: False: leaves the images out and unread, which is fast.

        Raises:
            RecipeError: Nothing is found, a column is missing, a row makes no question, two questions have one id.
        """
        return self._questions(Path(path).expanduser(), chosen(split, self.splits, self.name), images)

    def _questions(self, root: Path, split: str | None, images: bool) -> Iterator[Question]:
        seen: set[str] = set()
        for question in self.loader(root, split, images):
            self._check(question, seen, root)
            yield question if question.group else replace(question, group=question.id)
        if not seen:
            raise RecipeError(f"{self.name}: {root} has no question" + (f" of the split {split!r}" if split else ""))

    def _check(self, question: Question, seen: set[str], root: Path) -> None:
        where = f"{self.name}: {root}, question {question.id!r}"
        if question.id in seen:
            raise RecipeError(f"{where}: two questions have this id; results would be mixed up. Is a file there twice?")
        seen.add(question.id)
        if not question.text:
            raise RecipeError(f"{where}: it has no text")
        known = {"choice": tuple(question.options or ()), "yes_no": ("yes", "no")}.get(question.kind)
        if known is not None and (wrong := [answer for answer in question.answer if answer not in known]):
            found = ", ".join(known) or "none could be read from its text"
            raise RecipeError(f"{where}: the answer {wrong[0]!r} is none of its options: {found}")

    def read(self, question: Question, text: str, *, truncated: bool = False, thinking_opened: bool = False) -> Reply:
        """Find the answer in a reply and compare it. A judge's verdict goes in by ``dataclasses.replace(reply, correct=...)``.

        Args:
            truncated: The reply ended at its token limit.
            thinking_opened: The prompt ended inside a thinking block.
        """
        extracted = _extract(question, text, truncated=truncated, thinking_opened=thinking_opened)
        value = extracted.value
        return Reply(question, text, extracted, None if value is None else _agrees(question, value))

    def score(self, replies: Sequence[Reply]) -> Scores:
        """Numbers over these replies; with a part of the questions, over that part. A mean that lacks one of its parts is
        NaN (None in JSON)."""
        return score(self.scoring, replies)


def _extract(question: Question, text: str, **how: bool) -> Extracted:
    if question.kind == "choice":
        return extraction.choice(text, dict(question.options or {}), **how)
    return {"yes_no": extraction.yes_no, "number": extraction.number, "short": extraction.short}[question.kind](
        text, **how
    )


def _agrees(question: Question, value: str) -> bool:
    if question.kind == "number":
        return any(extraction.matches_number(value, answer, question.tolerance) for answer in question.answer)
    if question.kind == "short":
        return extraction.matches_text(value, question.answer)
    return value in question.answer


_HR = "index, question, A to D, answer, category, cycle_category, image (base64) in hr_bench_{}.parquet or .tsv"
_MME = "parquet of the lmms-eval edition (data/train-*.parquet); or the first edition's JSON with its images; or TSV"

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "vstar",
            "V* Bench",
            "arXiv 2312.14135; craigwu/vstar_bench or lmms-lab/vstar-bench",
            "test_questions.jsonl with its folders of images, or parquet",
            layouts_search.vstar,
            Accuracy(),
            ("direct_attributes", "relative_position"),
        ),
        Benchmark(
            "zoombench",
            "ZoomBench",
            "arXiv 2602.11858; inclusionAI/ZoomBench",
            "data/test.parquet; the split crop shows the cropped regions",
            layouts_search.zoombench,
            Accuracy(),
            ("full", "crop"),
        ),
        Benchmark(
            "hrbench-4k",
            "HR-Bench 4K",
            "arXiv 2408.15556; DreamMr/HR-Bench",
            _HR.format("4k"),
            layouts_search.hrbench("4k"),
            Circular(),
        ),
        Benchmark(
            "hrbench-8k",
            "HR-Bench 8K",
            "arXiv 2408.15556; DreamMr/HR-Bench",
            _HR.format("8k"),
            layouts_search.hrbench("8k"),
            Circular(),
        ),
        Benchmark(
            "mme-realworld-en",
            "MME-RealWorld",
            "arXiv 2408.13257; yifanzhang114/MME-RealWorld-Lmms-eval or MME-RealWorld",
            _MME,
            layouts_general.mme_realworld("en"),
            MmeRealWorld(),
        ),
        Benchmark(
            "mme-realworld-cn",
            "MME-RealWorld-CN",
            "arXiv 2408.13257; yifanzhang114/MME-RealWorld-CN-Lmms-eval or MME-RealWorld",
            _MME,
            layouts_general.mme_realworld("cn"),
            MmeRealWorld(),
        ),
        Benchmark(
            "mme-realworld-lite",
            "MME-RealWorld-Lite",
            "arXiv 2408.13257; yifanzhang114/MME-RealWorld-lite-lmms-eval",
            _MME,
            layouts_general.mme_realworld("lite"),
            MmeRealWorld(),
        ),
        Benchmark(
            "visualprobe",
            "VisualProbe",
            "arXiv 2509.07969; Mini-o3/VisualProbe_Easy, _Medium, _Hard",
            "the three parts as folders of these names, each with val.json and data/",
            layouts_search.visualprobe,
            MeanOf("difficulty", ("easy", "medium", "hard"), "mean of easy, medium and hard"),
            ("easy", "medium", "hard"),
        ),
        Benchmark(
            "mmvp",
            "MMVP",
            "arXiv 2401.06209; MMVP/MMVP",
            "Questions.csv and 'MMVP Images/1.jpg' to 300.jpg, or parquet or TSV with an image column",
            layouts_general.mmvp,
            Pairs(),
        ),
        Benchmark(
            "cv-bench",
            "CV-Bench",
            "arXiv 2406.16860; nyu-visionx/CV-Bench",
            "test_2d.parquet and test_3d.parquet, or test.parquet",
            layouts_general.cv_bench,
            CvBench(),
            ("2d", "3d"),
        ),
        Benchmark(
            "mmstar",
            "MMStar",
            "arXiv 2403.20330; Lin-Chen/MMStar",
            "mmstar.parquet or MMStar.tsv",
            layouts_general.mmstar,
            MeanOf(
                "category",
                (
                    "coarse perception",
                    "fine-grained perception",
                    "instance reasoning",
                    "logical reasoning",
                    "science & technology",
                    "math",
                ),
                "mean of the six core capabilities",
            ),
        ),
        Benchmark(
            "pope",
            "POPE",
            "arXiv 2305.10355; lmms-lab/POPE or the authors' JSON",
            "data/test-*.parquet, or coco_pope_*.json with COCO's val2014",
            layouts_general.pope,
            Pope(),
            layouts_general.POPE_SPLITS,
        ),
        Benchmark(
            "custom",
            "your own questions",
            "a file or folder of yours",
            "JSON lines, JSON, parquet, tsv or csv; rows for training do as well",
            layouts_custom.custom,
            Accuracy(),
        ),
    )
}
