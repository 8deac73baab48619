"""Draw and print what the zero-mean projection gives to ten other algorithms.

    python tools/zero_mean_figure.py

Reads results/zero-mean-study, trains nothing, and writes gains.png and gains.svg there. Prints
final accuracies with the projection and without, differences by seed, p-values of paired t-tests
with Holm's correction, and the answer by the rule of experiments/zero-mean-study.toml.
"""

from __future__ import annotations

from statistics import mean

from fedzmg.report.figures.style import COLOURS, Chart, save, styled
from fedzmg.results.significance import holm, paired_t
from partitions_figure import RESULTS, gains, runs_of, shown

NAME, WITH = "zero-mean-study", "-zero-mean"
POINT = 1.0  # smallest mean difference, in points, that helps or harms


def answer(points: list[float]) -> str:
    """Apply the rule of the study's file."""
    if min(points) > 0 and mean(points) >= POINT:
        return "helps"
    return "harms" if max(points) < 0 and mean(points) <= -POINT else "no clear difference"


@styled
def draw(runs: dict[str, list[float]], names: list[str]) -> Chart:
    """Draw one row per algorithm: seeds as dots, means joined by a line."""
    helped = sum(answer(gains(runs, (name + WITH, name))) == "helps" for name in names)
    title = f"The projection helps {helped} of {len(names)} other algorithms"
    chart = Chart(title, size=(6.4, 4.2))
    axes = chart.panel("final accuracy, %", "", "")
    for place, name in enumerate(names):
        both = runs[name], runs[name + WITH]
        axes.plot([mean(own) for own in both], [place] * 2, color="0.7", zorder=1)
        for own, colour in zip(both, COLOURS, strict=False):
            axes.plot(own, [place] * len(own), ".", color=colour, markersize=7, alpha=0.8)
    axes.set_yticks(range(len(names)), names)
    handles = [axes.plot([], [], ".", color=colour, markersize=7)[0] for colour in COLOURS[:2]]
    chart.name_series(handles, ["without the projection", "with it"], below=True)
    return chart


def main() -> None:
    """Draw, write and print."""
    runs = runs_of(NAME)
    names = [name for name in runs if not name.endswith(WITH)]
    points = {name: gains(runs, (name + WITH, name)) for name in names}
    names.sort(key=lambda name: mean(runs[name + WITH]))
    for path in save(draw(runs, names), RESULTS / NAME / "gains"):
        print(path.relative_to(RESULTS.parent))
    tests = [paired_t(points[name], [0.0] * len(points[name])).p for name in names]
    for name, p in reversed(list(zip(names, holm(tests), strict=True))):
        ends = f"{mean(runs[name]):.2f}, with the projection {mean(runs[name + WITH]):.2f}"
        print(f"{name}: {ends}; {shown(points[name])}; Holm p {p:.3g}; {answer(points[name])}")


if __name__ == "__main__":
    main()
