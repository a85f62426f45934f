import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from opd_recipes.masks import (
    blank,
    mask_blur,
    mask_blurred_rectangles,
    mask_box,
    mask_patches,
    mask_rectangle,
    noise,
)
from opd_recipes.registry import RecipeError
from opd_recipes.view_steps import VIEWS, ViewError
from opd_recipes.views import View

STEPS = ("blank", "mask_blur", "mask_blurred_rectangles", "mask_box", "mask_patches", "mask_rectangle", "noise")
RANDOM = ("mask_blurred_rectangles", "mask_patches", "mask_rectangle")
BOX = (20.0, 10.0, 31.0, 19.0)


def picture(width=64, height=48, seed=0):
    """Random pixels, none of them black."""
    pixels = np.random.default_rng(seed).integers(1, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def white(width, height):
    return Image.new("RGB", (width, height), "white")


def ramp(width=64, height=48):
    """Every pixel tells its own place: red = x, green = y."""
    pixels = np.full((height, width, 3), 5, np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(width)[None], np.arange(height)[:, None]
    return Image.fromarray(pixels)


def black(image):
    return (np.asarray(image) == 0).all(-1)


def filled(where):
    """The rectangle x0, y0, x1, y1 that is true in ``where`` (height, width), and nothing else is."""
    ys, xs = np.where(where)
    x0, y0, x1, y1 = xs.min(), ys.min(), xs.max() + 1, ys.max() + 1
    assert where[y0:y1, x0:x1].all() and where.sum() == (x1 - x0) * (y1 - y0)
    return int(x0), int(y0), int(x1), int(y1)


def step(name, image, **options):
    return VIEWS.get(name)(image, BOX, **options)


# Every step


@pytest.mark.parametrize("name", STEPS)
def test_size_and_box_pass_through_and_the_image_that_came_in_is_not_changed(name):
    image = picture()
    before = image.tobytes()
    masked, box = step(name, image)
    assert box == BOX and masked.size == image.size and masked.mode == "RGB"
    assert image.tobytes() == before and masked.tobytes() != before


@pytest.mark.parametrize("name", [name for name in STEPS if name != "mask_box"])
def test_works_without_a_box_and_on_one_pixel(name):
    masked, box = VIEWS.get(name)(white(1, 1), None)
    assert masked.size == (1, 1) and box is None
    assert not View(name).needs_box


@pytest.mark.parametrize("name", STEPS)
def test_the_same_image_gives_the_same_view_every_time(name):
    options = {"rng": "per_sample"} if name in RANDOM else {}
    once, again = (step(name, picture(), **options)[0] for _ in range(2))
    assert once.tobytes() == again.tobytes()


def test_the_same_image_gives_the_same_view_in_every_process():
    script = f"""
import hashlib
from PIL import Image
from opd_recipes.views import View
image = Image.linear_gradient("L").convert("RGB")
for name in {STEPS!r}:
    spec = {{"kind": name, "rng": "per_sample"}} if name in {RANDOM!r} else name
    print(name, hashlib.sha256(View(spec)(image, (20, 10, 31, 19)).tobytes()).hexdigest())
"""
    told = [
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1] and len(told[0].splitlines()) == len(STEPS)


def hidden(name, picture_seed, **options):
    """Where a step changes a picture, (126, 140)."""
    image = picture(140, 126, picture_seed)
    return (np.asarray(step(name, image, **options)[0]) != np.asarray(image)).any(-1)


def alike(a, b):
    return (a == b).mean() > 0.99  # a blur leaves a pixel here and there as it was


@pytest.mark.parametrize("name", RANDOM)
def test_fixed_is_one_mask_for_all_images_and_per_sample_one_for_each(name):
    assert alike(hidden(name, 1), hidden(name, 2))
    assert not alike(hidden(name, 1, rng="per_sample"), hidden(name, 2, rng="per_sample"))


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("rng", ["fixed", "per_sample"])
def test_another_seed_is_another_mask(name, rng):
    assert not alike(hidden(name, 1, rng=rng, seed=42), hidden(name, 1, rng=rng, seed=43))


# mask_rectangle


@pytest.mark.parametrize("size", [(300, 300), (400, 300), (240, 360)])
def test_rectangle_has_a_third_of_the_image_and_an_aspect_from_a_half_to_two(size):
    aspects, places = [], []
    for seed in range(300):
        x0, y0, x1, y1 = filled(black(mask_rectangle(white(*size), None, seed=seed)[0]))
        width, height = x1 - x0, y1 - y0
        assert abs(width * height - size[0] * size[1] / 3) <= (width + height) / 2 + 1  # sides are whole pixels
        assert 0.5 * 0.98 <= width / height <= 2 * 1.02
        aspects.append(width / height)
        places.append((x0 / (size[0] - width), y0 / (size[1] - height)))
    # Uniform: the mean of 300 draws within four standard errors, and both ends are reached.
    assert np.mean(aspects) == pytest.approx(1.25, abs=4 * 1.5 / 12**0.5 / 300**0.5)
    assert min(aspects) < 0.55 and max(aspects) > 1.9
    assert np.mean(places, axis=0) == pytest.approx([0.5, 0.5], abs=4 / 12**0.5 / 300**0.5)
    assert np.min(places) < 0.03 and np.max(places) > 0.97


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.integers(1, 200), st.integers(0, 2**31), st.floats(0.01, 1.0))
def test_rectangle_stays_inside_any_image(width, height, seed, area):
    x0, y0, x1, y1 = filled(black(mask_rectangle(white(width, height), None, seed=seed, area=area)[0]))
    assert (x1 - x0) * (y1 - y0) <= area * width * height + (x1 - x0 + y1 - y0) / 2 + 1


def test_rectangle_in_a_long_image_is_cut_to_its_height():
    cut = 0
    for seed in range(50):
        x0, y0, x1, y1 = filled(black(mask_rectangle(white(500, 100), None, seed=seed)[0]))
        # An area of 500 * 100 / 3 with an aspect up to 2 is between 91 and 183 wide; where it would be above 100 high
        # (aspect below 5/3) the height is the image's.
        assert 91 <= x1 - x0 <= 183
        cut += (y0, y1) == (0, 100)
    assert 30 < cut < 50


def test_rectangle_of_one_pixel_hides_it():
    assert black(mask_rectangle(white(1, 1), None)[0]).all()


def test_rectangle_is_the_same_relative_box_at_any_scale():
    small, large = (filled(black(mask_rectangle(white(n, n), None)[0])) for n in (100, 400))
    assert np.abs(np.array(small) * 4 - large).max() <= 4


def test_rectangle_color_and_area():
    masked = np.asarray(mask_rectangle(white(100, 100), None, area=0.1, color=(1, 2, 3))[0])
    where = (masked == (1, 2, 3)).all(-1)
    filled(where)
    assert where.mean() == pytest.approx(0.1, abs=0.005)
    assert (masked[~where] == 255).all()


# mask_blur, mask_blurred_rectangles


def test_blur_is_a_gaussian_of_its_radius():
    edge = np.zeros((120, 200, 3), np.uint8)
    edge[:, 100:] = 255
    blurred = np.asarray(mask_blur(Image.fromarray(edge), None, radius=15.0)[0])[60, :, 0]
    # A step edge becomes the normal distribution function: 0.8413 one radius from the edge, 0.9772 two radii from it.
    assert [blurred[115] / 255, blurred[130] / 255] == pytest.approx([0.8413, 0.9772], abs=0.02)
    assert np.abs(np.asarray(mask_blur(white(30, 20), None)[0]).astype(int) - 255).max() <= 1


def test_blurred_rectangles_change_only_their_pixels():
    image = picture(120, 90)
    sharp, blurred = np.asarray(image), np.asarray(mask_blur(image, None)[0])
    masked = np.asarray(mask_blurred_rectangles(image, None, count=1)[0])
    changed = (masked != sharp).any(-1)
    ys, xs = np.where(changed)
    inside = np.s_[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1]
    assert (masked[inside] == blurred[inside]).all()  # one rectangle, and in it exactly what mask_blur shows
    assert changed[inside].size == pytest.approx(120 * 90 / 9, abs=40)


def test_blurred_rectangles_are_three():
    image = picture(300, 300)
    sharp, blurred = np.asarray(image), np.asarray(mask_blur(image, None)[0])
    shares = []
    for seed in range(30):
        masked = np.asarray(mask_blurred_rectangles(image, None, seed=seed)[0])
        changed = (masked != sharp).any(-1)
        assert (masked[changed] == blurred[changed]).all()
        shares.append(changed.mean())
    assert max(shares) <= 1 / 3 + 0.01  # 3 of a ninth each
    assert max(shares) > 1 / 4 and min(shares) > 1 / 9  # apart in some image, never all three in one place


# mask_patches


def test_patches_are_whole_cells_of_a_grid():
    cells = black(mask_patches(picture(140, 126), None)[0]).reshape(9, 14, 10, 14).transpose(0, 2, 1, 3)
    share = cells.reshape(90, 196).mean(-1)
    assert set(share) == {0.0, 1.0}
    assert 0.3 <= share.mean() <= 0.6


def test_share_of_patches_is_uniform_between_its_bounds():
    shares = [black(mask_patches(white(280, 280), None, seed=seed)[0]).mean() for seed in range(200)]
    assert 0.3 <= min(shares) < 0.32 and 0.58 < max(shares) <= 0.6
    assert np.mean(shares) == pytest.approx(0.45, abs=4 * 0.3 / 12**0.5 / 200**0.5)


def test_patches_at_the_border_are_cut_off():
    masked = black(mask_patches(white(20, 15), None, low=1.0, high=1.0)[0])
    assert masked.all()
    masked = black(mask_patches(white(20, 15), None, low=0.25, high=0.25)[0])  # one cell of 2 x 2
    x0, y0, x1, y1 = filled(masked)
    assert (x0, x1) in ((0, 14), (14, 20)) and (y0, y1) in ((0, 14), (14, 15))


def test_patches_may_hide_nothing():
    assert not black(mask_patches(picture(), None, low=0.0, high=0.0)[0]).any()


# mask_box


def test_box_is_filled_and_nothing_else():
    masked, _ = mask_box(picture(), BOX)
    assert filled(black(masked)) == (20, 10, 31, 19)
    untouched = ~black(masked)
    assert (np.asarray(masked)[untouched] == np.asarray(picture())[untouched]).all()


def test_box_of_fractions_covers_every_pixel_that_it_touches():
    assert filled(black(mask_box(picture(), (20.7, 10.9, 30.1, 18.0000001))[0])) == (20, 10, 31, 18)


def test_box_is_the_moved_one_on_a_crop():
    view = View([{"kind": "crop", "zoom": 2.0, "padding": 0.5}, "mask_box"])
    masked = view(white(64, 48), (20, 10, 30, 20))
    # The crop is 15...35 x 5...25, enlarged twice: the box is in its middle half.
    assert masked.size == (40, 40)
    assert filled(black(masked)) == (10, 10, 30, 30)


def test_box_filled_with_the_mean_of_the_frame_around_it():
    masked, _ = mask_box(ramp(), BOX, fill="mean_around", width=4)
    changed = (np.asarray(masked)[10:19, 20:31] == (25, 14, 5)).all(-1)  # the middle of a symmetric frame on a ramp
    assert changed.all()
    outside = np.ones((48, 64), bool)
    outside[10:19, 20:31] = False
    assert (np.asarray(masked)[outside] == np.asarray(ramp())[outside]).all()


def test_frame_ends_at_the_border_and_has_nothing_of_the_box():
    pixels = np.full((20, 20, 3), 200, np.uint8)
    pixels[:8, :10] = 0  # the box
    pixels[:8, 10:12], pixels[8:10, :12] = 100, 40  # 16 pixels right of it, 24 below it
    masked, _ = mask_box(Image.fromarray(pixels), (0, 0, 10, 8), fill="mean_around", width=2)
    assert np.asarray(masked)[0, 0].tolist() == [64, 64, 64]  # (16 * 100 + 24 * 40) / 40


def test_nothing_is_around_a_box_that_is_the_whole_image():
    assert black(mask_box(picture(), (0, 0, 64, 48))[0]).all()
    with pytest.raises(ViewError, match="covers the whole image of 64 x 48 pixels.*use fill=black"):
        mask_box(picture(), (0, 0, 64, 48), fill="mean_around")


def test_box_must_be_there():
    assert View("mask_box").needs_box
    with pytest.raises(ViewError, match="no evidence box"):
        mask_box(picture(), None)


# blank, noise


def test_blank_is_one_color():
    assert blank(picture(), None)[0].getcolors() == [(64 * 48, (127, 127, 127))]
    assert blank(picture(), None, color=(1, 2, 3))[0].getcolors() == [(64 * 48, (1, 2, 3))]


def test_noise_is_uniform_and_differs_between_images():
    values = np.asarray(noise(white(200, 200), None)[0]).astype(float)
    assert values.mean() == pytest.approx(127.5, abs=4 * 73.9 / 120_000**0.5)
    assert values.std() == pytest.approx(73.9, abs=0.5)  # of the integers 0...255
    channels = np.corrcoef(values.reshape(-1, 3).T)
    assert np.abs(channels - np.eye(3)).max() < 0.03
    assert noise(picture(seed=1), None)[0].tobytes() != noise(picture(seed=2), None)[0].tobytes()
    assert noise(picture(), None, seed=1)[0].tobytes() != noise(picture(), None, seed=2)[0].tobytes()


# Options


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kind": "mask_rectangle", "area": 0.0}, "opd.views.teacher: area must be above 0 and at most 1, got 0.0"),
        ({"kind": "mask_rectangle", "area": 1.1}, "area must be above 0 and at most 1"),
        ({"kind": "mask_rectangle", "rng": "always"}, "rng: unknown value 'always'; known: fixed, per_sample"),
        ({"kind": "mask_rectangle", "radius": 3}, "'mask_rectangle' has no option 'radius'; its options: area, rng"),
        ({"kind": "mask_rectangle", "color": [0, 0, -1]}, "color must be red, green, blue from 0 to 255"),
        ({"kind": "mask_rectangle", "color": [0, 0]}, "opd.views.teacher.color: expected"),
        ({"kind": "mask_blur", "radius": 0}, "radius must be above 0"),
        ({"kind": "mask_blur", "rng": "fixed"}, "'mask_blur' has no option 'rng'"),
        ({"kind": "mask_blurred_rectangles", "count": 0}, "count must be above 0"),
        ({"kind": "mask_blurred_rectangles", "area": 2.0}, "area must be above 0 and at most 1"),
        ({"kind": "mask_blurred_rectangles", "radius": -1.0}, "radius must be above 0"),
        ({"kind": "mask_patches", "patch": 0}, "patch must be above 0"),
        ({"kind": "mask_patches", "high": 1.5}, "high must be between 0 and 1"),
        ({"kind": "mask_patches", "low": 0.7}, "low must not be above high, got low=0.7 and high=0.6"),
        ({"kind": "mask_box", "fill": "red"}, "fill: unknown value 'red'; known: black, mean_around"),
        ({"kind": "mask_box", "width": 0}, "width must be above 0"),
        ({"kind": "blank", "color": [0, 0, 256]}, "color must be red, green, blue from 0 to 255"),
        ({"kind": "noise", "seed": "one"}, "opd.views.teacher.seed: expected int"),
    ],
)
def test_refuses_when_the_view_is_loaded(spec, words):
    with pytest.raises(RecipeError, match=words):
        View(spec, "opd.views.teacher")


def test_refuses_a_mean_around_a_box_that_fills_its_crop():
    with pytest.raises(RecipeError, match="or a crop with padding"):
        View(["crop", {"kind": "mask_box", "fill": "mean_around"}])
