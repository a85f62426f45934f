"""``python -m data_prep inspect``: a page that shows rows as student and teachers will see them.

Views are drawn, and tokens counted, by the code that training uses; what is wrong with a row is found by
``python -m data_prep check``'s own checks, and stands in the place of the pictures that cannot be drawn.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw
from tqdm import tqdm

from data_prep.faults import KINDS
from data_prep.inspect_page import SIDE, Message, Picture, Sheet, ShownRow, ShownView, Size, page
from data_prep.rows import DataError, positive
from opd_recipes.images import ImageRoot, decode
from opd_recipes.registry import RecipeError
from opd_recipes.views import View, ViewError, check_box

if TYPE_CHECKING:
    from data_prep.check_setup import Setup

#: Rows of a parquet file that are in memory at a time, and rows on a page.
BATCH, MOST_ROWS = 16, 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="FILE|KEY=VALUE",
        help="the parquet file with rows, and overrides of the configuration; all before or all behind the options",
    )
    parser.add_argument("--out", type=Path, required=True, help="the HTML page to write")
    parser.add_argument("--model", required=True, help="the student's folder or hub name: its processor counts tokens")
    parser.add_argument("--config-name", default="vision_opd", help="recipe (default: %(default)s)")
    parser.add_argument("--overlay", help="overlays of the recipe, e.g. toy or toy,toy_rp_opsd")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--rows", type=positive, default=24, help="rows drawn at random (default: %(default)s)")
    chosen.add_argument("--row", type=int, action="append", metavar="N", help="this row, from 0; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="which rows are drawn (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    try:
        args.file, args.overrides = file_and_overrides(args.inputs)
        sheet = inspect(args)
        size = write(sheet, args.file, args.out)
    except (RecipeError, DataError) as error:
        sys.exit(f"data_prep: {error}")
    except OSError as error:
        sys.exit(f"data_prep: {error}; nothing was written to {args.out}")
    bad = sum(row.errors > 0 for row in sheet.rows)
    print(f"wrote {len(sheet.rows)} rows, {bad} of which cannot be used ({size / 1e6:.1f} MB), to {args.out}")


def file_and_overrides(inputs: Sequence[str]) -> tuple[Path, list[str]]:
    """The one file among ``inputs``, and the overrides.

    Raises:
        DataError: There is none, or more than one.
    """
    from data_prep.check import split_inputs

    files, overrides = split_inputs(inputs)
    if len(files) != 1:
        raise DataError(f"name one parquet file to look into, not {len(files)}")
    return files[0], overrides


def inspect(args: argparse.Namespace) -> Sheet:
    """Look at the rows that ``args`` choose; ``file`` and ``overrides`` are told apart.

    Raises:
        RecipeError: Training would refuse the configuration.
        DataError: The file, the model or the choice of rows cannot be used.
    """
    total = row_count(args.file)
    chosen = choose(total, args.row, args.rows, args.seed)
    from data_prep.check_setup import load_setup

    setup = load_setup(args.config_name, args.overlay, args.overrides, args.model)
    root = ImageRoot.of(args.file, setup.config.data.get("image_root"))
    look = Looker(setup, root)
    picked = tqdm(pick(args.file, chosen), total=len(chosen), desc="drawing rows", unit="row", mininterval=1)
    rows = [look.row(number, row) for number, row in picked]
    settings = [
        ("File", f"{args.file} ({total} rows)"),
        ("Rows", "named on the command line" if args.row else f"{len(chosen)} drawn at random, seed {args.seed}"),
        *described(args, setup),
    ]
    return Sheet(f"{args.file.name} as {args.config_name} sees it", settings, setup.limits.prompt, rows)


def row_count(path: Path) -> int:
    """Rows of a parquet file.

    Raises:
        DataError: It is none, or is empty.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        count = pq.read_metadata(path).num_rows
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as parquet ({error}); is the download complete?") from error
    if not count:
        raise DataError(f"{path}: it has no rows; name a file that has some")
    return count


def choose(total: int, named: Sequence[int] | None, count: int, seed: int) -> list[int]:
    """Rows to look at, in the order of the file.

    Raises:
        DataError: A named row is not there, or there are too many.
    """
    if (many := len(named or ()) or count) > MOST_ROWS:
        raise DataError(f"{many} rows: a page has at most {MOST_ROWS}; name fewer with --rows or --row")
    if not named:
        return sorted(random.Random(seed).sample(range(total), min(count, total)))
    if missing := [number for number in named if not 0 <= number < total]:
        raise DataError(f"--row {missing[0]}: the file's rows are 0 to {total - 1}")
    return sorted(set(named))


