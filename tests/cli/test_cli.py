"""Commands as a user types them: results, bad input, interruptions."""

from __future__ import annotations

import errno
import html
import io
import itertools
import json
import re
import shutil
import signal
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedzmg import trackers
from fedzmg.cli import main
from fedzmg.cli.common import UNFINISHED
from fedzmg.experiment.run_directory import RunDirectory, change_manifest
from fedzmg.simulation import RoundReport
from fedzmg.storage.files import log_marks
from fedzmg.terminal.live import Display
from fedzmg.trackers import Ending, TrackedRun

FILES = Path(__file__).parents[2] / "experiments"
GRID, STUDY = str(FILES / "digits-grid.toml"), str(FILES / "digits-study.toml")
QUICK = ["--rounds", "2", "--engine", "vectorized", "--set", "protocol.epochs=1",
         "--set", "protocol.cohort=2"]  # fmt: skip
SMALL = """kind = "study"
task = "logistic"
algorithms = ["fedzmg"]
rates = "given"
engine = "vectorized"
seeds = [0]
rounds = 2
eval_every = 1
"""
DIGITS, LONG = "1" * 5000, "a" * 300
ODD = {"fedzmg": r"$\bm{w}$ & <b>", "fedavg": r"$\frac{", "scaffold": "\u03b1_^%#\\\u6f22"}
SHORT = ["--set", "rounds=1", "--set", 'algorithms=["fedzmg"]']


def test_bare_command_shows_first_steps(fedzmg: Any) -> None:
    done = fedzmg()
    assert (done.code, done.err) == (0, "")
    for words in ("fedzmg compare", "fedzmg list", "fedzmg --help"):
        assert words in done.out


def test_words_of_other_tools_suggest_a_command_that_exists(fedzmg: Any) -> None:
    for word in ("train", "simulate", "search", "plot"):
        done = fedzmg(word, "digits")
        [suggested] = re.findall(r"'(\w+)'\?$", done.err.strip())
        assert done.code == 2
        assert fedzmg(suggested, "--help").code == 0


