"""``python -m data_prep pairs``: image-question pairs in common layouts as training rows, for RP-OPSD and OPSD.

The first pass checks every row and decodes every image; only when that is done is anything written. Encoded images are
copied as they are. ``boxes`` is the same with one more column.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

from data_prep import seen
from data_prep.convert import TEMPORARY, BoxColumn, Job, check_source, settle, write
from data_prep.images import SourceRoot
from data_prep.layouts import LAYOUTS, Fields, Layout, detect
from data_prep.rows import REJECTS, DataError, RowFault, describe_faults
from data_prep.seen import DecodedImages
from data_prep.sources import Source, open_source
from data_prep.split import add_ray_argument, add_split_arguments, draw_val, notes_on_earlier_runs

#: So many records decide the layout.
SAMPLE = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source",
        required=True,
        help="parquet, JSONL or JSON file, a folder of such files, or a Hugging Face dataset saved to disk",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and val.parquet")
    parser.add_argument("--layout", choices=LAYOUTS, help="what the fields mean (default: detected, and printed)")
    parser.add_argument("--question-field", help="name of the field; dots for a field inside another")
    parser.add_argument("--answer-field", help="as --question-field")
    parser.add_argument("--image-field", help="as --question-field")
    parser.add_argument(
        "--turn",
        choices=("first", "last"),
        default="first",
        help="which question of a conversation is asked; the last one with what was said before (default: %(default)s)",
    )
    parser.add_argument("--split", help="split of a saved dataset that has several")
    parser.add_argument(
        "--images", help="what image paths are relative to: a folder, or s3://... and the like (default: the source's)"
    )
    parser.add_argument(
        "--allow-outside", action="store_true", help="let rows name any local file; for files that you trust only"
    )
    parser.add_argument("--data-source", type=_name, help="name in the data_source column (default: the source's)")
    parser.add_argument("--need-answer", action="store_true", help="a row without an answer cannot be used (for OPSD)")
    add_split_arguments(parser)
    add_ray_argument(parser)


def _name(text: str) -> str:
    if not re.fullmatch(r"[\w./-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r}: letters, digits and . / _ - only")
    return text


def run(args: argparse.Namespace) -> None:
    run_with(args, "pairs", None)


def run_with(args: argparse.Namespace, command: str, boxes: BoxColumn | None) -> None:
    """Convert, or end the process with a message."""
    try:
        print(convert(args, command, boxes))
    except DataError as error:
        sys.exit(f"data_prep: {error}")
    except OSError as error:
        sys.exit(f"data_prep: {error}; nothing was written to {args.out}")


def convert(args: argparse.Namespace, command: str, boxes: BoxColumn | None) -> str:
    """Check the whole source, then write it; return what there is to say.

    Raises:
        DataError: Rows cannot be used and ``--skip-bad`` is off, or no row is left. Nothing is written.
    """
    source = open_source(args.source, args.split)
    layout = read_layout(source, args, boxes)
    root = SourceRoot(args.images or source.folder, args.allow_outside)
    print(f"reading {args.source}: {source.kind}, {layout.describe()}")
    with DecodedImages(args.out / seen.NAME) as decoded:
        if len(decoded):
            print(f"going on: {len(decoded)} images were decoded by an earlier run, and are not again")
        job = Job(source, layout, root, args.need_answer, args.limit, boxes, args.data_source, decoded, args.ray)
        lines = convert_checked(job, args, command)
        decoded.forget()
    return "\n".join(lines)


def convert_checked(job: Job, args: argparse.Namespace, command: str) -> list[str]:
    """Both passes; what there is to say."""
    checked, notes = settle(job, check_source(job))
    bad = [row.place.reject(row.reasons) for row in checked if row.reasons]
    if bad and not (args.skip_bad and len(bad) < len(checked)):
        raise DataError("\n".join([describe_faults(bad, len(checked), args.skip_bad), *notes]))
    good = [position for position, row in enumerate(checked) if not row.reasons]
    answered = [checked[position].has_answer for position in good]
    images, looks = ([getattr(checked[position], name) for position in good] for name in ("images", "looks"))
    drawn, more = draw_val(args, images, looks, answered)
    notes += more
    counts = write(job, args.out, checked, {good[i] for i in drawn}, bad, _name_of(args.source))
    later = sum(row.later_turns > 0 for row in checked)
    notes += [f"conversations that go on behind the answer: {later}; that part was left out"] if later else []
    return [*notes, *closing_lines(args, command, counts, len(bad), answered.count(False))]


def _name_of(source: str) -> str:
    """What a source is called in ``data_source``: its file or folder, without ending."""
    last = [part for part in source.rstrip("/").split("/") if part not in ("", ".", "..")]
    return re.sub(r"[^\w-]+", "_", last[-1].split(".")[0]) if last else "pairs"


def read_layout(source: Source, args: argparse.Namespace, boxes: BoxColumn | None) -> Layout:
    """The layout that the first records show.

    Raises:
        DataError: With the source's name.
    """
    records = [record for _, record in source.records(SAMPLE)]
    if not records:
        raise DataError(f"{args.source}: it has no rows; is the download complete?")
    faults = [record for record in records if isinstance(record, RowFault)]
    fields = Fields(args.question_field, args.answer_field, args.image_field)
    sound = [record for record in records if isinstance(record, dict)]
    try:
        return detect(sound, args.layout, fields, args.turn == "last", [boxes.field] if boxes else [])
    except DataError as error:
        first = f" (first: {faults[0]})" if faults and not sound else ""
        raise DataError(f"{args.source}: {error}{first}") from error


def closing_lines(
    args: argparse.Namespace, command: str, counts: dict[str, int], skipped: int, unanswered: int
) -> list[str]:
    """What was written, what deserves a look, and how to train on it."""
    out, files = args.out, {split: args.out / f"{split}.parquet" for split in counts}
    written = [
        f"{n} rows to {files[split]} ({files[split].stat().st_size / 1e6:.1f} MB)" for split, n in counts.items()
    ]
    lines = [f"wrote {' and '.join(written)}"]
    if skipped:
        lines.append(f"rows left out: {skipped}; the reasons are in {out / REJECTS}")
    total = sum(counts.values())
    lines.append(f"rows with an answer: {total - unanswered} of {total}")
    if unanswered:
        lines.append(
            "  rp_opsd and vision_opd train without answers; opsd, GRPO, SFT and validation need one in each row: "
            "--need-answer makes rows without one faults"
        )
    lines += notes_on_earlier_runs(
        out, {file.name for file in files.values()} | ({REJECTS} if skipped else set()), TEMPORARY
    )
    recipes = ["vision_opd"] if command == "boxes" else ["rp_opsd"] if unanswered else ["rp_opsd", "opsd"]
    val = str(files["val"]) if "val" in files else "VAL.parquet"
    missing = "MODEL" if "val" in files else "MODEL and VAL.parquet (or make one with --val-fraction 0.02)"
    lines.append(f"check it, then train on it, with your {missing}:")
    files_given = [f"data.train_files={files['train']}", f"data.val_files={val}"]
    for recipe in recipes:
        check = ["python", "-m", "data_prep", "check", str(files["train"]), "--config-name", recipe, "--model", "MODEL"]
        train = ["python", "-m", "opd_recipes", "--config-name", recipe, *files_given]
        lines += [f"  {shlex.join(check)}", f"  {shlex.join([*train, 'actor_rollout_ref.model.path=MODEL'])}"]
    return lines
