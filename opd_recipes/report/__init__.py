"""``opd_recipes report RUN_DIR``: one HTML file that shows a run, finished or still going on.

A run is read (:mod:`~opd_recipes.report.reading`, :mod:`~opd_recipes.report.traces`), judged
(:mod:`~opd_recipes.report.checks`), compared with its paper's recipe (:mod:`~opd_recipes.report.settings`), drawn
(:mod:`~opd_recipes.report.curves`, :mod:`~opd_recipes.report.chart`) and put on a page
(:mod:`~opd_recipes.report.page`). The page needs no network and loads nothing.
"""

from opd_recipes.report.command import add_arguments, run

__all__ = ["add_arguments", "run"]