def test_compare_shows_table_figure_and_directory(tmp_path: Path, fedzmg: Any) -> None:
    done = fedzmg("compare", "--seeds", "2", *QUICK)
    assert done.code == 0, done.err
    for text in ("fedzmg", "fedavg:momentum", "fedadam", "final accuracy", "80 %", "d_z", "MiB"):
        assert text in done.out
    [made] = (tmp_path / "runs").iterdir()
    assert (made / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (made / "curves.svg").read_text()
    data = json.loads((made / "study.json").read_text())
    assert list(data["algorithms"]) == ["fedzmg", "fedavg", "fedavg:momentum", "fedadam"]
    plan = (made / "study.toml").read_bytes()
    again = fedzmg("compare", "--seeds", "2", *QUICK, "--json")
    assert json.loads(again.out)["algorithms"] == data["algorithms"]
    assert "complete already" in again.err
    fewer = fedzmg("compare", "--algorithms", "fedavg", "--out", str(made))
    assert fewer.code == 2
    assert "also has fedzmg, fedavg:momentum, fedadam" in fewer.err
    assert json.loads((made / "study.json").read_text()) == data
    assert (made / "study.toml").read_bytes() == plan


def test_run_writes_a_run_directory_and_exports(tmp_path: Path, fedzmg: Any) -> None:
    done = fedzmg("run", "logistic", "--set", "client.lr=0.05", *QUICK, "--json")
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    spec = Path(summary["directory"]) / "spec.toml"
    assert "lr = 0.05" in spec.read_text()
    assert "cohort = 2" in spec.read_text()
    assert fedzmg("export", summary["directory"]).out.strip().endswith("model.safetensors")
    fedzmg("export", summary["directory"], "--to", "new/folder/m.safetensors")
    assert (tmp_path / "new/folder/m.safetensors").is_file()
    from_file = fedzmg("run", str(spec), "--json", "--out", "copy")
    assert json.loads(from_file.out)["loss"] == summary["loss"]


def test_lists_and_cards(fedzmg: Any) -> None:
    shown = fedzmg("list").out
    listed = json.loads(fedzmg("list", "--json").out)
    options = {o["key"]: o["default"] for o in listed["algorithms"]["fedzmg"]["options"]}
    assert options["client.momentum"] == 0.9
    for name in [*listed["algorithms"], *listed["tasks"]]:
        assert name in shown
    assert fedzmg("--version").out.startswith("fedzmg 0.")
    shown = fedzmg("list", "fedadam", "--task", "digits").out
    for text in ("sqrt(1 - beta2^t)", "server.beta2", "[0, 1)", "0.99", "204.2 KiB", "408.3 KiB"):
        assert text in shown
    data = json.loads(fedzmg("list", "fedadam", "--json").out)
    assert data["costs"] == {"down": 1, "up": 1, "client_keeps": 0, "server_keeps": 2}


def test_grid_then_study_with_its_rates(tmp_path: Path, fedzmg: Any) -> None:
    done = fedzmg("grid", GRID, *SHORT, "--set", "last=1", "--set", "axes.client.lr=[0.1]",
                  "--set", "axes.server.lr=[0.5,1]")  # fmt: skip
    assert done.code == 0, done.err
    made = tmp_path / "runs" / "digits-grid"
    assert (made / "heat-maps.png").read_bytes()[:4] == b"\x89PNG"
    assert (made / "fedzmg" / "heat-map.svg").exists()
    assert "best point" in done.out
    assert "fedzmg: the best point of fedzmg lies on the border (server.lr = " in done.err
    best = json.loads((made / "grid.json").read_text())["algorithms"]["fedzmg"]["best"]
    done = fedzmg("study", STUDY, *SHORT, "--json", "--out", "s", "--set", "seeds=[0]",
                  "--set", "rates=runs/digits-grid", "--set", "thresholds=[0.3,0.45]")  # fmt: skip
    assert done.code == 0, done.err
    options = json.loads(done.out)["algorithms"]["fedzmg"]["options"]
    assert options["server.lr"] == best["options"]["server.lr"]
    assert (tmp_path / "s" / "fedzmg" / "seed-0" / "spec.toml").exists()
    figure = (tmp_path / "s" / "curves.svg").read_text()
    assert "threshold 30 %" in figure
    assert "threshold 45 %" in figure


def test_validate_estimates_costs_and_writes_nothing(tmp_path: Path, fedzmg: Any) -> None:
    done = fedzmg("validate", GRID)
    assert done.code == 0, done.err
    for word in ("trials       18", "72 in all", "local steps", "down", "disk", "about"):
        assert word in done.out
    done = fedzmg("validate", STUDY, "--set", "eval_every=9", "--set", "rates=given", *SHORT)
    assert done.code == 0, done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("grid", "code", "message"),
    [
        (None, 0, "run the grid first"),
        ({"complete": False}, 0, "run the grid first"),
        ({"complete": True, "task": "plays"}, 2, "'plays', not for 'digits'"),
    ],
)
def test_validate_checks_the_grid_of_a_study(
    grid: dict[str, Any] | None, code: int, message: str, tmp_path: Path, fedzmg: Any
) -> None:
    if grid is not None:
        (tmp_path / "first").mkdir()
        kept = Path(__file__).parents[2] / "results/cifar100-grid/grid.json"
        whole = json.loads(kept.read_text())
        content = json.dumps({**whole, "algorithms": {}, "task": "digits", **grid})
        (tmp_path / "first" / "grid.json").write_text(content)
    done = fedzmg("validate", STUDY, "--set", "rates=first", *SHORT)
    assert done.code == code
    assert message in done.err
    assert ("trials" in done.out) == (code == 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "fedadm"], "'fedadam'?"),
        (["run", "digitz"], "'digitz': did you mean 'digits'? ('fedzmg list' shows all)"),
        (["run", "xyzzy"], "unknown task 'xyzzy' ('fedzmg list' shows all)"),
        (["run", "digits", "--set", "lr=1"], "'client.lr' or 'server.lr'?"),
        (["run", "digits", "--set", "protocol.threshold=80"], "0.80 for 80 %"),
        (["run", "digits", "--algorithm", "fedavgg"], "'fedavg'?"),
        (["run", "digits", "--set", "client.lrr=1"], "'client.lr'?"),
        (["run", "digits", "--set", "client.lr=0"], "lr = 0: expected a finite number > 0"),
        (["run", "digits", "--set", "client.lr"], "KEY=VALUE"),
        (["run", "digits", "--set", "cohort=3"], "'protocol.cohort'?"),
        (["run", "digits", "--set", "protocol.cohort=161"], "160 clients"),
        (["run", "cifar100", "--set", "preset.centring=imag"], "none or image"),
        (["run", "digits", "--roundz", "3"], "No such option"),
        (["run", "digits", "--rounds", "x"], "'x' is not a valid int"),
        (["run", "digits", "--device", "tpu"], "device = 'tpu'"),
        (["run", "digits", "--algorithm", "mfl", "--set", "server.lr=1"], "has no options"),
        (["run", "no.toml"], "no.toml"),
        (["run", STUDY], "'fedzmg study"),
        (["run", "study/fedavg/seed-0"], "run study/fedavg/seed-0/spec.toml --out study/fedavg"),
        (["run", "digits", "--out", "study"], "study/"),
        (["comprae"], "No such command 'comprae'"),
        (["compare", "--algorithms", "fedzmg,fedadm"], "'fedadam'?"),
        (["compare", "--set", "fedprox.client.mu=1"], "fedprox.client.mu"),
        (["compare", "--set", "fedavg.protocol.cohort=4"], "protocol.cohort"),
        (["compare", "--seeds", "0"], "0 is not in the range"),
        (["compare", "--algorithms", "fedavg", "--out", "file/below"], "file/below"),
        (["compare", "--out", "study"], "study is not empty"),
        (["compare", "x.toml"], "'fedzmg study x.toml'"),
        (["compare", "--track", "tensorbord"], "'tensorboard'?"),
        (["export", "nothing"], "nothing holds no spec.toml"),
        (["export", "study"], "study/fedavg/seed-0"),
        (["watch", "none"], "none is not a directory"),
        (["watch", "data"], "holds no run"),
        (["diff", "data", "data"], "holds no run"),
        (["diff", "data", "data", "--only", "curve"], "'curves'?"),
        (["verify", "data"], "holds no run"),
        (["validate", STUDY, "--set", "protocol.cohort=161"], "--set protocol.cohort=161: cohort"),
        (["data", "get", "digits"], "'digits' ships with fedzmg"),
        (["data", "get", "emnist26"], "'emnist26': did you mean 'emnist62'?"),
        (["data", "get", "chars74k"], "'fedzmg data imp"),
        (["data", "get", "cifar100", "--mirror", "nowhere"], "nowhere/cifar-100-binary.tar.gz"),
        (["data", "import", "chars74k", "none.h5"], "none.h5"),
        (["data", "import", "chars74k"], "Missing argument 'FILE...'"),
        (["data", "import", "chars74k", "data"], "give chars74k_by_writer_tr"),
        (["data", "import", "mnist", "data", "--cache", "file"], "cannot write"),
        (["data", "path", "emnist62"], "'fedzmg data get emnist62', or 'fedzmg data imp"),
        (["data", "remove", "mnist"], "'mnist' is not here"),
        (["data", "lits"], "No such command 'lits'"),
        (["data", "list", "--cache"], "requires an argument"),
        (["data", "describe", "file"], "file"),
        (["data", "describe", "t.csv"], "unknown column 'client'"),
        (["data", "describe", "gone.csv"], "gone.csv"),
        (["data", "describe", "digts"], "'digts': did you mean 'digits'"),
        (["data", "describe", "digits", "--label-column", "y"], "--label-column"),
        (["data", "describe", "digits", "--clients", "3"], "--partition"),
        (["data", "describe", "t.csv", "--split", "test"], "leave out --split"),
        (["data", "show", "t.csv"], "'fedzmg data describe t.csv'"),
        (["run", "digits", "--set", f"client.lr={DIGITS}"], "lr = '111"),
        (["run", "digits", "--set", f"client.lr={DIGITS[:400]}"], "lr = 111"),
        (["run", "digits", "--rounds", DIGITS], "--rounds"),
        (["run", LONG], "File name too long"),
        (["run", f"{LONG}.toml"], "File name too long"),
        (["watch", LONG], "File name too long"),
        (["data", "describe", f"{LONG}.csv"], "File name too long"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, arguments: list[str], message: str, fedzmg: Any
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "t.csv").write_text("who,label\na,1\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "study/fedavg/seed-0").mkdir(parents=True)
    (tmp_path / "study/fedavg/seed-0/spec.toml").write_text('task = "digits"\n')
    before = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    done = fedzmg(*arguments)
    assert done.code == 2, done.err
    assert done.out == ""
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1, done.err
    assert done.err.lower().count("did you mean") <= 1
    after = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    assert [path for path in after if path.suffix != ".lock"] == before


@pytest.mark.parametrize(
    ("command", "content", "message"),
    [
        ("grid", 'kind = "study"\n', "'fedzmg study"),
        ("grid", 'task = "digits"\nalgorithms = ["fedzmg"]\nlsat = 3\n', "'last'?"),
        ("study", 'task = "digits"\nalgorithms = ["fedzgm"]\n', "'fedzmg'?"),
        ("study", 'task = "digits"\nalgorithms = ["fedzmg"]\nrates = "x"\n', "finished grid"),
        (
            "study",
            'task = "cifar100"\nalgorithms = ["fedzmg"]\nrates = "x"\nrates_by = "test"\n',
            'preset.selection = "test"',
        ),
        ("validate", 'kind = "grid"\ntask = "digits"\n', "algorithms is missing"),
        (
            "validate",
            'kind = "study"\ntask = "digits"\nalgorithms = ["fedzmg"]\nthresholds = [80]\n',
            "f.toml: thresholds = 80",
        ),
        (
            "grid",
            'task = "digits"\nalgorithms = ["fedzmg"]\n[protocol]\ncohort = 161\n',
            "f.toml: cohort = 161",
        ),
        ("run", 'task = "digits"\n[protocol]\ncohort = "a"\n', "f.toml: cohort = 'a'"),
        ("validate", 'task = "digits"\nalgorithm = "fedagv"\n', "'fedavg'?"),
        ("run", "task = 2020-01-01\n", "f.toml: task = datetime.date(2020, 1, 1)"),
        ("run", f'task = "digits"\nseed = {DIGITS}\n', "f.toml is not valid TOML"),
        ("run", '\ufefftask = "digitz"\n', "'digits'?"),  # a BOM is not a mistake
        ("validate", 'task = "digits"\r\nalgorithm = "fedagv"\r\n', "'fedavg'?"),
        ("validate", 'task = "di\0gits"\n', "f.toml is not valid TOML"),
        ("study", f"{SMALL}[preset]\nproblem_seed = {10**50}\n", f"problem_seed = {10**50}"),
        ("study", f"{SMALL}[protocol]\nbatch_size = 100001\n", "f.toml: batch_size = 100001 but"),
    ],
)
def test_mistakes_in_files_are_one_line(
    tmp_path: Path, command: str, content: str, message: str, fedzmg: Any
) -> None:
    (tmp_path / "f.toml").write_text(content, encoding="utf-8", newline="")
    done = fedzmg(command, "f.toml")
    assert done.code == 2
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["f.toml"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the output: No space left on device; "),
        (OSError(errno.EIO, "Input/output error", "f.toml"), "f.toml: Input/output error; "),
        (OSError("odd"), "the output: odd; "),
        (MemoryError("for 3 GiB"), "out of memory for 3 GiB: "),
        (RuntimeError("CPU: can't allocate memory: 9 bytes"), "out of memory CPU: "),
        (UnicodeEncodeError("ascii", "\xe9", 0, 1, "odd"), "the output: 'ascii' codec"),
    ],
)
def test_failures_of_the_system_are_one_line(
    error: Exception,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: str) -> int:
        raise error

    monkeypatch.setattr(sys, "argv", ["fedzmg", "--version"])
    monkeypatch.setattr(sys.stdout, "write", fail)
    with pytest.raises(SystemExit, match="2"):
        main()
    line = capsys.readouterr().err
    assert line.startswith(f"fedzmg: error: {message}")
    assert len(line.splitlines()) == 1