def pick(path: Path, chosen: Sequence[int]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """The chosen rows with their numbers, a few at a time; in the place of one that cannot be read stands the reason.

    Raises:
        DataError: A part of the file cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted, start = set(chosen), 0
    try:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                end = start + file.metadata.row_group(group).num_rows
                left = [number for number in wanted if start <= number < end]
                for batch in file.iter_batches(BATCH, row_groups=[group]) if left else ():
                    for number in sorted(number for number in left if start <= number < start + len(batch)):
                        yield number, _as_dict(batch.slice(number - start, 1))
                    start += len(batch)
                    if start > max(left):
                        break
                start = end
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as parquet ({error}); is the download complete?") from error


def _as_dict(one: Any) -> dict[str, Any] | str:
    try:
        return one.to_pylist()[0]
    except UnicodeDecodeError as error:
        return f"a text is not UTF-8: {error}; write it as UTF-8"


class Looker:
    """Draws rows and counts their tokens.

    Args:
        setup: Recipe and processor.
        root: The folders in which the rows may name images.
    """

    def __init__(self, setup: Setup, root: ImageRoot):
        from data_prep.check_rows import RowChecker

        self.setup, self.root = setup, root
        self._check = RowChecker(setup, False, root).check

    def row(self, number: int, row: dict[str, Any] | str) -> ShownRow:
        """What the page shows of a row; never fails, whatever the row is."""
        if isinstance(row, str):
            return ShownRow(number, [], [], [], [Message(True, row)])
        prompts = self.setup.prompts
        answer = _answer(row)
        hint = self.setup.recipe.teacher_hint
        box = row.get(prompts.box_key)
        texts = [
            *_turns(row.get(prompts.prompt_key)),
            ("Answer", "none" if answer is None else str(answer)),
            *([("Teacher's hint", hint.replace("{answer}", str(answer)))] if hint and answer is not None else []),
            ("Evidence box", "none" if box is None else f"{box!r:.200} (x0, y0, x1, y1 in pixels)"),
        ]
        original = self._original(number, row.get(prompts.image_key), box)
        views = [self._view(number, row, name, view) for name, view in self.setup.recipe.views.items()]
        return ShownRow(number, texts, original, views, self._messages(row))

    def _messages(self, row: Mapping[str, Any]) -> list[Message]:
        try:
            found = self._check(row).findings
        except Exception as error:  # of a row that no check foresees; it is shown, not fatal
            return [Message(True, f"the row cannot be checked: {_reason(error)}")]
        return [Message(finding.is_error, finding.reason, KINDS[finding.kind][1]) for finding in found]

    def _original(self, number: int, sources: Any, box: Any) -> list[Picture]:
        pictures = []
        sources = sources if isinstance(sources, list) else []
        for i, source in enumerate(sources, start=1):
            name = f"Image {i} of row {number}" if len(sources) > 1 else f"Image of row {number}"
            try:
                image = decode(source, self.root)
            except ViewError as error:
                pictures.append(Picture(name, fault=str(error)))
                continue
            boxed, said = _boxed(image, box) if i == len(sources) else (image, "")
            pictures.append(Picture(f"{name}, {image.width} by {image.height} pixels{said}", boxed))
        return pictures

    def _view(self, number: int, row: Mapping[str, Any], name: str, view: View) -> ShownView:
        from opd_recipes.dataset import ROW_IMAGES, hinted

        prompts = self.setup.prompts
        images: list[Image.Image] = []
        try:
            example = copy.deepcopy(dict(row))
            messages = prompts._build_messages(example, key=prompts.prompt_key)
            images = replace(example[ROW_IMAGES], root=self.root).render(view)
            hint = self.setup.recipe.teacher_hint if name in ("teacher", "negative") else None
            asked = hinted(messages, hint, _answer(row))
            tokens = prompts._prompt_length(asked, images)
            seen, image_tokens = self._processed(asked, images)
        except Exception as error:  # whatever it is, training would meet it, too
            reason = _reason(error)
            drawn = [_picture(number, name, image) for image in images]
            return ShownView(name, [*drawn, Picture(name, fault=reason)], [image.size for image in images])
        drawn = [_picture(number, name, image, tokens) for image in images]
        return ShownView(name, drawn, [image.size for image in images], seen, tokens, image_tokens)

    def _processed(self, messages: list[dict], images: list[Image.Image]) -> tuple[list[Size], int | None]:
        """What the processor makes of the images: the size of each in pixels, and their tokens."""
        from opd_recipes.dataset import prepared_images, with_images

        prompts = self.setup.prompts
        prepared = prepared_images(type(prompts), prompts.processor, with_images(messages, images), prompts.config)
        chat = prompts.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **prompts.apply_chat_template_kwargs
        )
        inputs = prompts.processor(
            text=[chat], images=prepared, return_tensors="pt", **(prompts.mm_processor_kwargs or {})
        )
        images_of = prompts.processor.image_processor
        if "image_grid_thw" not in inputs:  # not a processor of Qwen's family: what goes into it is all that is known
            return [image.size for image in prepared], None
        grid, patch = inputs["image_grid_thw"].tolist(), images_of.patch_size
        tokens = sum(frames * high * wide for frames, high, wide in grid) // images_of.merge_size**2
        return [(wide * patch, high * patch) for _, high, wide in grid], tokens


def _picture(number: int, name: str, image: Image.Image, tokens: int | None = None) -> Picture:
    counted = "" if tokens is None else f", a prompt of {tokens} tokens"
    small = image.copy()
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)  # the page holds all rows at once
    return Picture(f"The {name}'s view of row {number}, {image.width} by {image.height} pixels{counted}", small)


def _boxed(image: Image.Image, box: Any) -> tuple[Image.Image, str]:
    """A small copy with the evidence box, and words for it."""
    small = image.copy()
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    if box is None:
        return small, ", no evidence box"
    try:
        x0, y0, x1, y1 = check_box(box, image.size)
    except (ViewError, TypeError, ValueError) as error:
        return small, f", the evidence box cannot be drawn: {error}"
    sx, sy = small.width / image.width, small.height / image.height
    left, top = round(x0 * sx), round(y0 * sy)
    right, bottom = max(left, round(x1 * sx) - 1), max(top, round(y1 * sy) - 1)
    draw = ImageDraw.Draw(small)
    draw.rectangle([left - 2, top - 2, right + 2, bottom + 2], outline="white")  # seen on any ground
    draw.rectangle([left - 1, top - 1, right + 1, bottom + 1], outline=(220, 0, 0))
    share = (x1 - x0) * (y1 - y0) / (image.width * image.height)
    return small, f", evidence box from {x0:g}, {y0:g} to {x1:g}, {y1:g}: {share:.1%} of the image"


def _turns(prompt: Any) -> list[tuple[str, str]]:
    turns = prompt if isinstance(prompt, list) else []
    named = [turn for turn in turns if isinstance(turn, Mapping)]
    said = [(f"Prompt ({str(turn.get('role')):.20})", str(turn.get("content"))) for turn in named[:6]]
    if len(named) > 6:
        said.append(("Prompt", f"{len(named) - 6} more turns"))
    return said or [("Prompt", f"{prompt!r:.200}")]


def _answer(row: Mapping[str, Any]) -> Any:
    reward = row.get("reward_model")
    return reward.get("ground_truth") if isinstance(reward, Mapping) else None


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ViewError) else f"{type(error).__name__}: {error}"


def described(args: argparse.Namespace, setup: Setup) -> list[tuple[str, str]]:
    """The settings that decide what the page shows."""
    from omegaconf import OmegaConf

    recipe, data = setup.recipe, setup.config.data
    parts = OmegaConf.to_container(setup.config.opd, resolve=True)
    assert isinstance(parts, dict)
    named = ("teacher", "divergence", "weights", "selection", "objective")
    return [
        ("Recipe", args.config_name + (f" with overlay {args.overlay}" if args.overlay else "")),
        ("Overrides", " ".join(args.overrides) or "none"),
        ("Model", str(args.model)),
        *((f"View: {name}", ", then ".join(map(_step, view.spec))) for name, view in recipe.views.items()),
        ("Teacher's hint", repr(recipe.teacher_hint) if recipe.teacher_hint else "none"),
        *((name.capitalize(), _step(parts[name])) for name in named),
        ("Longest prompt", f"{setup.limits.prompt} tokens (data.max_prompt_length)"),
        ("Images by path", f"from {data.get('image_root') or 'the folder of the file'}"),
    ]


def _step(spec: Any) -> str:
    options = ", ".join(f"{key} {value}" for key, value in spec.items() if key != "kind" and value is not None)
    return f"{spec.get('kind')}" + (f" ({options})" if options else "")


def write(sheet: Sheet, source: Path, out: Path) -> int:
    """Write the page under its name when all of it is there; return its size in bytes.

    Raises:
        DataError: The page would replace its source.
    """
    if out.resolve() == source.resolve():
        raise DataError(f"--out {out}: that is the file that is inspected; name another, e.g. page.html")
    data = page(sheet).encode("utf-8", errors="backslashreplace")
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(data)
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)
    return len(data)
