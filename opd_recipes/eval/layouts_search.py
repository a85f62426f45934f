"""Loaders of the benchmarks with small evidence in large images: V*, ZoomBench, HR-Bench, VisualProbe."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from opd_recipes.eval.layouts import UNREAD, Box, columns_of, image_of, inside, listed, union
from opd_recipes.eval.prompt_options import letter_of, parse_options
from opd_recipes.eval.question import Kind, Question
from opd_recipes.eval.tables import Row, find_files, missing, read_rows
from opd_recipes.registry import RecipeError


def vstar(root: Path, split: str | None, images: bool) -> Iterator[Question]:
    """V* (Wu and Xie, arXiv 2312.14135), craigwu/vstar_bench or lmms-lab/vstar-bench.

    ``test_questions.jsonl`` (image, text, category, label, question_id; images and, beside each, JSON with boxes in
    folders), or parquet with the same columns. ``text`` has the options and the instruction. Question numbers may repeat
    between categories. The JSON files alone do not say in which order the options were asked.
    """
    files = find_files(root, "test_questions.jsonl", "**/test_questions.jsonl", "**/test-*.parquet", "**/*.parquet")
    for row in read_rows(files, drop=() if images or files[0].suffix == ".jsonl" else ("image",)):
        task, text = row.text("category"), row.text("text")
        if split not in (None, task):
            continue
        yield Question(
            id=f"{task}/{row.text('question_id')}",
            images=(image_of(row.get("image"), row, (row.file.parent,)),) if images else (),
            text=text,
            kind="choice",
            answer=(letter_of(row.text("label")),),
            options=parse_options(text),
            category={"task": task},
            bbox=_vstar_box(row),
        )


def _vstar_box(row: Row) -> Box | None:
    name = row.values.get("image")
    if not isinstance(name, str) or len(name) > 255 or "." not in name:
        return None
    annotation = inside(row.file.parent, name.rpartition(".")[0] + ".json", row)
    if not annotation.is_file():
        return None
    try:
        boxes = json.loads(annotation.read_text(encoding="utf-8")).get("bbox")
    except (OSError, ValueError) as error:
        raise RecipeError(f"{row}: {annotation} cannot be read: {error}") from error
    return union(boxes, row, "xywh")


def zoombench(root: Path, split: str | None, images: bool) -> Iterator[Question]:
    """ZoomBench (arXiv 2602.11858), inclusionAI/ZoomBench: data/test.parquet with id, query, response, question_type
    (``mcq`` or ``blank``), image, crop_image, bbox (left, top, right, bottom in pixels of image).

    The query is sent as it is. The split ``crop`` shows the cropped region instead of the image, under the same ids, so
    that both views can be compared question by question.
    """
    column, other = ("crop_image", "image") if split == "crop" else ("image", "crop_image")
    files = find_files(root, "data/test*.parquet", "test*.parquet", "**/*.parquet")
    for row in read_rows(files, drop=(other,) if images else (other, column)):
        text, answer, form = row.text("query", "prompt"), row.text("response", "answer"), row.text("question_type")
        if form not in ("mcq", "blank"):
            raise RecipeError(f"{row}: unknown question_type {form!r}; known: mcq, blank")
        kind: Kind = "choice" if form == "mcq" else "number" if _is_number(answer) else "short"
        category = {"form": form}
        if dimension := row.find("category", "dimension", "sub_task"):
            category["dimension"] = str(dimension)
        yield Question(
            id=row.text("id"),
            images=(image_of(row.get(column), row),) if images else (),
            text=text.replace("<image>", "").strip(),
            kind=kind,
            answer=(letter_of(answer) if kind == "choice" else answer,),
            options=(parse_options(text) or UNREAD) if kind == "choice" else None,
            category=category,
            bbox=None if split == "crop" else union(row.find("bbox"), row),
        )


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", ""))
    except ValueError:
        return False
    return True


def hrbench(size: str) -> Callable[[Path, str | None, bool], Iterator[Question]]:
    """HR-Bench (Wang et al., arXiv 2408.15556), DreamMr/HR-Bench: hr_bench_4k or hr_bench_8k, parquet or TSV, with index,
    question, A to D, answer, category (single or cross), cycle_category, image (base64).

    Each question stands there once for each of four orders of its options; the four are one group. Which rows belong
    together is found from question and option texts, which the four share. Prompt: the authors' (their VLMEvalKit).
    """

    def load(root: Path, split: str | None, images: bool) -> Iterator[Question]:
        names = [f"**/{stem}{size}*{end}" for end in (".parquet", ".tsv") for stem in ("hr_bench_", "hrbench_")]
        seen: Counter[tuple[tuple[str, ...], str]] = Counter()
        for row in read_rows(find_files(root, *names), drop=() if images else ("image",)):
            question, options, task = row.text("question"), columns_of(row), row.text("category")
            cycle = row.text("cycle_category")
            same = (task, question, *sorted(options.values()))
            number = seen[same, cycle]  # two questions may have the same texts, about different images
            seen[same, cycle] += 1
            yield Question(
                id=row.text("index"),
                images=(image_of(row.get("image"), row),) if images else (),
                text=f"Question: {question}\nOptions:\n{listed(options)}\n"
                "Please select the correct answer from the options above. \n",
                kind="choice",
                answer=(letter_of(row.text("answer")),),
                options=options,
                category={"task": task, "cycle": cycle},
                group="|".join((*same, str(number))),
            )

    return load


def visualprobe(root: Path, split: str | None, images: bool) -> Iterator[Question]:
    """VisualProbe (Mini-o3, arXiv 2509.07969), Mini-o3/VisualProbe_Easy, _Medium and _Hard: in each a val.json (doc_id,
    problem, solution, images) and a folder data. ``root`` has them as folders of these names, or is one of them.

    The problem is sent without its ``<image>``.
    """
    for level in ("Easy", "Medium", "Hard"):
        name = f"VisualProbe_{level}"
        folder = root if root.name.lower() == name.lower() else root / name
        if split not in (None, level.lower()) or (folder != root and _is_probe(root)):
            continue
        if not folder.is_dir() and split is None:
            raise RecipeError(
                f"{root}: VisualProbe has three parts; {name} is not there. Fetch it, or name one by its split: "
                "easy, medium or hard"
            )
        for row in read_rows(find_files(folder, "val.json", "**/val.json", "**/val*.parquet")):
            yield _probe(row, level.lower(), name, folder, images)


def _is_probe(root: Path) -> bool:
    return root.name.lower().startswith("visualprobe_")


def _probe(row: Row, level: str, name: str, folder: Path, images: bool) -> Question:
    value = row.get("images", "image")
    image = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(image, list):
        raise RecipeError(f"{row}: expected one image, got {len(image)}")
    if isinstance(image, str):
        image = image.removeprefix("./").removeprefix(f"{name}/")
    number = row.find("doc_id", "id")
    return Question(
        id=f"{level}/{row.number if missing(number) else number}",
        images=(image_of(image, row, (folder, row.file.parent)),) if images else (),
        text=row.text("problem").replace("<image>", "").strip(),
        kind="short",
        answer=(row.text("solution"),),
        category={"difficulty": level},
        group=image if isinstance(image, str) else "",
    )