def test_control_and_foreign_characters_do_not_reach_the_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["fedzmg", "data", "path", "--cache", "\x1b[31m\u03b1"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="cp1252"))
    main()
    assert raw.getvalue().endswith(b"[31m\\u03b1\n")
    assert b"\x1b" not in raw.getvalue()


@pytest.mark.parametrize(
    "settings",
    [
        # The largest values cost as little as small ones.
        {"rounds": 500_000, "eval_every": 1, "protocol.cohort": 4, "protocol.epochs": 10**5},
        {"rounds": 500_000, "eval_every": 500_000, "window": 10**9, "client_metrics_every": 10**9},
        {"protocol.replacement": True, "protocol.cohort": 10**6, "protocol.batch_size": 10**5},
    ],
)
def test_validate_costs_nothing(settings: Mapping[str, Any], tmp_path: Path, fedzmg: Any) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    given = (("--set", f"{key}={json.dumps(value)}") for key, value in settings.items())
    tracemalloc.start()
    done = fedzmg("validate", "small.toml", "--json", *itertools.chain(*given))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["rounds"] == settings.get("rounds", 2)
    assert peak < 2**26


def test_labels_are_shown_as_they_are(tmp_path: Path, fedzmg: Any) -> None:
    """Formulas, markup and other alphabets reach every figure, table and page."""
    text = SMALL.replace('algorithms = ["fedzmg"]', "").replace("[0]", "[0, 1]")
    for name, label in ODD.items():
        text += f"[algorithms.{name}]\nlabel = {json.dumps(label)}\n"
    (tmp_path / "odd.toml").write_text(text, encoding="utf-8")
    done = fedzmg("study", "odd.toml", "--out", "s")
    assert done.code == 0
    assert fedzmg("report", "s", "--page-only").code == 0
    page = (tmp_path / "s/report/report.html").read_text(encoding="utf-8")
    drawn = (tmp_path / "s/curves.svg").read_text(encoding="utf-8")
    for label in ODD.values():
        assert label in done.out
        assert label in html.unescape(page)
        assert label in html.unescape(drawn)


