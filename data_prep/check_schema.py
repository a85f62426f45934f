"""What is wrong with a file before any row is read: its format, its columns and their types."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.configuration import ColumnNames
from data_prep.faults import Finding
from data_prep.rows import DataError, show
from data_prep.sources import Address, parquet_file

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Columns(ColumnNames):
    """What the configuration calls the columns, and which of the optional ones it reads."""

    needs_box: bool = False
    needs_evidence: bool = False
    needs_answer: bool = False

    def required(self) -> list[str]:
        optional = [
            (self.box, self.needs_box),
            (self.evidence, self.needs_evidence),
            ("reward_model", self.needs_answer),
        ]
        return [self.prompt, self.images, "data_source", *(name for name, needed in optional if needed)]


def open_parquet(path: Path | Address) -> tuple[Any, list[Finding]]:
    """The opened file, or why it is none."""
    import pyarrow as pa

    if path.suffix != ".parquet":
        reason = (
            f"its name ends in {path.suffix or 'nothing'}, but only .parquet is checked, by which training knows it"
        )
        return None, [Finding("unreadable_file", reason)]
    try:
        file = parquet_file(path)
        if file.metadata.num_rows == 0:
            return None, [Finding("no_rows", "the file has no rows")]
        return file, []
    except (OSError, DataError, pa.ArrowException) as error:
        return None, [Finding("unreadable_file", f"it cannot be read as parquet: {error}")]


def schema_findings(schema: pa.Schema, columns: Columns) -> list[Finding]:
    """Check columns and types as training reads them."""
    names = schema.names
    found = [
        Finding("missing_column", f"column '{name}' is missing; the file has {', '.join(names)}")
        for name in columns.required()
        if name not in names
    ]
    repeated = sorted({name for name in names if names.count(name) > 1})
    found += [Finding("wrong_column_type", f"column '{name}' is there several times") for name in repeated]
    expected = {
        columns.prompt: (_is_messages, "a list of {role: string, content: string}"),
        columns.images: (_is_images, "a list of {bytes: binary, path: string}, or of paths"),
        columns.evidence: (_is_images, "a list of {bytes: binary, path: string}, or of paths"),
        columns.box: (_is_numbers, "a list of four numbers"),
        "data_source": (_is_text, "string"),
        "reward_model": (_is_struct, "a struct with ground_truth"),
        "extra_info": (_is_struct, "a struct"),
    }
    for name, (fits, wanted) in expected.items():
        if names.count(name) == 1 and not fits(schema.field(name).type):
            found.append(
                Finding("wrong_column_type", f"column '{name}' is {schema.field(name).type}; it must be {wanted}")
            )
    decoded = _decoded_images(schema, (columns.images, columns.evidence))
    found += [
        Finding("image_feature", f"datasets would decode column '{name}' to pixels when it loads it")
        for name in decoded
    ]
    return found + _answer_type(schema)


def _answer_type(schema: pa.Schema) -> list[Finding]:
    import pyarrow.types as types

    if "reward_model" not in schema.names or not types.is_struct(schema.field("reward_model").type):
        return []
    reward = schema.field("reward_model").type
    index = reward.get_field_index("ground_truth")
    if index < 0 or types.is_null(reward.field(index).type) or _is_text(reward.field(index).type):
        return []
    kind = reward.field(index).type
    simple = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return [Finding("answer_number" if simple else "answer_type", f"reward_model.ground_truth is {kind}, not text")]


def differences(schema: pa.Schema, first: pa.Schema, first_name: str) -> list[Finding]:
    """Columns whose types differ from another file of the set, so that the two cannot be joined."""
    import pyarrow.types as types

    found = []
    for name in schema.names:
        if schema.names.count(name) != 1 or first.names.count(name) != 1:
            continue
        here, there = schema.field(name).type, first.field(name).type
        if here != there and not types.is_null(here) and not types.is_null(there):
            reason = f"column '{name}' is {here}, but {there} in {first_name}"
            found.append(Finding("schemas_differ", reason))
    return found


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind)


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_struct(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    return types.is_struct(kind) or types.is_null(kind)


def _is_numbers(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    if types.is_null(kind):
        return True
    if not _is_list(kind):
        return False
    value = kind.value_type
    return types.is_integer(value) or types.is_floating(value) or types.is_null(value)


def _is_messages(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    if types.is_null(kind):
        return True
    if not _is_list(kind) or not types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return {"role", "content"} <= fields.keys() and _is_text(fields["role"]) and _is_text(fields["content"])


def _is_images(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    if types.is_null(kind):
        return True
    if not _is_list(kind):
        return False
    value = kind.value_type
    if not types.is_struct(value):
        return _is_text(value)
    fields = {field.name: field.type for field in value}
    data, path = fields.get("bytes"), fields.get("path")
    is_data = data is not None and (types.is_binary(data) or types.is_large_binary(data) or types.is_null(data))
    is_path = path is not None and _is_text(path)
    return (is_data or data is None) and (is_path or path is None) and (is_data or is_path)


def _decoded_images(schema: pa.Schema, names: Iterable[str]) -> list[str]:
    """Columns that carry the Image feature of datasets."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return [name for name in names if name in schema.names and _has_image_feature(features.get(name))]
    except (KeyError, ValueError, TypeError, AttributeError):
        return []


def _has_image_feature(feature: Any) -> bool:
    if isinstance(feature, list):
        return any(map(_has_image_feature, feature))
    if not isinstance(feature, dict):
        return False
    if feature.get("_type") == "Image":
        return feature.get("decode", True) is not False
    return any(map(_has_image_feature, feature.values()))


def read_batches(file: Any, size: int):
    """Lists of (row number, row or None, findings), ``size`` rows at a time; a row of None could not be read."""
    import pyarrow as pa

    start = 0
    batches = file.iter_batches(size)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (OSError, pa.ArrowException) as error:
            yield [
                (None, None, [Finding("unreadable_file", f"it cannot be read from row {start} on: {show(str(error))}")])
            ]
            return
        try:
            yield [(start + i, row, []) for i, row in enumerate(batch.to_pylist())]
        except UnicodeDecodeError:
            yield [(start + i, *_single(batch.slice(i, 1))) for i in range(batch.num_rows)]
        start += batch.num_rows


def _single(batch: Any) -> tuple[dict[str, Any] | None, list[Finding]]:
    try:
        return batch.to_pylist()[0], []
    except UnicodeDecodeError as error:
        return None, [Finding("not_utf8", f"a text of the row has the bytes {error.object[:20]!r}, which are no UTF-8")]
