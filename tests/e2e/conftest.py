"""What the toy runs of a module share."""

import pytest

from data_prep.__main__ import main as data_prep


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def data(folder):
    data_prep(["toy", "--out", str(folder / "data"), "--train", "96", "--val", "24"])
    return folder / "data"