def test_figure_that_fails_hides_no_result(tmp_path: Path, fedzmg: Any) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    assert fedzmg("study", "small.toml", "--out", "s").code == 0
    whole = fedzmg("study", "small.toml", "--out", "s")
    (tmp_path / "s/curves.png").unlink()
    (tmp_path / "s/curves.png").mkdir()
    done = fedzmg("study", "small.toml", "--out", "s")
    assert done.code == 2
    assert whole.out.startswith(done.out)
    assert "study   s" in done.out
    assert "curves.png" in done.err
    assert "'fedzmg report s'" in done.err
    assert len(done.err.splitlines()) == len(whole.err.splitlines()) + 1
    (tmp_path / "s/curves.png").rmdir()
    assert fedzmg("study", "small.toml", "--out", "s") == whole


def test_a_study_grows_in_its_directory(tmp_path: Path, fedzmg: Any) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    assert fedzmg("study", "small.toml", "--out", "s").code == 0
    first = (tmp_path / "s/fedzmg/seed-0/metrics.jsonl").read_bytes()
    more = ("--set", "seeds=[0, 1]", "--set", 'algorithms=["fedzmg", "fedavg"]')
    assert fedzmg("study", "small.toml", "--out", "s", *more).code == 0
    assert (tmp_path / "s/fedzmg/seed-0/metrics.jsonl").read_bytes() == first
    assert (tmp_path / "s/fedavg/seed-1/metrics.jsonl").is_file()
    assert fedzmg("study", "small.toml", "--out", "s", "--set", "rounds=3").code == 2


