import numpy as np
import pytest
from PIL import Image

from opd_recipes.registry import RecipeError
from opd_recipes.views import View, ViewError, check_box, crop, original, redbox, resize


def gradient(width=64, height=48):
    """Every pixel tells its own place: red = x, green = y."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(width)[None], np.arange(height)[:, None]
    return Image.fromarray(pixels)


def test_original_is_the_image_itself():
    image = gradient()
    assert original(image, None) == (image, None)


def test_redbox_frames_the_box_and_covers_none_of_it():
    image = gradient()
    marked, box = redbox(image, (20, 10, 30, 18), width=2, expand=0.0)
    before, after = np.asarray(image), np.asarray(marked)
    inside = np.s_[10:18, 20:30]
    assert (after[inside] == before[inside]).all()
    red = (after == (255, 0, 0)).all(-1)
    ys, xs = np.where(red)
    assert (xs.min(), xs.max(), ys.min(), ys.max()) == (18, 31, 8, 19)
    assert red.sum() == 14 * 12 - 10 * 8
    assert box == (20, 10, 30, 18)
    assert (np.asarray(image) == before).all()


def test_redbox_expands_and_may_touch_the_border():
    marked, _ = redbox(gradient(), (0, 0, 64, 48), width=3, expand=0.05)
    assert marked.size == (64, 48)
    marked, _ = redbox(gradient(), (20, 10, 40, 30), width=1, expand=0.1)
    red = (np.asarray(marked) == (255, 0, 0)).all(-1)
    ys, xs = np.where(red)
    assert (xs.min(), xs.max(), ys.min(), ys.max()) == (18, 41, 8, 31)


def test_crop_cuts_and_enlarges():
    view, box = crop(gradient(), (20, 10, 30, 18), zoom=2.0)
    assert view.size == (20, 16)
    assert box == (0, 0, 20, 16)
    assert abs(int(np.asarray(view)[8, 10, 0]) - 25) <= 1 and abs(int(np.asarray(view)[8, 10, 1]) - 14) <= 1


def test_crop_padding_and_minimum_size_shift_inside_the_image():
    view, box = crop(gradient(), (0, 0, 8, 8), zoom=1.0, padding=0.5)
    assert view.size == (16, 16) and box == (0, 0, 8, 8)
    view, box = crop(gradient(), (58, 40, 62, 44), zoom=1.0, min_size=20)
    assert view.size == (20, 20) and box == (14, 12, 18, 16)
    assert tuple(np.asarray(view)[0, 0][:2]) == (44, 28)


def test_crop_larger_than_the_image_is_the_image():
    view, _ = crop(gradient(), (10, 10, 40, 40), zoom=1.0, padding=5.0)
    assert view.size == (64, 48)


def test_crop_of_a_fraction_of_a_pixel():
    view, _ = crop(gradient(), (10.2, 10.2, 10.4, 10.4), zoom=2.0)
    assert view.size == (4, 4)  # the two source pixels that a one-pixel window around it touches


def test_resize_scales_image_and_box():
    half, box = resize(gradient(), (20, 10, 30, 18), scale=0.5)
    assert half.size == (32, 24) and box == (10, 5, 15, 9)
    assert abs(int(np.asarray(half)[12, 16, 0]) - 32) <= 1
    tiny, box = resize(gradient(1, 1), None, scale=0.5)
    assert tiny.size == (1, 1) and box is None


def test_resize_can_restore_the_size_but_not_the_detail():
    pixels = np.zeros((48, 64, 3), np.uint8)
    pixels[:, ::2] = 255  # stripes of one pixel
    image = Image.fromarray(pixels)
    restored, box = resize(image, (20, 10, 30, 18), scale=0.5, restore=True)
    assert restored.size == (64, 48) and box == (20, 10, 30, 18)
    middle = np.asarray(restored)[8:40, 8:56].astype(int)
    assert abs(middle - 127.5).max() < 32  # grey, where half a stripe is left of it
    ramp = Image.fromarray(np.repeat(np.arange(0, 256, 4, dtype=np.uint8)[None, :, None].repeat(48, 0), 3, 2))
    steps = np.diff(np.asarray(resize(ramp, None, scale=0.5, restore=True)[0])[24, 8:56, 0].astype(int))
    assert abs(steps - 4).max() <= 2  # a ramp is a ramp again, not stairs of 0 and 8
    assert resize(Image.new("RGB", (1, 1)), None, scale=0.25, restore=True)[0].size == (1, 1)


@pytest.mark.parametrize("step", [{"kind": "crop", "zoom": 29 / 7}, {"kind": "resize", "scale": 29 / 7}])
def test_a_box_up_to_the_edge_is_still_inside_after_a_step(step):
    # 7 * (29 / 7) is above 29 in floating point.
    assert View([step, "redbox"])(Image.new("RGB", (7, 7)), (0, 0, 7, 7)).size == (29, 29)


def test_a_box_a_hair_before_a_pixel_is_inside_its_crop():
    assert crop(gradient(), (9.9999995, 10, 20, 20), zoom=1.0)[1] == (0, 0, 10, 10)


@pytest.mark.parametrize(
    ("box", "words"),
    [
        (None, "no evidence box"),
        ([1, 2, 3], "four numbers"),
        ([5, 5, 5, 9], "empty"),
        ([9, 5, 5, 9], "is it x, y, width, height"),
        ([0, 0, 65, 10], "outside the image of 64 x 48"),
        ([-1, 0, 5, 10], "outside"),
        ([0, 0, float("nan"), 10], "not finite"),
        ([0, 0, float("inf"), 10], "not finite"),
    ],
)
def test_bad_boxes(box, words):
    with pytest.raises(ViewError, match=words):
        check_box(box, (64, 48))


def test_views_compose():
    view = View([{"kind": "redbox", "width": 2, "expand": 0.0}, {"kind": "crop", "zoom": 2.0, "padding": 0.5}])
    out = view(gradient(), (20, 10, 30, 20))
    assert out.size == (40, 40)
    assert tuple(np.asarray(out)[7, 20]) == (255, 0, 0)  # the frame, two pixels left and above, enlarged twice
    assert view.needs_box and not View("original").needs_box


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            "blur",
            "opd.views.student: unknown value 'blur'; known: provided, blank, crop, mask_blur, .*, original, redbox, resize",
        ),
        ([], "name at least one step"),
        ({"kind": "crop", "zom": 2}, "no option 'zom'"),
        ({"kind": "crop", "zoom": 0}, "opd.views.student: zoom must be above 0, got 0"),
        ({"kind": "crop", "zoom": -2.0}, "zoom must be above 0"),
        ({"kind": "crop", "padding": -0.6}, "padding must not be negative"),
        ({"kind": "crop", "min_size": 0}, "min_size must be above 0"),
        ({"kind": "redbox", "width": 0}, "width must be above 0"),
        ({"kind": "redbox", "expand": -3}, "expand must not be negative"),
        ({"kind": "resize", "scale": 0}, "scale must be above 0"),
        ({"kind": "crop", "zoom": "big"}, "opd.views.student.zoom: expected float"),
        ({"kind": "redbox", "color": [256, 0, 0]}, r"color must be red, green, blue from 0 to 255, got \[256, 0, 0\]"),
        ({"kind": "resize", "scale": 0.5, "restore": 1}, "opd.views.student.restore: expected bool"),
        (["crop", "provided"], "make it the first step"),
        (["provided", "provided"], "make it the first step"),
        (["provided", "crop"], "crop behind 'provided': no evidence box is known"),
        (["provided", "mask_box"], "mask_box behind 'provided': no evidence box is known"),
    ],
)
def test_refuses(spec, words):
    with pytest.raises(RecipeError, match=words):
        View(spec, "opd.views.student")
