"""Examples of small functions, by module, as Python would print them."""

import doctest
import importlib

import pytest

EXAMPLES = {
    "fedzmg.aggregators": r"""
>>> build({"name": "krum", "byzantine": 2})
Krum(byzantine=2, neighbours='n-f-2')
""",
    "fedzmg.algorithms.afl": r"""
>>> nearest_mixture(torch.tensor([1.3, 0.2]))
tensor([1., 0.])
""",
    "fedzmg.algorithms.fedsam": r"""
>>> unit_ascent(Tree({"a": torch.zeros(2)}), Tree({"a": torch.tensor([3.0, 4.0])}), 1, 0)["a"]
tensor([0.6000, 0.8000])
""",
    "fedzmg.data.cache": r"""
>>> mirrored("https://example.org/a/b.gz", "http://localhost:8000/data/")
'http://localhost:8000/data/b.gz'
""",
    "fedzmg.data.formats.common": r"""
>>> codes(["10", "9", "10"])[0].tolist()
[1, 0, 1]
""",
    "fedzmg.data.formats.federated_files": r"""
>>> as_bytes(np.array([0.0, 0.2, 1.0])).tolist()
[0, 51, 255]
>>> as_bytes(np.array([0.5])) is None
True
""",
    "fedzmg.data.heterogeneity": r"""
>>> owners_of([0, 2, 2, 5]).tolist()
[0, 0, 2, 2, 2]
""",
    "fedzmg.data.text": r"""
>>> encode(np.frombuffer("Æb!".encode(), np.uint8), np.array([0, 4]))[0].tolist()
[65, 40, 2]
>>> cut = sequences(np.arange(5, dtype=np.uint8), np.array([0, 5]), 2, "pad")
>>> cut.inputs.tolist(), cut.targets.tolist()
([[0, 1], [3, 4]], [[1, 2], [4, -1]])
""",
    "fedzmg.diagnose.measure": r"""
>>> ClientSpread.of(np.array([0.25, 0.75, np.nan]))
ClientSpread(mean=0.5, sd=0.3535533905932738, low=0.25, high=0.75)
""",
    "fedzmg.diagnose.verdict": r"""
>>> percent(0.314), percent(0.0042), percent(0.00001), percent(0.0)
('31 %', '0.4 %', '< 0.1 %', '0 %')
""",
    "fedzmg.errors": r"""
>>> check_text("label", "a\nb")
Traceback (most recent call last):
fedzmg.errors.InputError: label = 'a\nb': expected one line without control characters
>>> brief(0.5), brief([7] * 1000)[-20:]
('0.5', '7, 7, 7, 7, 7, 7, 7]')
>>> str(unknown("weights", "example", ["examples", "uniform"]))
"unknown weights 'example': did you mean 'examples'? (known: examples, uniform)"
>>> str(unknown("task", "digit", ["digits", "plays"], "fedzmg list"))
"unknown task 'digit': did you mean 'digits'? ('fedzmg list' shows all)"
>>> str(unknown("task", "xyz", ["digits", "plays"], "fedzmg list"))
"unknown task 'xyz' (known: digits, plays)"
>>> str(unknown("task", "xyz", map(str, range(9)), "fedzmg list"))
"unknown task 'xyz' ('fedzmg list' shows all)"
>>> str(unknown("column", "xyz", map(str, range(10))))
"unknown column 'xyz' (known: 0, 1, 2, 3, 4, 5, 6, 7 and 2 more)"
>>> str(unknown("key", "c", ["x.c", "y.c", "z.c"], "l x", "l y", "l z"))
"unknown key 'c': did you mean 'x.c', 'y.c' or 'z.c'? ('l x', 'l y' and 'l z' show all)"
>>> listed("abc"), listed("ab", "or"), listed("a")
('a, b and c', 'a or b', 'a')
>>> known = ["client.form", "client.lr", "protocol.cohort"]
>>> [_close(name, known) for name in ("cohort", "server.lr", "client.lrr", "client.mu")]
[['protocol.cohort'], ['client.lr'], ['client.lr'], []]
>>> [_close(name, known) for name in ("client.learning_rate", "fraction_fit", "num_clients")]
[['client.lr'], ['protocol.cohort'], ['protocol.cohort']]
""",
    "fedzmg.experiment.grids.grid": r"""
>>> _point({"options": {"client.lr": 0.1, "server.lr": 1.0}}), _point(None)
('client.lr 0.1, server.lr 1', 'none')
""",
    "fedzmg.experiment.grids.score": r"""
>>> choose_best([3], [0.5, 0.9, 0.9], [0, 0, 0])
2
>>> choose_best([2, 2], [0.0, 0.0, 0.0, 0.0], [1, 1, 1, 1]) is None
True
>>> neighbours([3, 3], 4), neighbours([3, 3], 0)
([1, 7, 3, 5], [3, 1])
""",
    "fedzmg.experiment.specs.run": r"""
>>> by_side({"weights": "uniform", "client.lr": 0.1})
{'client': {'lr': 0.1}, 'server': {}}
""",
    "fedzmg.experiment.specs.strict": r"""
>>> print(toml({"task": "digits", "client": {"lr": 0.1}, "server": {}}))
task = "digits"
<BLANKLINE>
[client]
lr = 0.1
<BLANKLINE>
>>> parse_settings(["client.lr=0.03", "weights=uniform", "seeds=[0, 1]"])
{'client.lr': 0.03, 'weights': 'uniform', 'seeds': [0, 1]}
""",
    "fedzmg.plain_text": r"""
>>> printable("a\x1b[31mb\tc\u202ed\r\ne\u2028f")
'a[31mb cd\ne f'
>>> plain("a\x1b[31mb\nc")
'a[31mb c'
""",
    "fedzmg.plugins": r"""
>>> split_reference("my/task.py:task"), split_reference("fedavg:momentum")
(('my/task.py', 'task'), None)
""",
    "fedzmg.provenance": r"""
>>> command(["/usr/bin/fedzmg", "run", "digits", "--out", "my runs"]), command(["train.py"])
("fedzmg run digits --out 'my runs'", 'Python')
""",
    "fedzmg.report.tables.grids": r"""
>>> stopped_text({"diverged": 3, "halving": 4, "rounds": 30, "rounds_asked": 60})
'3 diverged, 4 halving; 50 % of the rounds trained'
""",
    "fedzmg.report.tables.table": r"""
>>> print(to_markdown(Table.of("T", ("a", "b"), [("x", "1")])), end="")
### T
<BLANKLINE>
| a | b |
|:--|--:|
| x | 1 |
>>> tex("86.74 ± 1 %, d_z")
'86.74 $\\pm$ 1 \\%, d\\_z'
""",
    "fedzmg.report.tables.theory": r"""
>>> number(13.799966), number(-1.0225), number(9.2e-06), number(300)
('13.8', '\u22121.0225', '9.2e\u221206', '300')
>>> tolerance({"rule": "relative", "tolerance": 0.01})
'± 1 %'
""",
    "fedzmg.results.diff": r"""
>>> _distance(1.0, 0.75), _distance("nan", "nan"), _distance("inf", 1.0)
(0.25, 0.0, inf)
""",
    "fedzmg.results.formatting": r"""
>>> value_text(0.8674, "accuracy"), value_text(0.0056, "accuracy", signed=True)
('86.74 %', '+0.56 %')
>>> range_text(0.01, 0.02, "accuracy")
'+1.00 to +2.00 %'
>>> spread_text(0.8, 0.01, "accuracy")
'80.00 ± 1.00 %'
>>> goal_text(0.8, "accuracy"), goal_text(0.125, "accuracy"), goal_text(0.001, "loss")
('80 %', '12.50 %', '0.001')
>>> p_text(0.0505), p_text(3.2e-05)
('0.0505', '3.2e-05')
>>> signed_text(float("inf")), signed_text(1.5), signed_text(0)
('+∞', '+1.50', '0')
>>> digits_text(0.01), digits_text(52.19), digits_text(521.9), digits_text(6283.5)
('0.0100', '52.2', '522', '6,284')
>>> bytes_text(6760184), bytes_text(512)
('6.4 MiB', '512 B')
>>> setting_text(True), setting_text(0.1), setting_text(None)
('yes', '0.1', '')
>>> count_text(1, "seed"), count_text(1200, "round")
('1 seed', '1,200 rounds')
>>> slug("fedadam:reddi (lr 0.1)")
'fedadam-reddi-lr-0.1'
>>> duration(42), duration(600), duration(10000), duration(300000)
('42 s', '10 min', '2.8 h', '3.5 days')
>>> print(aligned({"algorithm": ["fedzmg", "x"], "sd": ["", ""], "mean": ["0.5", "12"]}))
algorithm  mean
fedzmg      0.5
x            12
""",
    "fedzmg.results.paper": r"""
>>> shown("cifar100"), shown("mnist-by-writer")
('cifar100', 'mnist-by-writer (stand-in for EMNIST)')
""",
    "fedzmg.results.reading": r"""
>>> variants({"algorithms": ["fedavg"]})
{'fedavg': {}}
""",
    "fedzmg.results.runs": r"""
>>> list(scheduled(11, 5)), scheduled(20, 20), scheduled(4, 5), list(scheduled(0, 5))
([1, 6, 11], [1, 20], [1, 4], [])
>>> [str(one)[:30] for one in unusual_clients([(1, [("a", float("inf"))], [("b", 1.23e8)])])]
['client b: update 1.2e+08 x the', 'client a: update not finite in']
""",
    "fedzmg.results.scores": r"""
>>> band_around(np.array([0.8, 0.5]), np.array([0.4, 0.1]), "accuracy")[1].tolist()
[1.0, 0.6]
>>> averaged_words(4), averaged_words(1)
('mean of 4 evaluations', 'one evaluation')
""",
    "fedzmg.seeds": r"""
>>> key(0, "cohort", 1) == key(0, "cohort", 1), key(0, "cohort", 1) == key(0, "cohort", 2)
(True, False)
""",
    "fedzmg.storage.files": r"""
>>> folder_name("fedzmg:as printed")
'fedzmg-as-printed'
""",
    "fedzmg.storage.formats": r"""
>>> flat({"task": "digits", "client": {"lr": 0.1, "decay": {"rate": 0.9}}, "server": {}})
{'task': 'digits', 'client.lr': 0.1, 'client.decay.rate': 0.9}
>>> flat_facts({"device": "cpu", "plugins": {"mine": {"file": "mine.py"}}})
{'device': 'cpu', 'plugins.mine.file': 'mine.py'}
>>> json_words({"loss": float("nan"), "spread": (1.0, float("inf"))})
{'loss': 'nan', 'spread': [1.0, 'inf']}
>>> json_nulls({"loss": float("nan"), "spread": (1.0, float("inf"))})
{'loss': None, 'spread': [1.0, None]}
""",
    "fedzmg.tasks.preset": r"""
>>> Decision("centring", "none", "none", ("none", "image"), 0, 0, "").rule
('none or image', True)
""",
    "fedzmg.terminal.inspection": r"""
>>> states([Training("a", "a", "done", 3, 3, True), Training("b", "b", "waiting", 0, 3, False)])
'1 done, 1 waiting'
""",
    "fedzmg.terminal.views": r"""
>>> prose("With\n``g = 0``::\n\n    w <- w - lr g\n\n::\n\n    w", 80)
'With g = 0:\n\n    w <- w - lr g\n\n    w'
>>> print(prose("    w <- w - lr g   for each step   at the client", 35))
    w <- w - lr g   for each step
        at the client
""",
    "fedzmg.theory": r"""
>>> resolve(["t6", "E1"])
['T6', 'E1']
""",
    "fedzmg.theory.finding": r"""
>>> Value("a length", 2.0, 2.1, 0.1, "relative").agrees
True
>>> Value("a bound", 0.0, 2.25, 0.0, "at most").agrees
False
""",
    "fedzmg.wrappers.clip": r"""
>>> clip_norm(Tree({"a": torch.tensor([3.0]), "b": torch.tensor([-4.0])}), 1.0)["b"]
tensor([-0.8000])
""",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    found = doctest.DocTestParser().get_doctest(EXAMPLES[name], vars(module), name, name, 0)
    assert found.examples
    assert doctest.DocTestRunner().run(found).failed == 0
