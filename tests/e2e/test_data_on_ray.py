"""Data commands on a real Ray: what they write is, byte for byte, what the same command writes without it."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep import boxes, convert, pairs, seen, shards, vision_opd_6k
from data_prep.__main__ import main
from data_prep.rows import DataError
from data_prep.toy.scenes import make_scene, scene_rng
from tests.unit import commands
from tests.unit.archive_cases import BOTH, source_of, tar

pytestmark = pytest.mark.e2e

ROWS = 200
SHARD = 32
BOXES = ("--box-field", "box", "--convention", "xywh")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(shards, "ROWS", SHARD)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def picture(number: int) -> bytes:
    """Every fifth is the one before it, encoded with loss; every seventh is stored lying on its side."""
    image = make_scene(scene_rng("ray", 0, number - (number % 5 == 4))).image
    tags = Image.Exif()
    tags[0x0112] = 6 if number % 7 == 6 else 1
    return encoded(image, "JPEG", quality=85, exif=tags) if number % 5 == 4 else encoded(image, "PNG", exif=tags)


BROKEN: dict[int, bytes | dict[str, Any]] = {
    3: b'{"question": "Que',
    40: {"image": "none.png"},
    41: {"image": "../secret.png"},
    64: {"box": [150, 150, 100, 100]},
    65: {"box": None},
    99: {"question": "", "image": None},
    130: {"image": "cut.png"},
    199: b"[1]",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    lines = []
    for n in range(ROWS):
        (folder / f"{n}.png").write_bytes(picture(n))
        broken = BROKEN.get(n, {})
        record = {"question": f"Question {n}?", "answer": "A", "image": f"{n}.png", "box": [20, 30, 60 + n % 9, 40]}
        lines.append(broken if isinstance(broken, bytes) else json.dumps({**record, **broken}).encode())
        lines += [b""] * (n % 10 == 9)
    (folder / "cut.png").write_bytes(picture(0)[:2000])
    (folder / "set.jsonl").write_bytes(b"\n".join(lines))
    return folder / "set.jsonl"


def both(command: ModuleType, folder: Path, *options: Any) -> Path:
    """Run a command without Ray and with it, compare all files, and give the folder of one."""
    for name, more in (("local", ()), ("ray", ("--ray", "local"))):
        commands.run(command, *options, "--out", folder / name, *more)
    local, ray = ({file.name: file.read_bytes() for file in (folder / name).iterdir()} for name in ("local", "ray"))
    assert local.keys() == ray.keys()
    assert all(local[name] == ray[name] for name in local)
    return folder / "ray"


def test_boxes(source, tmp_path, capsys):
    out = both(boxes, tmp_path, "--source", source, *BOXES, "--skip-bad", "--val-fraction", "0.1")
    assert {file.name for file in out.iterdir()} == {"train.parquet", "val.parquet", "rejects.jsonl"}
    rejects = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert [reject["line"] for reject in rejects] == [n + 1 + n // 10 for n in BROKEN]
    train, val = (pq.read_table(out / f"{split}.parquet").num_rows for split in ("train", "val"))
    assert train + val == ROWS - len(BROKEN)
    assert capsys.readouterr().out.count("images that look like another one") == 2


def test_bad_rows_stop_it_with_the_same_message(source, tmp_path):
    options = ("--source", source, *BOXES)
    told = [
        commands.refusal(boxes, tmp_path / name, *options, *ray) for name, ray in (("a", ()), ("b", ("--ray", "auto")))
    ]
    assert told[0] == told[1] and "8 of 200 rows cannot be used" in told[0]


def test_parquet_that_holds_its_images_and_a_limit(source, tmp_path):
    """The rows of a converted file, in shards that begin within its row groups."""
    commands.run(boxes, "--source", source, *BOXES, "--out", tmp_path / "first", "--skip-bad")
    both(pairs, tmp_path, "--source", tmp_path / "first/train.parquet", "--limit", "150")


def test_a_view_is_drawn(source, tmp_path):
    commands.run(boxes, "--source", source, *BOXES, "--out", tmp_path / "rows", "--skip-bad")
    table = pq.read_table(tmp_path / "rows/train.parquet")
    answers = table.column("reward_model").to_pylist()
    answers[70] = None
    changed = pa.array(answers, table.schema.field("reward_model").type)
    pq.write_table(
        table.set_column(table.schema.names.index("reward_model"), "reward_model", changed), tmp_path / "a.parquet"
    )
    files = []
    for name, more in (("local", ()), ("ray", ("--ray", "local"))):
        out = tmp_path / name / "drawn.parquet"
        options = ["--data", tmp_path / "a.parquet", "--data", tmp_path / "rows/train.parquet", "--out", out, *more]
        main(["render", *map(str, options), "--view", "teacher", "--overlay", "toy", "--skip-bad"])
        files.append({file.name: file.read_bytes() for file in out.parent.iterdir()})
    assert files[0] == files[1] and files[0].keys() == {"drawn.parquet", "drawn.rejects.jsonl"}
    assert pq.read_metadata(tmp_path / "ray/drawn.parquet").num_rows == 2 * (ROWS - len(BROKEN)) - 1


def test_the_published_set_from_archives(tmp_path):
    both(
        vision_opd_6k,
        tmp_path,
        "--source",
        source_of(tmp_path / "in", {"data.tar": tar(BOTH)}),
        "--val-fraction",
        "0.3",
    )


def test_a_run_that_is_stopped_goes_on_by_shards(source, tmp_path, monkeypatch, capsys):
    options = ("--source", source, *BOXES, "--skip-bad", "--out", tmp_path / "out")

    def stopped(*arguments: Any) -> Iterator[Any]:
        for number, shard in enumerate(shards.in_shards(*arguments)):
            if number == 3:
                raise KeyboardInterrupt
            yield shard

    monkeypatch.setattr(convert, "in_shards", stopped)
    with pytest.raises(KeyboardInterrupt):
        commands.run(boxes, *options, "--ray", "local")
    assert [file.name for file in (tmp_path / "out").iterdir()] == [seen.NAME]
    monkeypatch.undo()
    commands.run(boxes, *options, "--ray", "local")
    # Three shards of 32 rows, of which three have no image.
    assert "going on: 93 images" in capsys.readouterr().out
    commands.run(boxes, *options[:-1], tmp_path / "local")
    assert all(
        (tmp_path / "out" / file.name).read_bytes() == file.read_bytes() for file in (tmp_path / "local").iterdir()
    )


def squares(job: int, start: int, count: int) -> tuple[list[int], int]:
    if start > 200:
        raise DataError("too far")
    return [n * n + job for n in range(start, min(start + count, 100))], os.getpid()


def test_shards_come_in_order_and_end_where_the_source_ends():
    found = list(shards.in_shards("local", 5, squares, "squares", None, []))
    assert [value for values, _ in found for value in values] == [n * n + 5 for n in range(100)]
    assert os.getpid() not in {process for _, process in found}


def test_what_a_machine_cannot_do_is_told():
    with pytest.raises(DataError, match=r"/none/set.jsonl: the machine .* does not see it; put it on a file system"):
        list(shards.in_shards("local", 5, squares, "squares", 1, ["/none/set.jsonl"]))


def fail(job: int, start: int, count: int) -> Any:
    raise DataError("row 3: it is longer than 64 MB")


def test_an_error_of_a_shard_is_its_own_message():
    with pytest.raises(DataError, match="^row 3: it is longer than 64 MB$"):
        list(shards.in_shards("local", 5, fail, "failing", None, []))
