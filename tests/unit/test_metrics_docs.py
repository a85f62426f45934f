"""Every metric of this package is in docs/metrics.md or on its recipe's page: people look them up by name."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: How a metric's name stands in the code; what varies in it ends the name.
NAME = re.compile(r"""f?"((?:opd|selection)/[a-z_]+)""")
#: Columns and prefixes that no tracker sees, and what stands for a family in the docs.
INTERNAL = {"opd/moments"}
FAMILIES = {"opd/margin_p": "opd/margin_p5", "selection/utility_": "selection/utility_predicted_rows"}


def names():
    found = {name for file in ROOT.glob("opd_recipes/*.py") for name in NAME.findall(file.read_text())}
    # Not the overrides of a command line: opd/teacher=frozen.
    groups = {f"opd/{folder.name}" for folder in (ROOT / "opd_recipes" / "config" / "opd").iterdir()}
    return {FAMILIES.get(name, name) for name in found} - INTERNAL - groups


def test_every_metric_is_explained():
    told = "".join((ROOT / "docs" / name).read_text() for name in ("metrics.md", "bas_opd.md"))
    assert len(names()) > 20
    assert [name for name in sorted(names()) if f"`{name}`" not in told] == []
