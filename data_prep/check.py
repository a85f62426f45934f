"""``python -m data_prep check``: rows against a recipe and a model's processor, before any GPU is touched.

Exit code: 0 where nothing is wrong (warnings apart), 1 where something is, 2 where the check cannot run.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from data_prep.faults import Finding, Report
from data_prep.rows import DataError, positive
from data_prep.sources import Address, file_or_address
from opd_recipes.images import ImageRoot
from opd_recipes.registry import RecipeError

CLEAN, FAULTY, CANNOT_RUN = 0, 1, 2

#: Rows in memory at a time.
BATCH = 16

#: A file with rows.
Rows = Path | Address

#: An override of hydra's: KEY=VALUE, ++KEY=VALUE, ~KEY.
OVERRIDE = re.compile(r"~[\w./@-]+|\+{0,2}[\w./@-]+=")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="FILE|KEY=VALUE",
        help="parquet files with training rows (paths, or addresses such as s3://...), and overrides of the configuration; "
        "all before or all behind the options",
    )
    parser.add_argument(
        "--val", nargs="+", action="extend", default=[], metavar="FILE", help="files with validation rows"
    )
    parser.add_argument("--config-name", default="vision_opd", help="recipe to check against (default: %(default)s)")
    parser.add_argument("--overlay", help="overlays of the recipe, e.g. vision_opd_6k or cpu,toy")
    parser.add_argument(
        "--model", required=True, metavar="PATH", help="the model to train; its processor counts tokens"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all faults and numbers to this file")
    parser.add_argument(
        "--fix",
        type=Path,
        metavar="DIR",
        help="write copies without the rows that have errors, and rejects.jsonl with those, to this folder",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="look at the first N rows of each file only")


def run(args: argparse.Namespace) -> None:
    """Check, print, and leave by ``SystemExit`` with the exit code, unless all is clean."""
    try:
        code = check(args)
    except (DataError, RecipeError, OSError) as error:
        print(f"data_prep: {error}", file=sys.stderr)
        code = CANNOT_RUN
    if code != CLEAN:
        sys.exit(code)


def check(args: argparse.Namespace) -> int:
    """The whole check; returns the exit code.

    Raises:
        DataError: It cannot run.
        RecipeError: Training would refuse the configuration.
    """
    train, overrides = split_inputs(args.inputs)
    val, more = split_inputs(args.val)
    _check_arguments(args, train, val)
    from data_prep import check_report
    from data_prep.check_fix import write_clean
    from data_prep.check_memory import estimate_memory
    from data_prep.check_setup import load_setup

    setup = load_setup(args.config_name, args.overlay, [*overrides, *more], args.model)
    with Report(args.json, keep_rejects=args.fix is not None) as report, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # a finding of its own
        warnings.filterwarnings("ignore", module="PIL")  # they name no row, and would break the progress line
        states = check_sets(setup, {"validation": val, "training": train}, args.limit, report)
        longest = max((max(counts) for state in states.values() for counts in state.tokens.values()), default=None)
        memory = None if longest is None else estimate_memory(setup.config, setup.model_config, longest)
        numbers = check_report.summary(states, memory, args.limit)
        report.finish(numbers)
        print(check_report.text(report, numbers))
        if args.fix is not None:
            print("\n".join(write_clean(args.fix, [*train, *val], report)))
    return FAULTY if report.errors else CLEAN


def split_inputs(inputs: Sequence[str]) -> tuple[list[Any], list[str]]:
    """Files (paths or addresses) and overrides of the configuration, told apart by their form; what exists is a file."""
    overrides = [text for text in inputs if OVERRIDE.match(text) and not os.path.exists(text)]
    return [file_or_address(text) for text in inputs if text not in overrides], overrides


def _check_arguments(args: argparse.Namespace, train: Sequence[Rows], val: Sequence[Rows]) -> None:
    from data_prep.check_fix import check_target

    if not train:
        raise DataError("name at least one file with training rows")
    for file in (*train, *val):
        if not file.is_file():
            raise DataError(f"{file}: no such file")
    outputs = {args.json.resolve()} if args.json is not None else set()
    if outputs.intersection(file.resolve() for file in (*train, *val)):
        raise DataError(f"--json {args.json} would overwrite a file that is to be checked; name another")
    if args.fix is not None:
        if args.limit is not None:
            raise DataError("--fix copies whole files, so it needs all rows checked; leave --limit out")
        check_target(args.fix, [*train, *val])


def check_sets(setup: Any, sets: Mapping[str, Sequence[Rows]], limit: int | None, report: Report):
    """Check validation first and training behind it, so that a training row with a validation image is told at once.

    Args:
        setup: :class:`~data_prep.check_setup.Setup`.
        sets: ``validation`` and ``training``: their files.
        limit: Rows looked at of each file; None: all.
        report: Gets every fault.

    Returns:
        The :class:`~data_prep.check_sets.SetState` of each set that has files.
    """
    from data_prep.check_sets import SetState, ValidationImages

    images, states = ValidationImages(), {}
    for name, files in sets.items():
        if not files:
            continue
        state = states[name] = SetState()
        readable = _readable(setup, files, name == "validation", report)
        total = sum(
            file.metadata.num_rows if limit is None else min(limit, file.metadata.num_rows) for _, file in readable
        )
        with tqdm(total=total, desc=f"checking {name} rows", unit="row", mininterval=1) as progress:
            for path, file in readable:
                for number, row, checked in _checked_rows(setup, path, file, name == "validation", limit, report):
                    place = (str(path), number)
                    if name == "validation":
                        images.add(place, checked)
                    else:
                        checked.findings += images.findings(checked)
                    checked.findings += state.findings(place, row, checked)
                    report.add(checked.findings, *place)
                    state.count(checked)
                    progress.update()
        report.add(state.closing())
        report.add(_too_few(setup, state) if name == "training" and limit is None else [])
    return states


def _readable(setup: Any, files: Sequence[Rows], validation: bool, report: Report) -> list[tuple[Rows, Any]]:
    """The opened files without an error of their own; the rows of the others cannot be read as training would."""
    from data_prep.check_schema import differences, open_parquet, schema_findings

    columns = setup.columns(validation)
    opened: list[tuple[Rows, Any]] = []
    for path in files:
        file, found = open_parquet(path)
        if file is not None:
            found += schema_findings(file.schema_arrow, columns)
            if opened:
                found += differences(file.schema_arrow, opened[0][1].schema_arrow, str(opened[0][0]))
        report.add(found, str(path))
        if file is not None and not any(finding.is_error for finding in found):
            opened.append((path, file))
    return opened


def _checked_rows(
    setup: Any, path: Rows, file: Any, validation: bool, limit: int | None, report: Report
) -> Iterator[tuple[int, Mapping[str, Any], Any]]:
    """Row number, row and what is known of it; a few rows at a time are in memory and being decoded."""
    from data_prep.check_rows import Checked, RowChecker
    from data_prep.check_schema import read_batches

    checker = RowChecker(setup, validation, ImageRoot.of(path, setup.config.data.get("image_root")))

    def examine(entry: tuple[int, dict | None, list[Finding]]) -> Checked:
        _, row, found = entry
        return Checked(findings=list(found)) if row is None else checker.check(row)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # decoding and resizing release the GIL
        for batch in read_batches(file, BATCH):
            if batch[0][0] is None:
                report.add(batch[0][2], str(path))
                return
            batch = list(batch if limit is None else islice(batch, max(0, limit - batch[0][0])))
            if not batch:
                return
            for (number, row, _), checked in zip(batch, pool.map(examine, batch), strict=True):
                yield number, row or {}, checked


def _too_few(setup: Any, state: Any) -> list[Finding]:
    good, batch = state.rows - state.bad, setup.limits.batch
    if good >= batch:
        return []
    return [Finding("few_rows", f"{good} of {state.rows} training rows can be used, a batch has {batch}")]
