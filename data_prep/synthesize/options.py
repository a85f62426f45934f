"""The options of ``synthesize``, and what they must be."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from data_prep.rows import PLACEHOLDER, RESERVED, DataError, fraction, positive
from data_prep.synthesize.parse import CONVENTIONS, LETTERS
from data_prep.synthesize.pipeline import Settings
from data_prep.synthesize.templates import BUILT_IN, write_prompts

#: Fields of a request that are the pipeline's own.
OWN_FIELDS = ("model", "messages", "temperature", "top_p", "max_tokens", "seed", "stream", "n")
OPEN_SUFFIX = "\nLook inside the red box. Answer with a single word or a short phrase."
CHOICE_SUFFIX = "\nLook inside the red box. Answer with the letter of the option."


class _WritePrompts(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        try:
            paths = write_prompts(values)
        except (DataError, OSError) as error:
            parser.exit(1, f"data_prep: {error}\n")
        print("\n".join(map(str, paths)))
        parser.exit(0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _needed(parser)
    _calls(parser.add_argument_group("calls"))
    _kept(parser.add_argument_group("what is asked and kept"))
    _optional(parser.add_argument_group("multiple choice and hard filter"))
    _rows(parser.add_argument_group("rows"))


def _needed(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--images", type=Path, required=True, help="folder of images (searched through; links out of it are refused)")
    add("--out", type=Path, required=True, help="folder for train.parquet, rejects.jsonl, report.json, ledger.jsonl")
    add("--url", required=True, help="OpenAI-compatible server, e.g. http://localhost:8000/v1")
    add("--model", required=True, help="model that lists, boxes, asks, validates and answers")
    add(
        "--box-convention",
        required=True,
        choices=CONVENTIONS,
        help="how the model writes boxes: qwen1000 (0 to 1000; Qwen3-VL, Qwen3.5), pixels of the image that it gets "
        "(Qwen2.5-VL: add --side-multiple 28), normalised (0 to 1)",
    )


def _calls(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--api-key-env", metavar="NAME", help="environment variable that holds the server's key")
    add("--concurrency", type=positive, default=16, help="calls at one time (default: %(default)s)")
    add(
        "--images-at-once",
        type=positive,
        default=8,
        help="images in work at one time; bounds memory (default: %(default)s)",
    )
    add("--timeout", type=above_zero, default=180.0, help="seconds for one try of a call (default: %(default)s)")
    add("--attempts", type=positive, default=6, help="tries of a call before it is given up (default: %(default)s)")
    add("--max-wait", type=above_zero, default=120.0, help="most seconds between two tries (default: %(default)s)")
    add("--max-tokens", type=positive, default=1024, help="of each reply (default: %(default)s)")
    add(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="""more fields of each request, e.g. '{"chat_template_kwargs": {"enable_thinking": false}}' for Qwen3.5""",
    )
    add("--prompts", type=Path, default=BUILT_IN, metavar="DIR", help="your prompts (default: the built-in ones)")
    add(
        "--write-prompts",
        type=Path,
        action=_WritePrompts,
        metavar="DIR",
        help="copy the built-in prompts there, and end",
    )
    add("--price-in", type=_not_negative, metavar="X", help="price of a million prompt tokens, for the report")
    add("--price-out", type=_not_negative, metavar="X", help="price of a million completion tokens")


def _kept(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--language", choices=("en", "zh", "any"), default="en", help="of the questions (default: %(default)s)")
    add("--limit", type=positive, help="only the first N images")
    add("--min-objects", type=positive, default=3, help="images with fewer are dropped (default: %(default)s)")
    add("--max-objects", type=positive, default=10, help="objects of an image that are used (default: %(default)s)")
    add("--max-area-ratio", type=_share, default=0.1, help="a box has less of the image's area (default: %(default)s)")
    add("--min-side", type=positive, default=16, help="least side of a box, pixels (default: %(default)s)")
    add("--questions", type=positive, default=3, help="for each box (default: %(default)s)")
    add("--answers", type=positive, default=8, help="samples of the answer, from the crop (default: %(default)s)")
    add("--min-agreement", type=_majority, default=0.75, help="share of them that agree (default: %(default)s)")
    add("--question-temperature", type=_not_negative, default=0.9, help="default: %(default)s")
    add("--answer-temperature", type=_not_negative, default=0.9, help="default: %(default)s")
    add("--top-p", type=_share, default=0.8, help="of questions and answers (default: %(default)s)")
    add("--zoom", type=above_zero, default=2.0, help="enlargement of the crop (default: %(default)s)")
    add("--max-side", type=positive, default=1536, help="longest side of an image in a request (default: %(default)s)")
    add("--side-multiple", type=positive, default=1, help="sides of a whole image in a request are multiples of it")
    add("--seed", type=int, default=0, help="of the sampling, the options' order and the split (default: %(default)s)")


def _optional(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--multiple-choice", action="store_true", help="add wrong options; the answer is a letter")
    add("--distractors", type=positive, default=3, help="wrong options (default: %(default)s)")
    add("--hard-model", help="small model; questions that it answers from the whole image are dropped")
    add("--hard-url", help="its server (default: --url)")
    add(
        "--hard-api-key-env",
        metavar="NAME",
        help="variable with its server's key (default: --api-key-env, same server only)",
    )
    add("--hard-samples", type=positive, default=4, help="its answers (default: %(default)s)")
    add("--hard-limit", type=positive, default=2, help="right ones that drop a question (default: %(default)s)")
    add("--hard-price-in", type=_not_negative, metavar="X", help="price of a million of its prompt tokens")
    add("--hard-price-out", type=_not_negative, metavar="X", help="price of a million of its completion tokens")


def _rows(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--data-source", default="synthesized", help="name of the rows in validation metrics (default: %(default)s)")
    add(
        "--suffix",
        help="what follows each question; the default asks to look inside the red box, which vision_opd and its kin draw "
        "(give your own, or '', for a recipe that draws none)",
    )
    add(
        "--val-fraction",
        type=fraction,
        default=0.0,
        help="share of the images whose rows go into val.parquet (default: none)",
    )
    add(
        "--name-images",
        action="store_true",
        help="rows name their image below --images instead of holding it: small files, and training needs the folder, too",
    )


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings of the pipeline.

    Raises:
        DataError: Options contradict each other.
    """
    if args.max_objects < args.min_objects:
        raise DataError(f"--max-objects {args.max_objects} is below --min-objects {args.min_objects}")
    if args.distractors >= len(LETTERS):
        raise DataError(
            f"--distractors {args.distractors}: at most {len(LETTERS) - 1}, there are {len(LETTERS)} letters"
        )
    if args.hard_model is None and (args.hard_url or args.hard_api_key_env):
        raise DataError("--hard-url and --hard-api-key-env need --hard-model")
    if args.hard_limit > args.hard_samples:
        raise DataError(
            f"--hard-limit {args.hard_limit} is above --hard-samples {args.hard_samples}: nothing would be dropped"
        )
    if args.side_multiple > args.max_side:
        raise DataError(f"--side-multiple {args.side_multiple} is above --max-side {args.max_side}")
    given = {field.name: getattr(args, field.name) for field in fields(Settings)}
    return Settings(**{**given, "distractors": args.distractors if args.multiple_choice else 0})


def suffix_of(args: argparse.Namespace) -> str:
    """What follows each question.

    Raises:
        DataError: It holds what the model does not read as text.
    """
    suffix = args.suffix
    if suffix is None:
        return CHOICE_SUFFIX if args.multiple_choice else OPEN_SUFFIX
    if PLACEHOLDER in suffix or RESERVED.search(suffix):
        raise DataError(f"--suffix {suffix!r}: it has {PLACEHOLDER} or a special token; leave it out")
    return suffix and (suffix if suffix[0].isspace() else " " + suffix)


def json_object(text: str) -> dict[str, Any]:
    """More fields of a request."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("it must be a JSON object")
    own = sorted(set(value).intersection(OWN_FIELDS))
    if own:
        raise argparse.ArgumentTypeError(f"{', '.join(own)} cannot be set here; see the other options")
    return value


def above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must not be negative")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 1")
    return value


def _majority(text: str) -> float:
    value = float(text)
    if not 0.5 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0.5, so that one answer wins, and at most 1")
    return value
