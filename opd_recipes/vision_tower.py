"""The vision tower once per distinct image: rollouts of one prompt show the same picture, and a tower would run for each.

Two hooks on the tower. Before it runs, images that are equal number for number are taken out; after it, their features
are given to every place that shows them. What the rest of the model sees is the same, and the gradients of all places add
up in the tower's one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

#: Towers that compute every image by itself, from the patches of all images (patches, numbers) and their ``grid_thw``
#: (images, 3). All others run as they are.
TOWERS = (
    "Qwen2VisionTransformerPretrainedModel",
    "Qwen2_5_VisionTransformerPretrainedModel",
    "Qwen3VLVisionModel",
    "Qwen3VLMoeVisionModel",
    "Qwen3_5VisionModel",
    "Qwen3_5MoeVisionModel",
)

#: Numbers of an image that are looked at before all of them are compared.
SAMPLES = 32


class DistinctImages:
    """Lets a tower see every distinct image of a call once.

    Args:
        tower: One of :data:`TOWERS`; the hooks stay on it.
    """

    def __init__(self, tower: nn.Module):
        self.merge = int(tower.spatial_merge_size) ** 2  # type: ignore[arg-type]
        self._sizes: list[int] = []
        self._places: list[int] | None = None
        tower.register_forward_pre_hook(self._before, with_kwargs=True)
        tower.register_forward_hook(self._after)

    @classmethod
    def install(cls, model: nn.Module) -> DistinctImages | None:
        """Put the hooks on the model's tower; None where it has none of :data:`TOWERS`."""
        tower = next((module for module in model.modules() if type(module).__name__ in TOWERS), None)
        return None if tower is None else cls(tower)

    def _before(self, tower: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        self._places = None
        grid = kwargs.get("grid_thw")
        others = [key for key, value in kwargs.items() if isinstance(value, torch.Tensor) and key != "grid_thw"]
        # Other tensors would describe the images as they were; with dropout every place has to draw its own.
        if grid is None or len(grid) < 2 or len(args) != 1 or others or draws(tower):
            return None
        sizes = grid.prod(-1).tolist()
        images = args[0].split(sizes)
        first, places = distinct(images, grid.tolist())
        if len(first) == len(images):
            return None
        self._sizes, self._places = [sizes[i] for i in first], places
        return (torch.cat([images[i] for i in first]),), {**kwargs, "grid_thw": grid[first]}

    def _after(self, tower: nn.Module, args: tuple, output: Any) -> Any:
        return output if self._places is None else self._spread(output)

    def _spread(self, value: Any) -> Any:
        """Features of all images from those of the distinct ones, in whatever the tower returns them."""
        if isinstance(value, torch.Tensor):
            return self._spread_tensor(value)
        if isinstance(value, dict):  # a ModelOutput, too
            for key in list(value):
                value[key] = self._spread(value[key])
            return value
        if isinstance(value, list | tuple):
            return type(value)(self._spread(part) for part in value)
        return value

    def _spread_tensor(self, features: torch.Tensor) -> torch.Tensor:
        assert self._places is not None
        for patches in (1, self.merge):
            if len(features) * patches == sum(self._sizes):
                # Pieces, not indices: the gradients of an image's places then add up in one order on every device.
                pieces = features.split([size // patches for size in self._sizes])
                return torch.cat([pieces[place] for place in self._places])
        raise RuntimeError(
            f"a tower returned {tuple(features.shape)} for images of {self._sizes} patches, {self.merge} of which make a "
            "token: opd_recipes.vision_tower.TOWERS names towers that return one row for each patch or token"
        )


def draws(tower: nn.Module) -> bool:
    """Whether a tower uses random numbers now."""
    return tower.training and any(isinstance(module, nn.Dropout) and module.p > 0 for module in tower.modules())


def distinct(images: Sequence[torch.Tensor], grids: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Which images differ.

    Args:
        images: (patches, numbers) of each.
        grids: Their frames, rows and columns of patches.

    Returns:
        The indices of the first image of each kind, and for every image the place of its kind among them.
    """
    seen: dict[tuple, list[int]] = {}
    first: list[int] = []
    places: list[int] = []
    for i, (grid, numbers) in enumerate(zip(grids, _samples(images), strict=True)):
        alike = seen.setdefault((*grid, *numbers), [])
        place = next((place for place in alike if torch.equal(images[first[place]], images[i])), None)
        if place is None:
            place = len(first)
            alike.append(place)
            first.append(i)
        places.append(place)
    return first, places


def _samples(images: Sequence[torch.Tensor]) -> list[list[float]]:
    """Some numbers of each image; read together, because each reading would wait for the device."""
    return torch.stack([_sampled(image) for image in images]).tolist()


def _sampled(image: torch.Tensor) -> torch.Tensor:
    numbers = image.detach().flatten()
    index = torch.linspace(0, len(numbers) - 1, SAMPLES, dtype=torch.float64, device=image.device).long()
    return numbers[index]


def picture_key(inputs: Any) -> tuple | None:
    """Something that rows with the same images have in common, and others hardly ever; None for a row without images.

    Args:
        inputs: A row's ``multi_modal_inputs``; None or empty for text alone.
    """
    inputs = getattr(inputs, "data", inputs)
    tensors = sorted((name, value) for name, value in (inputs or {}).items() if name.startswith("pixel_values"))
    found = tuple((tuple(value.shape), tuple(_sampled(value).tolist())) for _, value in tensors)
    return found or None
