"""The training set: verl's parquet rows, with their images kept as bytes or paths until the rollout worker needs them.

Besides verl's columns (``prompt``, ``images``, ``data_source``, ``extra_info``, for validation ``reward_model``) a row has
``bbox`` ([x0, y0, x1, y1] in pixels of its image) or ``bbox_images`` (ready-made evidence images), as the recipe's views need.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm
from verl.utils.dataset.rl_dataset import RLHFDataset

from opd_recipes.families import check_processor
from opd_recipes.images import ImageRoot, RowImages
from opd_recipes.recipe import Recipe
from opd_recipes.registry import RecipeError
from opd_recipes.views import View, ViewError

#: A row's columns for the rollout worker: its images, its number, and the view on which the student answers.
ROW_IMAGES = "opd_images"
ROW_NUMBER = "opd_row"
ROW_VIEW = "opd_view"

#: In a validation row: it is answered and scored like one, but has the views of training (:mod:`opd_recipes.trace`).
TRACED = "opd_traced"

#: A resized student's prompt with more than this share of the teacher's tokens has been enlarged again.
UNDONE = 0.6

#: Rows that are checked at a time when the set is loaded.
ROWS_AT_A_TIME = 256


class TwoViewDataset(RLHFDataset):
    """verl's dataset, with both views checked when it is loaded (``data.custom_cls``)."""

    dataframe: Any  # verl's: the rows that are used

    def __init__(self, *args, **kwargs):
        config = kwargs["config"] if "config" in kwargs else args[2]
        self.recipe = Recipe.load(config.opd)
        self.box_key = config.get("bbox_key", "bbox")
        self.evidence_key = config.get("bbox_images_key", "bbox_images")
        self.views: tuple[str, ...] = ("student",)
        super().__init__(*args, **kwargs)

    def set_views(self, views: dict[str, View]) -> None:
        """Validate: give every row once for each of ``views``; its data source becomes ``<data_source>@<view>``.

        Raises:
            RecipeError: A row without an answer, or one that cannot give a view.
        """
        column = self.dataframe["reward_model"] if "reward_model" in self.dataframe.column_names else [None] * len(self)
        missing = [
            self.locate(i) for i, reward in enumerate(column) if not reward or reward.get("ground_truth") is None
        ]
        if missing:
            raise RecipeError(
                f"data.val_files: validation needs reward_model.ground_truth in each row; {len(missing)} rows have none, "
                f"first {missing[0]}. Training rows need none"
            )
        checked = [view.spec for view in self.recipe.views.values()]
        only = {name: view for name, view in views.items() if view.spec not in checked}
        if only:
            self.dataframe = self._usable(self.dataframe, only, hint=None)
        self.views = tuple(views)

    def __len__(self) -> int:
        return len(self.dataframe) * len(self.views)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row, view = divmod(item, len(self.views))
        example = super().__getitem__(row)
        example[ROW_IMAGES] = replace(example[ROW_IMAGES], root=self._root(row))
        example[ROW_VIEW], example[ROW_NUMBER] = self.views[view], row
        if len(self.views) > 1:
            example["data_source"] = f"{example['data_source']}@{self.views[view]}"
        return example

    def _build_messages(self, example: dict, key: str) -> list[dict]:
        """verl's messages, with a placeholder for each image: the pixels are made where they are used."""
        images = example.get(self.image_key) or []
        box = example.pop(self.box_key, None)
        evidence = example.pop(self.evidence_key, None) or []
        example[ROW_IMAGES] = RowImages(images=images, box=box, evidence=evidence)
        example[self.image_key] = [f"image:{i}" for i in range(len(images))]
        _refuse_other_media(example[key])
        placeholders = sum(str(message["content"]).count("<image>") for message in example[key])
        if placeholders != len(images):
            raise ViewError(f"{placeholders} <image> in the prompt for {len(images)} images in '{self.image_key}'")
        return super()._build_messages(example, key)

    def maybe_filter_out_long_prompts(self, dataframe=None):
        """Check every row: both views can be drawn, and both prompts fit. verl calls this once the files are read."""
        check_processor(self.processor)
        self._file_starts = _file_starts(self.data_files)
        self._kept: list[int] = list(range(len(dataframe)))
        self._numbers = self._row_numbers(len(dataframe))
        self._roots = [ImageRoot.of(file, self.config.get("image_root")) for file in self.original_data_files]
        if self._numbers is None and len(set(self._roots)) > 1:
            raise RecipeError(
                f"{self._where()}: with data.seed=null the file of a sampled row is not known, nor where its image paths "
                "start, since the files lie in different folders; set data.seed, or data.image_root"
            )
        self._columns = set(dataframe.column_names)
        for column in (self.prompt_key, self.image_key, "data_source"):
            if column not in self._columns:
                raise RecipeError(
                    f"{self._where()}: column '{column}' is missing; it has {', '.join(sorted(self._columns))}"
                )
        return self._usable(dataframe, self.recipe.views, self.recipe.teacher_hint)

    def _usable(self, dataframe: Any, views: Mapping[str, View], hint: str | None) -> Any:
        """The rows that can give ``views``; the others stop the run or are left out, as ``data.on_bad_row`` says."""
        self._check_columns(views.values())
        reasons = self._faults(dataframe, views, hint)
        if self.recipe.on_bad_row == "error":
            self._refuse(reasons)
        bad = {i for i, reason in enumerate(reasons) if reason}
        if bad:
            first = min(bad)
            print(
                f"opd_recipes: skipped {len(bad)} of {len(dataframe)} rows, e.g. {self.locate(first)}: {reasons[first]}"
            )
            kept = [i for i in range(len(dataframe)) if i not in bad]
            self._kept, dataframe = [self._kept[i] for i in kept], dataframe.select(kept)
        if len(dataframe) == 0:
            raise RecipeError(f"{self._where()}: no row is left")
        return dataframe

    def _check_columns(self, views: Iterable[View]) -> None:
        if any(view.needs_box for view in views) and self.box_key not in self._columns:
            raise RecipeError(
                f"{self._where()}: opd.views need an evidence box, but column '{self.box_key}' is missing. Add it "
                "([x0, y0, x1, y1] in pixels), or use ready-made images: +overlay=vision_opd_6k"
            )
        if any(view.provided for view in views) and self.evidence_key not in self._columns:
            raise RecipeError(
                f"{self._where()}: opd.views ask for ready-made images (provided), but column '{self.evidence_key}' is missing"
            )
        if self.recipe.needs_answer and "reward_model" not in self._columns:
            raise RecipeError(
                f"{self._where()}: {self.recipe.needs_answer} needs the answers, but column 'reward_model' (with ground_truth) "
                f"is missing. Add it, or set {self.recipe.needs_answer}=null"
            )

    def _faults(self, dataframe: Any, views: Mapping[str, View], hint: str | None) -> list[str | None]:
        """Why each row cannot be used, or None."""
        # Not `datasets.map`: its cache would hide a file behind a path that has since been damaged.
        reasons: list[str | None] = []
        counts: list[dict[str, int]] = []
        with (
            ThreadPoolExecutor(self.num_workers or 1) as pool,  # decoding and resizing release the GIL
            tqdm(total=len(dataframe), desc="checking rows", unit="row", mininterval=5) as bar,
        ):
            # Some at a time: the pool would take up all rows at once, and their images with them.
            for start in range(0, len(dataframe), ROWS_AT_A_TIME):
                rows = range(start, min(start + ROWS_AT_A_TIME, len(dataframe)))
                for reason, tokens in pool.map(lambda i: self._fault(dataframe[i], views, hint, self._root(i)), rows):
                    reasons.append(reason)
                    counts += [] if reason else [tokens]
                    bar.update()
        if {"student", "teacher"} <= views.keys():
            self._report_tokens(counts)
        return reasons

    def _refuse(self, reasons: list[str | None]) -> None:
        bad = [i for i, reason in enumerate(reasons) if reason]
        if not bad:
            return
        listed = "\n".join(f"  {self.locate(i)}: {reasons[i]}" for i in bad[:20])
        more = f"\n  ... and {len(bad) - 20} more" if len(bad) > 20 else ""
        raise RecipeError(
            f"{len(bad)} of {len(reasons)} rows cannot be used:\n{listed}{more}\n"
            "Mend or remove them, or set data.on_bad_row=skip to leave them out"
        )

    def _fault(
        self, example: dict, views: Mapping[str, View], hint: str | None, root: ImageRoot
    ) -> tuple[str | None, dict[str, int]]:
        """Why a row cannot be used (or None), and how many tokens each view's prompt has."""
        tokens: dict[str, int] = {}
        try:
            answer = (example.get("reward_model") or {}).get("ground_truth")
            messages = self._build_messages(example, key=self.prompt_key)
            source = replace(example[ROW_IMAGES], root=root)
            if not source.images:
                raise ViewError(f"no image in '{self.image_key}'")
            if self.recipe.needs_answer and answer is None:
                raise ViewError(f"the row has no reward_model.ground_truth, which {self.recipe.needs_answer} needs")
            for name, images in source.rendered(views):
                seen = hinted(messages, None if name == "student" else hint, answer)
                tokens[name] = self._prompt_length(seen, images)
                if tokens[name] > self.max_prompt_length:
                    limit = f"data.max_prompt_length={self.max_prompt_length}"
                    size = f"image of {images[-1].width} x {images[-1].height} pixels"
                    return f"the {name}'s prompt has {tokens[name]} tokens, more than {limit} ({size})", tokens
        except (ViewError, ValueError, TypeError, KeyError) as error:
            return str(error), tokens
        return None, tokens

    def _report_tokens(self, counts: list[dict[str, int]]) -> None:
        """Say how long the prompts are, and warn where the processor enlarges what the student's view made small."""
        if not counts:
            return
        mean = {name: sum(count[name] for count in counts) / len(counts) for name in ("student", "teacher")}
        longest = {name: max(count[name] for count in counts) for name in mean}
        told = ", ".join(f"{name} mean {mean[name]:.0f}, longest {longest[name]}" for name in mean)
        print(f"opd_recipes: prompt tokens: {told}")
        undone = sum(count["student"] > UNDONE * count["teacher"] for count in counts)
        # (resize with restore keeps the size on purpose.)
        smaller = any(step["kind"] == "resize" and not step.get("restore") for step in self.recipe.student_view.spec)
        if smaller and undone > 0.1 * len(counts):
            print(
                f"opd_recipes: WARNING: in {undone} of {len(counts)} rows the student's smaller view has more than 60% of the "
                "teacher's prompt tokens: the processor's min_pixels enlarges it again, or the text outweighs the image. The "
                "two views then hardly differ. Lower min_pixels (data.mm_processor_kwargs) or use larger images"
            )

    def _prompt_length(self, messages: list[dict], images: list[Image.Image]) -> int:
        text = self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **self.apply_chat_template_kwargs
        )
        prepared = prepared_images(type(self), self.processor, with_images(messages, images), self.config)
        # What the processor would expand each placeholder to, without making the pixels.
        sizes = [(image.height, image.width) for image in prepared]
        expanded = self.processor._get_num_multimodal_tokens(image_sizes=sizes, **(self.mm_processor_kwargs or {}))
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return len(tokens) - len(sizes) + sum(expanded["num_image_tokens"])

    def _where(self) -> str:
        return ", ".join(str(file) for file in self.original_data_files)

    def locate(self, row: int) -> str:
        """File and row for a message; ``row`` counts the rows that are used."""
        if self._numbers is None:
            return f"row {self._kept[row]} of the {self.max_samples} sampled from {self._where()}"
        file, number = self._origin(row)
        return f"{self.original_data_files[file]}, row {number}"

    def _origin(self, row: int) -> tuple[int, int]:
        """File and row in it."""
        assert self._numbers is not None
        number = int(self._numbers[self._kept[row]])
        file = bisect_right(self._file_starts, number) - 1
        return file, number - self._file_starts[file]

    def _root(self, row: int) -> ImageRoot:
        """The folders in which a row may name images."""
        return self._roots[0 if self._numbers is None else self._origin(row)[0]]

    def _row_numbers(self, count: int) -> Sequence[int] | None:
        """Each row's place in the concatenation of all files; None where verl has drawn a sample without a seed."""
        if self.max_samples <= 0 or not self.shuffle:
            return range(count)
        total = self._file_starts[-1] + _row_count(self.data_files[-1])
        if self.max_samples >= total:
            return range(count)
        if self.seed is None:
            return None
        # As verl draws.
        drawn = np.random.default_rng(self.seed).choice(total, size=self.max_samples, replace=False)
        return np.asarray(drawn).tolist()