def test_half_written_directory_is_refused_and_left_alone(tmp_path: Path, fedzmg: Any) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "metrics.jsonl").write_text("")
    done = fedzmg("run", "digits", "--out", "half", *QUICK)
    assert done.code == 2
    assert "holds no spec.toml" in done.err
    assert [p.name for p in (tmp_path / "half").iterdir()] == ["metrics.jsonl"]


def test_time_limit_is_an_exit_code_and_the_same_command_continues(fedzmg: Any) -> None:
    Path("small.toml").write_text(SMALL)
    done = fedzmg("study", "small.toml", "--max-minutes", "1e-9")
    assert done.code == UNFINISHED
    assert "after round 1 of 2" in done.err
    assert fedzmg("study", "small.toml").code == 0


def test_ctrl_c_keeps_everything(
    fedzmg: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(_: Display, report: RoundReport) -> None:
        if report.round == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Display, "advance", press)
    done = fedzmg("run", "logistic", *QUICK, "--rounds", "9", "--out", "r")
    assert done.code == 130
    assert "nothing is lost, run the same command again" in done.err
    log = (tmp_path / "r" / "metrics.jsonl").read_text()
    rounds = [json.loads(line)["round"] for line in log.splitlines()]
    assert rounds == list(range(1, len(rounds) + 1))
    assert 3 <= len(rounds) < 9
    kept = RunDirectory(tmp_path / "r").checkpoint()
    assert kept is not None
    assert kept.round in (len(rounds), len(rounds) - 1)


