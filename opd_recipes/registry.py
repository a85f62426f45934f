"""A table of named functions whose keyword options are checked against their signatures.

A recipe names one entry per part (``kind``) and may set that entry's keyword-only parameters. The signature is the
single source of the option names, of their types and of their defaults, so adding a method is adding a function::

    DIVERGENCES = Registry("opd.divergence")

    @DIVERGENCES.register("jsd")
    def jsd(log_p, log_q, *, alpha: float = 0.5): ...

    DIVERGENCES.build({"kind": "jsd", "alpha": 0.3})   # -> partial(jsd, alpha=0.3)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args, get_type_hints


class RecipeError(ValueError):
    """A recipe that cannot be run. The message names the setting, what is wrong with it and what to do."""


class Registry:
    """Named functions for one part of a recipe.

    Args:
        setting: The configuration key that selects from this table; error messages quote it.
    """

    def __init__(self, setting: str):
        self.setting = setting
        self._entries: dict[str, Callable] = {}

    def register(self, name: str) -> Callable[[Callable], Callable]:
        def add(entry: Callable) -> Callable:
            if name in self._entries:
                raise ValueError(f"{self.setting}: '{name}' is already registered")
            self._entries[name] = entry
            return entry

        return add

    def names(self) -> list[str]:
        return sorted(self._entries)

    def get(self, name: Any, where: str | None = None) -> Callable:
        """Return the entry called ``name``; raise :class:`RecipeError` that lists the known names."""
        if name not in self._entries:
            raise RecipeError(f"{where or self.setting}: unknown value {name!r}; known: {', '.join(self.names())}")
        return self._entries[name]

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        """The keyword-only parameters of an entry, which are its options in YAML."""
        parameters = inspect.signature(self.get(name)).parameters.values()
        return {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def build(self, spec: Mapping[str, Any] | str, where: str | None = None) -> partial:
        """Bind the options of ``spec`` (``{"kind": name, option: value, ...}`` or just a name).

        Raises:
            RecipeError: Unknown name, unknown option, missing option, or an option of the wrong type.
        """
        where = where or self.setting
        spec = {"kind": spec} if isinstance(spec, str) else dict(spec)
        if "kind" not in spec:
            raise RecipeError(f"{where}: 'kind' is missing; known: {', '.join(self.names())}")
        kind = spec.pop("kind")
        entry = self.get(kind, where)
        known = self.options(kind)
        hints = _hints(entry)
        for key in spec:
            if key not in known:
                listed = ", ".join(known) or "none"
                raise RecipeError(f"{where}: '{kind}' has no option {key!r}; its options: {listed}")
        check_types(where, spec, hints)
        missing = [p.name for p in known.values() if p.default is inspect.Parameter.empty and p.name not in spec]
        if missing:
            raise RecipeError(f"{where}: '{kind}' needs {', '.join(missing)}")
        return partial(entry, **spec)


def _hints(entry: Callable) -> dict[str, Any]:
    """Types of an entry's options; a class's are its constructor's, whatever attributes it declares."""
    return get_type_hints(entry.__init__ if inspect.isclass(entry) else entry)  # type: ignore[misc]


def check_types(where: str, values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise :class:`RecipeError` for the first of ``values`` that is not of its type in ``hints``."""
    for key, value in values.items():
        if key in hints and not _fits(value, hints[key]):
            raise RecipeError(f"{where}.{key}: expected {_readable(hints[key])}, got {value!r}")


def _fits(value: Any, hint: Any) -> bool:
    if get_args(hint):
        origin = getattr(hint, "__origin__", None)
        if origin is tuple:
            inner = get_args(hint)
            return isinstance(value, list | tuple) and len(value) == len(inner) and all(map(_fits, value, inner))
        return any(_fits(value, option) for option in get_args(hint))
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return hint is Any or (isinstance(hint, type) and isinstance(value, hint))


def _readable(hint: Any) -> str:
    return getattr(hint, "__name__", None) or str(hint)