def _refuse_other_media(messages: list[dict]) -> None:
    """Whatever else a prompt may name, verl and the processor would open or fetch by themselves."""
    for message in messages:
        if not isinstance(message["content"], str):
            raise ViewError("the prompt has content that is no text; write it as text, with <image> for each image")
        if other := re.search("<video>|<audio>", message["content"]):
            raise ViewError(f"the prompt has {other[0]}, but views are drawn of images alone; remove it")


def _file_starts(files: list[str]) -> list[int]:
    """The first row of each file in the concatenation of all."""
    starts = [0]
    for file in files[:-1]:
        starts.append(starts[-1] + _row_count(file))
    return starts


def _row_count(file: str) -> int:
    import datasets

    kind = "parquet" if file.endswith(".parquet") else "json"
    return len(datasets.load_dataset(kind, data_files=file)["train"])


def prepared_images(dataset_cls: Any, processor: Any, messages: list[dict], config: Any) -> list[Image.Image]:
    """The images of ``messages`` as verl's agent loop hands them to the processor and to vLLM."""
    # The rollout's patch size, not data.image_patch_size: verl's agent loop takes it from the processor.
    patch = getattr(processor.image_processor, "patch_size", 14)
    images, _, _ = dataset_cls._process_multi_modal_info(messages, patch, config)
    return images


