"""Pictures that look the same: through encoders, scaling and colours; and that others do not."""

from __future__ import annotations

import io
import json
import random
from functools import cache
from itertools import combinations

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep import pairs as converter
from data_prep.looks import BITS, CROWDED, NEAR, Looks, distance, look
from data_prep.split import choose_val, similar
from data_prep.toy.scenes import make_scene, scene_rng
from tests.photos import PHOTOS, STUDENT_VIEW, TEACHER_VIEW
from tests.unit import commands
from tests.unit.check_helpers import faults_of
from tests.unit.check_rows import encoded, entry, picture, row


def scene(number: int) -> Image.Image:
    return make_scene(scene_rng("looks", 0, number)).image


@cache
def photos() -> list[Image.Image]:
    """Each photograph once, also where it is used in colour and grey."""
    return list({(photo.file, photo.part): photo.load().convert("RGB") for photo in PHOTOS}.values())


def again(image: Image.Image, kind: str, **options: int) -> Image.Image:
    return Image.open(io.BytesIO(encoded(image, kind, **options))).convert("RGB")


def scaled(image: Image.Image, by: float) -> Image.Image:
    return image.resize((round(image.width * by), round(image.height * by)), Image.Resampling.LANCZOS)


CHANGES = {
    "JPEG 95": lambda image: again(image, "JPEG", quality=95),
    "JPEG 40": lambda image: again(image, "JPEG", quality=40),
    "WebP": lambda image: again(image, "WEBP", quality=80),
    "half the size": lambda image: scaled(image, 0.5),
    "larger": lambda image: scaled(image, 1.5),
    "smaller JPEG": lambda image: again(scaled(image, 0.7), "JPEG", quality=75),
    "grey": lambda image: image.convert("L").convert("RGB"),
    "palette": lambda image: image.quantize(256, Image.Quantize.FASTOCTREE).convert("RGB"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_same_picture_is_near(change):
    for image in [*(scene(n) for n in range(10)), *photos()]:
        assert distance(look(image), look(change(image))) <= NEAR


def test_a_photograph_stays_near_under_a_red_box_and_its_crop_is_another_picture():
    """Rows of the published set that ask about one photograph have it with different boxes."""
    for photo in PHOTOS:
        image = photo.load().convert("RGB")
        assert distance(look(image), look(STUDENT_VIEW(image, photo.box))) <= NEAR
        assert distance(look(image), look(TEACHER_VIEW(image, photo.box))) > NEAR


def test_other_pictures_are_far():
    """Measured once on 2,000 toy scenes: the nearest two differ in 48 bits, on average 128. These are fewer."""
    looks = np.array([np.frombuffer(look(scene(n)), np.uint8) for n in range(300)])
    bits = np.unpackbits(looks, axis=1).astype(int)
    apart = bits @ (1 - bits).T + (1 - bits) @ bits.T
    assert apart[~np.eye(300, dtype=bool)].min() > 2 * NEAR


def test_other_photographs_are_far():
    for one, other in combinations(photos(), 2):
        assert distance(look(one), look(other)) > 2 * NEAR


def test_a_picture_without_features_has_no_look():
    assert look(Image.new("RGB", (50, 40), "white")) == b""
    assert len(look(picture(0))) == BITS // 8
    faint = Image.new("RGB", (64, 64), (100, 100, 100))
    faint.putpixel((3, 3), (110, 110, 110))
    assert look(faint) == b""


def flipped(one: bytes, count: int, seed: int = 0) -> bytes:
    """Another look, in which so many bits differ."""
    key = int.from_bytes(one)
    for bit in random.Random(seed).sample(range(BITS), count):
        key ^= 1 << bit
    return key.to_bytes(BITS // 8)


@pytest.mark.parametrize("count", [0, 1, NEAR // 2, NEAR, NEAR + 1])
def test_every_near_look_is_found_wherever_its_bits_differ(count):
    looks: Looks[int] = Looks()
    known = [random.Random(n).randbytes(32) for n in range(50)]
    for n, one in enumerate(known):
        looks.add(one, n)
    for seed in range(200):
        n = seed % 50
        assert looks.near(flipped(known[n], count, seed)) == ([(count, n)] if count <= NEAR else [])


def test_the_first_of_equal_looks_is_kept_and_none_is_never_near():
    looks: Looks[str] = Looks()
    looks.add(b"", "plain")
    looks.add(bytes(31) + b"\1", "first")
    looks.add(bytes(31) + b"\1", "second")
    assert len(looks) == 1
    assert looks.near(bytes(31) + b"\1") == [(0, "first")] and looks.near(b"") == []


def test_looks_that_share_bands_with_thousands_are_found_by_the_others():
    """Half of the bits are the same in all looks, as in pages with the same margins."""
    looks: Looks[int] = Looks()
    known = [bytes(16) + random.Random(n).randbytes(16) for n in range(3 * CROWDED)]
    for n, one in enumerate(known):
        looks.add(one, n)
    assert [value for _, value in looks.near(flipped(known[-1], 4))] == [len(known) - 1]
    assert looks.near(known[7]) == [(0, 7)]


def test_thousands_of_near_pictures_are_one_group_and_few_pairs():
    """Frames of one video: each has all of its bands with the others, beyond what is compared."""
    one = random.Random(0).randbytes(32)
    frames = [flipped(one, 1 + n % 6, n) for n in range(3 * CROWDED)]
    images = [(n.to_bytes(2),) for n in range(len(frames))]
    pairs = similar(images, [(frame,) for frame in frames])
    assert len(pairs) == len(images) - 1
    assert choose_val([*images, (b"other",)], [True] * (len(images) + 1), 0.1, 0, pairs) == {len(images)}


# In the split


def test_rows_whose_images_look_the_same_are_on_one_side():
    one, other = look(scene(0)), look(scene(1))
    images = [(b"a",), (b"b",), (b"c", b"d"), (b"e",)]
    looks = [(one,), (flipped(one, 5),), (other, flipped(other, 100)), (b"",)]
    alike = similar(images, looks)
    assert {frozenset(pair) for pair in alike} == {frozenset({b"a", b"b"})}
    for seed in range(10):
        drawn = choose_val(images, [True] * 4, 0.5, seed, alike)
        assert len(drawn & {0, 1}) != 1


def test_a_converter_keeps_a_picture_and_its_jpeg_on_one_side_unless_told_otherwise(tmp_path, capsys):
    """Twelve pictures, each asked about twice: once from a PNG, once from a smaller JPEG."""
    lines = []
    for n in range(12):
        scene(n).save(tmp_path / f"{n}.png")
        scaled(scene(n), 0.7).save(tmp_path / f"{n}.jpg", quality=80)
        lines += [{"question": f"{n}?", "answer": "A", "image": f"{n}.{kind}"} for kind in ("png", "jpg")]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for options, shared in (((), 0), (("--exact-images",), 2)):
        out = tmp_path / f"out{shared}"
        commands.run(converter, "--source", tmp_path / "set.jsonl", "--out", out, "--val-fraction", "0.5", *options)
        train, val = (pq.read_table(out / f"{split}.parquet").to_pylist() for split in ("train", "val"))
        assert len(train) == len(val) == 12
        both = {r["extra_info"]["question"] for r in train} & {r["extra_info"]["question"] for r in val}
        assert (len(both) == 0) == (shared == 0)
    assert "images that look like another one: 24; their rows are in the same file" in capsys.readouterr().out


def test_images_with_equal_pixels_are_no_pair():
    one = look(scene(0))
    assert similar([(b"a",), (b"a",), (b"b",)], [(one,), (one,), (b"",)]) == []


def test_a_large_group_is_drawn_last():
    """Frames of one video must not become the whole validation set."""
    images = [(b"v",)] * 50 + [(bytes([n]),) for n in range(50)]
    for seed in range(10):
        drawn = choose_val(images, [True] * 100, 0.1, seed)
        assert len(drawn) == 10 and min(drawn) >= 50


# In the check


@pytest.mark.parametrize(
    ("change", "kinds"),
    [(CHANGES["JPEG 95"], {"leak_similar"}), (lambda image: image, {"leak_bytes"}), (lambda _: scene(1), set())],
)
def test_a_training_image_that_looks_like_a_validation_image_is_a_warning(tmp_path, change, kinds):
    train = row(0, images=[entry(encoded(change(scene(0))))])
    faults = faults_of(tmp_path, [[train]], val=[[row(1, images=[entry(encoded(scene(0)))])]])
    assert {fault["kind"] for fault in faults} - {"few_rows"} == kinds
    for fault in faults:
        if fault["kind"] == "leak_similar":
            assert fault["severity"] == "warning" and "val0.parquet, row 0 (" in fault["reason"]
            assert "of 256 bits differ)" in fault["reason"] and "look at both" in fault["remedy"]
