"""Loaders of MME-RealWorld, MMVP, CV-Bench, MMStar and POPE."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from opd_recipes.eval.layouts import LETTER_ONLY, UNREAD, columns_of, image_of, listed
from opd_recipes.eval.prompt_options import labelled, letter_of, parse_options
from opd_recipes.eval.question import ImageSource, Question
from opd_recipes.eval.tables import Row, find_files, read_rows
from opd_recipes.registry import RecipeError

#: MME-RealWorld's instruction, by language: before the options, behind them.
_MME_WORDS = {
    "en": (
        " The choices are listed below:\n",
        "\nSelect the best answer to the above multiple-choice question based on the image. Respond with only the letter "
        "(A, B, C, D, or E) of the correct option.\nThe best answer is:",
    ),
    "cn": (
        " 选项如下所示:\n",
        "\n根据图像选择上述多项选择题的最佳答案。只需回答正确选项的字母（A, B, C, D 或 E）。\n最佳答案为：",
    ),
}

#: Where each version lies: the parquet of its lmms-eval edition, or the JSON of the first edition, or VLMEvalKit's TSV.
_MME_FILES = {
    "en": ("data/train-*.parquet", "**/*.parquet", "MME_RealWorld.json", "MME-RealWorld.tsv"),
    "cn": ("data/train-*.parquet", "**/*.parquet", "MME_RealWorld_CN.json", "MME-RealWorld-CN.tsv"),
    "lite": ("data/train-*.parquet", "**/*.parquet", "MME-RealWorld-Lite.json", "MME-RealWorld-Lite.tsv"),
}


def mme_realworld(version: str) -> Callable[[Path, str | None, bool], Iterator[Question]]:
    """MME-RealWorld (Zhang et al., arXiv 2408.13257), five options, E says that the image does not show it.

    Two layouts: rows of index, question, multi-choice options, answer, category (``Perception/Monitoring``),
    l2-category, bytes or image (base64); or the first edition's Question_id, Text, Answer choices, Ground truth, Task,
    Subtask, Category, Image (a path in ``root``). Prompt: the authors' README. Categories are cut as in the authors'
    script: in lower case, and all attributes of one kind of object are one.

    Args:
        version: ``en``, ``cn`` or ``lite`` (English).
    """
    before, behind = _MME_WORDS["cn" if version == "cn" else "en"]

    def load(root: Path, split: str | None, images: bool) -> Iterator[Question]:
        files = find_files(root, *_MME_FILES[version])
        folder = root if root.is_dir() else root.parent
        for row in read_rows(files, drop=() if images else ("bytes", "image")):
            options = _mme_options(row)
            task, domain, category = _mme_category(row)
            name = row.find("Question_id")
            image = row.find("Image") if name else None
            yield Question(
                id=str(name) if name else f"{task}/{domain}/{category}/{row.text('index')}",
                images=(image_of(row.get("bytes", "image", "Image"), row, (folder,)),) if images else (),
                text=row.text("question", "Text") + before + listed(options, "({}) {}") + behind,
                kind="choice",
                answer=(letter_of(row.text("answer", "Ground truth")),),
                options=options,
                category={"task": task, "domain": f"{task}/{domain}", "category": f"{task}/{domain}/{category}"},
                group=str(image) if image else "",
            )

    return load


def _mme_options(row: Row) -> dict[str, str]:
    value = row.find("multi-choice options", "Answer choices")
    options = labelled(value) if isinstance(value, list) else parse_options(str(value or ""))
    if not options and not (options := columns_of(row)):
        raise RecipeError(f"{row}: found no options in 'multi-choice options', 'Answer choices', or columns A to E")
    return options


def _mme_category(row: Row) -> tuple[str, str, str]:
    task, domain = row.find("Task"), row.find("Subtask")
    if task and domain:
        category = row.text("Category").lower()
    else:
        task, _, domain = row.text("category").partition("/")
        category = row.text("l2-category").lower()
    if str(task).capitalize() not in ("Perception", "Reasoning"):
        raise RecipeError(f"{row}: expected a task Perception or Reasoning, got {task!r}")
    if "attribute" in category:
        category = category.split("/")[0] + "/attribute"
    return str(task).capitalize(), str(domain), category


def mmvp(root: Path, split: str | None, images: bool) -> Iterator[Question]:
    """MMVP (Tong et al., arXiv 2401.06209), MMVP/MMVP: Questions.csv (Index, Question, Options ``(a) Open (b) Closed``,
    Correct Answer) and ``MMVP Images/1.jpg`` ...; or rows with an image column.

    Questions 1 and 2, 3 and 4, ... are pairs. Prompt: the authors' (question, blank, options), nothing else.
    """
    files = find_files(root, "Questions.csv", "**/Questions.csv", "**/*.parquet", "MMVP.tsv")
    for row in read_rows(files, drop=() if images else ("image",)):
        number = row.number + 1
        index = row.find("Index", "lndex", "index")  # the file has been published with either spelling
        if index is not None and int(index) not in (number, row.number):
            raise RecipeError(f"{row}: its index is {index}; MMVP's pairs are neighbours, so its rows must be in order")
        asked, listed_options = row.text("Question", "question"), row.find("Options", "options")
        options = (
            labelled(listed_options) if isinstance(listed_options, list) else parse_options(str(listed_options or ""))
        )
        options = options or columns_of(row)
        if not isinstance(listed_options, str):
            listed_options = " ".join(f"({letter.lower()}) {option}" for letter, option in options.items())
        yield Question(
            id=str(number),
            images=(_mmvp_image(row, number),) if images else (),
            text=f"{asked} {listed_options.strip()}",
            kind="choice",
            answer=(letter_of(row.text("Correct Answer", "answer")),),
            options=options,
            group=f"pair {row.number // 2 + 1}",
        )


def _mmvp_image(row: Row, number: int) -> ImageSource:
    if (value := row.find("image")) is not None:
        return image_of(value, row)
    folders = [row.file.parent / name for name in ("MMVP Images", "MMVP Imgaes", "images")]  # spelt so in places
    return image_of(f"{number}.jpg", row, [folder for folder in folders if folder.is_dir()] or folders[:1])


def cv_bench(root: Path, split: str | None, images: bool) -> Iterator[Question]:
    """CV-Bench (Cambrian-1, arXiv 2406.16860), nyu-visionx/CV-Bench: test_2d.parquet and test_3d.parquet, or test.parquet,
    with idx, type (2D or 3D), task, prompt, choices, answer ``(A)``, source (ADE20K, COCO or Omni3D), image.

    Prompt: the column, and the instruction that the authors' evaluation adds.
    """
    files = find_files(root, "test_[23]d.parquet", "test.parquet", "**/test*.parquet")
    for row in read_rows(files, drop=() if images else ("image",)):
        kind = row.text("type").upper()
        if split not in (None, kind.lower()):
            continue
        text = row.text("prompt")
        yield Question(
            id=f"{kind}/{row.text('idx')}",
            images=(image_of(row.get("image"), row),) if images else (),
            text=f"{text}\n{LETTER_ONLY}",
            kind="choice",
            answer=(letter_of(row.text("answer")),),
            options=labelled(_list(row.find("choices"))) or parse_options(text),
            category={"type": kind, "task": row.text("task"), "source": row.text("source")},
            group=str(row.find("source_filename", "filename") or ""),
        )


def _list(value: Any) -> Sequence[str]:
    return value if isinstance(value, list) else ()


def mmstar(root: Path, split: str | None, images: bool) -> Iterator[Question]:
    """MMStar (Chen et al., arXiv 2403.20330), Lin-Chen/MMStar: mmstar.parquet (index, question with its options, answer,
    category, l2_category, image), or MMStar.tsv (the same, image in base64).

    Prompt: the question, and the instruction that the authors' evaluation of LLaVA adds.
    """
    for row in read_rows(
        find_files(root, "mmstar.parquet", "MMStar.tsv", "**/*.parquet"), () if images else ("image",)
    ):
        text, options = row.text("question"), columns_of(row)
        if options and not parse_options(text):
            text = f"{text}\n{listed(options)}"
        options = options or parse_options(text) or UNREAD
        yield Question(
            id=row.text("index"),
            images=(image_of(row.get("image"), row),) if images else (),
            text=f"{text}\n{LETTER_ONLY}",
            kind="choice",
            answer=(letter_of(row.text("answer")),),
            options=options,
            category={"category": row.text("category"), "axis": row.text("l2_category")},
        )


#: POPE's three ways of choosing objects that are not there.
POPE_SPLITS = ("random", "popular", "adversarial")


def pope(root: Path, split: str | None, images: bool) -> Iterator[Question]:
    """POPE (Li et al., arXiv 2305.10355), lmms-lab/POPE: parquet with question_id, question, answer, image_source, image,
    category; or the authors' coco_pope_random.json, _popular, _adversarial (JSON lines: question_id, image, text, label),
    with COCO's pictures beside them or in val2014.

    Question numbers start anew in each split. Prompt: the question, and LLaVA's instruction for short answers (the authors
    prescribe none).
    """
    names = ("data/test-*.parquet", "Full/*.parquet", "**/*.parquet", "**/*_pope_*.json")
    files = find_files(root, *names)
    for row in read_rows(files, drop=() if images or files[0].suffix == ".json" else ("image",)):
        name = str(row.find("category") or row.file.stem.rpartition("_")[2]).strip()
        if name not in POPE_SPLITS:
            raise RecipeError(f"{row}: expected one of the splits {', '.join(POPE_SPLITS)}, got {name!r}")
        if split not in (None, name):
            continue
        picture = row.find("image_source", "image_id", *(["image"] if row.file.suffix == ".json" else []))
        yield Question(
            id=f"{name}/{row.text('question_id')}",
            images=(image_of(row.get("image"), row, _pope_folders(row)),) if images else (),
            text=f"{row.text('question', 'text')}\nAnswer the question using a single word or phrase.",
            kind="yes_no",
            answer=(row.text("answer", "label").lower(),),
            category={"split": name},
            group=str(picture or ""),
        )


def _pope_folders(row: Row) -> list[Path]:
    parent = row.file.parent
    return [parent, *(folder for name in ("val2014", "images") if (folder := parent / name).is_dir())]