def map_parts(messages: list[dict], change: Callable[[Any], Any]) -> list[dict]:
    """Copy messages with each part of structured content replaced by ``change(part)``, in order."""
    return [
        {**message, "content": [change(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else dict(message)
        for message in messages
    ]


def hinted(messages: list[dict], hint: str | None, answer: Any) -> list[dict]:
    """Copy messages with ``hint`` behind the last of the user's, its ``{answer}`` filled in; None: nothing is added.

    Raises:
        ViewError: The row has no answer.
    """
    if hint is None:
        return messages
    if answer is None:
        raise ViewError("the row has no reward_model.ground_truth, which opd.teacher_hint needs")
    last = max(i for i, message in enumerate(messages) if message["role"] == "user")
    text, content = hint.replace("{answer}", str(answer)), messages[last]["content"]
    longer = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return [*messages[:last], {**messages[last], "content": longer}, *messages[last + 1 :]]


def with_images(messages: list[dict], images: list[Image.Image]) -> list[dict]:
    """Copy messages with the image placeholders replaced, in order."""
    remaining = iter(images)

    def fill(part: Any) -> Any:
        is_image = isinstance(part, dict) and part.get("type") == "image"
        return {**part, "image": next(remaining)} if is_image else part

    filled = map_parts(messages, fill)
    if next(remaining, None) is not None:
        raise ViewError("more images than image placeholders in the prompt")
    return filled