class Recorder:
    """A tracker that keeps its steps in the class."""

    steps: list[int] = []  # noqa: RUF012

    def start(self, run: TrackedRun) -> None:
        assert run.name == "fedzmg/seed-0"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert values["eval/squared distance"] >= 0
        self.steps.append(step)

    def finish(self, ending: Ending) -> None:
        assert ending == "finished"


def test_study_is_tracked_watched_compared_and_verified(
    fedzmg: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "recorder", (Recorder, ()))
    Path("small.toml").write_text(SMALL)
    done = fedzmg("study", "small.toml", "--out", "s", "--track", "recorder")
    assert done.code == 0, done.err
    assert Recorder.steps == [1, 2]

    seen = fedzmg("watch", "s")  # complete, so it ends by itself
    assert seen.code == 0
    assert "1 done, round 2 of 2" in seen.out
    assert "fedzmg/seed-0" in fedzmg("watch", "s", "--once").out
    [work] = json.loads(fedzmg("watch", "s", "--json").out)["works"]
    assert (work["complete"], work["lock"]) == (True, None)

    shutil.copytree("s", "t")
    assert fedzmg("diff", "s", "t").code == 0
    same = fedzmg("verify", "s", "--rounds", "1")
    assert same.code == 0, same.err
    assert "bit for bit" in same.out

    log = Path("t/fedzmg/seed-0/metrics.jsonl")
    log.write_text(log.read_text().replace('"loss": ', '"loss": 1', 1))
    assert fedzmg("verify", "t", "--rounds", "1").code == 2
    change_manifest(log.parent, logs=log_marks(log.parent, log.name))
    differ = fedzmg("diff", "s", "t")
    assert differ.code == 1
    assert "they differ in curves" in differ.out
    assert fedzmg("diff", "s", "t", "--only", "spec,versions").code == 0
    assert json.loads(fedzmg("diff", "s", "t", "--json").out)["equal"]["curves"] is False
    unlike = fedzmg("verify", "t", "--rounds", "1", "--json")
    assert unlike.code == 1
    assert json.loads(unlike.out)["runs"][0]["first"] == 1
