"""The page's colours by role, in light and in dark.

Text roles have a contrast of at least 4.5 to every ground they stand on (WCAG 2.2, 1.4.3); so have the lines of the charts,
for which 3 would be enough (1.4.11). Series differ in dash and order, heat in the thickness of its underline, too.
"""

from __future__ import annotations

LIGHT = {
    "paper": "#ffffff",
    "panel": "#f3f5f8",
    "ink": "#16191d",
    "soft": "#4c535c",
    "line": "#6b737d",
    "grid": "#dfe3e8",
    "link": "#0b4f9c",
    "problem": "#9c1013",
    "problem-panel": "#fdecec",
    "notice": "#6a4100",
    "notice-panel": "#fff3d1",
    "good": "#0d5c2f",
    "good-panel": "#e6f5ea",
    "series-1": "#1f5fa8",
    "series-2": "#b34700",
    "series-3": "#00705a",
    "series-4": "#96387a",
    "series-5": "#6b5900",
    "series-6": "#5a4fb0",
    "series-7": "#4c535c",
    "heat-1": "#fff4cf",
    "heat-2": "#ffe59a",
    "heat-3": "#ffc875",
    "heat-4": "#ffab6b",
    "heat-5": "#ff9177",
    "box": "#c00000",
    "halo": "#ffffff",
}
DARK = {
    "paper": "#14171a",
    "panel": "#1e2328",
    "ink": "#eceff2",
    "soft": "#b3bac4",
    "line": "#8c949e",
    "grid": "#343b43",
    "link": "#8fc1ff",
    "problem": "#ffabab",
    "problem-panel": "#3b1b1c",
    "notice": "#ffd479",
    "notice-panel": "#362a10",
    "good": "#8fdcaa",
    "good-panel": "#16301f",
    "series-1": "#7db7ff",
    "series-2": "#ffa25e",
    "series-3": "#4fd1b0",
    "series-4": "#ee9ad2",
    "series-5": "#dcc74a",
    "series-6": "#b9adff",
    "series-7": "#b3bac4",
    "heat-1": "#322a12",
    "heat-2": "#4a3a0c",
    "heat-3": "#613c06",
    "heat-4": "#763610",
    "heat-5": "#8a2a1e",
    "box": "#c00000",
    "halo": "#ffffff",
}
SERIES = 7
#: Nats of divergence at which a token's heat begins, level 1 to 5. Jensen-Shannon ends at log 2 = 0.69.
HEAT = (0.01, 0.03, 0.1, 0.2, 0.4)


def heat_level(nats: float | None) -> int:
    """0 for what is below the first bound or not known."""
    return 0 if nats is None else sum(nats >= bound for bound in HEAT)


def css() -> str:
    """The palette as custom properties."""

    def block(roles: dict[str, str]) -> str:
        return ":root{" + "".join(f"--{role}:{value};" for role, value in roles.items()) + "}"

    return f":root{{color-scheme:light dark}}\n{block(LIGHT)}\n@media screen and (prefers-color-scheme:dark){{{block(DARK)}}}\n"
