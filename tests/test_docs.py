"""The site: its reference is whole, its code runs, and its pictures are what their scripts draw.

`make docs` checks links and cross-references. Pages whose code other tests run are listed there.
"""

import ast
import builtins
import dataclasses
import inspect
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import draw
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formats.checkpoints import CHECKPOINTS
from models.weights import sizes

import jax_specdec as sd
from jax_specdec import lm

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))

RUN_HERE = (
    "draft_budget",
    "draft_distributions",
    "drafting",
    "getting_started",
    "index",
    "models",
    "own_drafter",
    "sampling_parameters",
    "vllm",
)


def blocks(page: str, language: str = "python") -> list[str]:
    text = (DOCS / f"{page}.md").read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


# The reference


MODULES = {"grammar": sd.grammar, "lm": lm, "lm.formats": lm.formats, "lm.models": lm.models}
MODULES |= {"testing": sd.testing}
THINGS = {name: getattr(sd, name) for name in sd.__all__}
for module_name, module in MODULES.items():
    THINGS |= {f"{module_name}.{name}": getattr(module, name) for name in module.__all__}
DOORS = (*MODULES, "adapters", "lm.models.foreign")
THINGS = {name: thing for name, thing in THINGS.items() if name not in DOORS}


def entries(directive: str) -> list[str]:
    pages = "".join(path.read_text("utf-8") for path in (DOCS / "api").glob("*.md"))
    found = re.findall(rf"^\.\. {directive}:: ([\w.]+)$", pages, re.MULTILINE)
    outside = ("adapters.", "lm.models.foreign.", "testing.reference.")
    names = [name.removeprefix("jax_specdec.") for name in found]
    return [name for name in names if not name.startswith(outside)]


def test_every_public_name_has_one_entry_in_the_reference() -> None:
    classes = {name for name, thing in THINGS.items() if inspect.isclass(thing)}
    functions = {name for name, thing in THINGS.items() if inspect.isfunction(thing)}
    assert sorted(entries("autoclass")) == sorted(classes)
    assert sorted(entries("autofunction")) == sorted(functions)
    assert sorted(entries("py:data")) == sorted(set(THINGS) - classes - functions)


ADAPTERS = r"adapters\.|lm\.models\.foreign\."


def test_every_class_and_function_is_in_the_table_of_the_reference() -> None:
    index = (DOCS / "api" / "index.md").read_text("utf-8")
    listed = re.findall(r"^   ([\w.]+)$", index, re.MULTILINE)
    listed = [name for name in listed if not re.match(ADAPTERS, name)]
    assert sorted(listed) == sorted({*entries("autoclass"), *entries("autofunction")})


# Figures


RESULTS = ROOT / "benchmarks" / "results"
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
FIGURES = re.compile(
    rf"((?:{NUMBER}(?:, | and | or | to |; ))*{NUMBER}) (us|ms|microseconds|tokens/s|times as)\b"
)
FILE = re.compile(r"\[([^\]]*)\]\((?:\.\./)?benchmarks/results/([\w.]+\.(?:json|txt))\)")
NO_RESULTS = {"samples", "kernels", "compile_seconds", "goal", "inputs", "batch", "k"}


def numbers(result: Any) -> Iterator[float]:
    if isinstance(result, dict):
        result = [value for key, value in result.items() if key not in NO_RESULTS]
    if isinstance(result, list):
        for one in result:
            yield from numbers(one)
    else:
        yield from map(float, re.findall(r"\d+\.?\d*(?:e-?\d+)?", str(result).replace(",", " ")))


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_figures_are_in_a_file_that_their_section_names_with_its_date(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        known: list[float] = []
        for label, file in FILE.findall(" ".join(section.split())):
            result = (RESULTS / file).read_text("utf-8")
            assert max(re.findall(r"20\d\d-\d\d-\d\d", result)) in label, (label, file)
            known += numbers(json.loads(result) if file.endswith("json") else result)
        found = FIGURES.findall(" ".join(section.split()))
        tables = re.findall(r"^\| microseconds.*\n\|[- :|]*\n((?:\|.*\n)+)", section, re.MULTILINE)
        found += [(cell, "us") for cell in re.findall(rf"(?<=\| ){NUMBER}(?= \|)", "".join(tables))]
        for figures, unit in found:
            assert known, f"{figures} {unit}: which file has it?"
            for figure in re.findall(NUMBER, figures) if unit != "times as" else ():
                near = np.round(np.outer([1, 1e3], known), len(figure.partition(".")[2]))
                assert (near == float(figure.replace(",", ""))).any(), f"{figure} {unit}"


# Code


MODELS: dict[str, tuple[Any, ...]] = {  # arguments of `sizes`, and whether embeddings are tied
    "Qwen3 0.6B": (151936, 1024, 3072, 28, (16, 8, 128), True),
    "Llama 3.2 1B": (128256, 2048, 8192, 16, (32, 8, 64), True),
    "Qwen3 1.7B": (151936, 2048, 6144, 28, (16, 8, 128), True),
    "Llama 3.2 3B": (128256, 3072, 8192, 28, (24, 8, 128), True),
    "Qwen3 4B": (151936, 2560, 9728, 36, (32, 8, 128), True),
    "Llama 3.1 8B": (128256, 4096, 14336, 32, (32, 8, 128), False),
    "Qwen3 8B": (151936, 4096, 12288, 36, (32, 8, 128), False),
    "Qwen3 14B": (151936, 5120, 17408, 40, (40, 8, 128), False),
    "Qwen3 32B": (151936, 5120, 25600, 64, (64, 8, 128), False),
}
CARDS = {"T4": 16, "L4": 24, "A100": 40, "H100": 80}  # GB


def test_which_models_fit_which_card_is_what_their_arrays_say() -> None:
    page = (DOCS / "models.md").read_text("utf-8")
    rows = [re.split(r" *\| *", line)[1:-1] for line in page.splitlines()]
    table = {row[0]: row[1:] for row in rows if row and row[0] in MODELS}
    assert table.keys() == MODELS.keys()
    for name, (*arguments, is_tied) in MODELS.items():
        config = sizes(*arguments, tie_word_embeddings=is_tied, qk_norm=name.startswith("Qwen"))
        model = lm.models.Llama(config, jnp.bfloat16)
        plain = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
            model.weight_shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        lean = jax.eval_shape(lm.models.quantize, plain)
        cache = jax.eval_shape(lambda model=model: model.init_cache(8, 4096))
        in_gb = [
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays)) / 1e9
            for arrays in (plain, lean, cache)
        ]
        fits = []
        for weights in in_gb[:2]:
            fitting = (card for card, most in CARDS.items() if weights + in_gb[2] <= 0.85 * most)
            fits.append(next(fitting, "none"))
        assert table[name] == [*(f"{x:.1f}" for x in in_gb), *fits]


def test_the_code_of_every_page_is_run_by_some_test() -> None:
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    run = {*RUN_HERE, *re.findall(r'"(\w+)\.md"', tests)}
    assert [page.stem for page in PAGES if blocks(page.stem) and page.stem not in run] == []


@pytest.mark.parametrize("page", [page.stem for page in PAGES])
def test_code_that_is_not_run_is_python_and_names_what_exists(page: str) -> None:
    for code, (module, public) in itertools.product(
        blocks(page, "py"), {"sd": sd, "lm": lm}.items()
    ):
        names = {
            node.attr
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == module
        }
        assert names - set(public.__all__) == set()


@pytest.mark.parametrize("page", [page.stem for page in PAGES])
def test_a_page_has_one_word_for_drafts_and_code_uses_what_it_has_introduced(page: str) -> None:
    assert not re.search(r"[Dd]raft[ \n]+tokens?\b", (DOCS / f"{page}.md").read_text("utf-8"))
    known = {*dir(builtins), "__name__"}
    for code in blocks(page, "(?:python|py)"):
        nodes = [*ast.walk(ast.parse(code))]
        names = [node for node in nodes if isinstance(node, ast.Name)]
        known |= {node.id for node in names if not isinstance(node.ctx, ast.Load)}
        known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        known |= {x.name for x in nodes if isinstance(x, (ast.FunctionDef, ast.ClassDef))}
        known |= {x.name for x in nodes if isinstance(x, (ast.AsyncFunctionDef, ast.ExceptHandler))}
        aliases = [node for node in nodes if isinstance(node, ast.alias)]
        known |= {(node.asname or node.name).partition(".")[0] for node in aliases}
        assert {node.id for node in names} - known == set()


@pytest.mark.parametrize("page", [page.stem for page in PAGES])
def test_files_that_commands_name_exist(page: str) -> None:
    for code in blocks(page, "sh"):
        assert "--group" not in code  # which needs pip 25.1
        for name in re.findall(r"\b(?:tools|benchmarks|training)/\w+\.py", code):
            assert (ROOT / name).exists()


def test_which_loop_has_what_is_what_their_arguments_say() -> None:
    """An argument in a cell is one of its loop, and no loop takes it whose cell says "no"."""
    table = (DOCS / "index.md").read_text("utf-8").partition("## Which loop has what")[2]
    _, _, *rows = [line[2:-2].split(" | ") for line in table.splitlines() if line.startswith("| ")]
    options = {field.name for field in dataclasses.fields(lm.RequestOptions)}
    owner = [sd.rejection_sample, sd.Drafts.from_dense]
    driver = [lm.Engine, lm.EngineDriver, lm.EngineDriver.submit]
    loops = [[lm.generate], [lm.generate_stream], [lm.generate_plain], driver, owner]
    taken = [
        {name for call in calls for name in inspect.signature(call).parameters} for calls in loops
    ]
    taken[:4] = [names | options for names in taken[:4]]
    output = lm.GenerateOutput([], None, [])  # type: ignore[arg-type]
    places = (sd, lm, lm.models, lm.EngineDriver, output)
    for name, *cells in rows:
        asked = set(re.findall(r"`(\w+)=`", " ".join(cells)))
        for cell, names in zip(cells, taken, strict=True):
            assert set(re.findall(r"`(\w+)=`", cell)) <= names, (name, cell)
            assert cell != "no" or not asked & names, (name, asked & names)
            for thing in re.findall(r"`(\w+)`", cell):
                assert any(hasattr(place, thing) for place in places), (name, thing)
    assert len(rows) >= 15


@pytest.mark.newest
@pytest.mark.xdist_group("examples")  # the example of `generate` has the same programs
def test_the_first_page_decodes(capsys: pytest.CaptureFixture[str]) -> None:
    run_all("index")
    text, tokens_per_target_pass = capsys.readouterr().out.rstrip("\n").rsplit("\n", 1)
    assert text.strip() and 1 < float(tokens_per_target_pass) <= 5


@pytest.mark.slow
def test_the_page_on_draft_budgets_plans_and_serves(
    one_layer: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scope = run_all("draft_budget")
    assert scope["counts"].tolist() == [3, 1]
    assert scope["costs"].draft_budget == (0, 1, 2)
    assert scope["driver"].is_idle and scope["driver"].stats().num_tokens == 16


@pytest.mark.long
def test_getting_started_runs_from_top_to_bottom(
    one_layer: None, capsys: pytest.CaptureFixture[str]
) -> None:
    first = blocks("getting_started")[:4]  # which asserts that greedy text is the plain one
    scope = run("".join(first), "getting_started")
    assert [len(completion) for completion in scope["output"].completions] == [60, 60]
    assert "def quicksort(items):" in capsys.readouterr().out


@pytest.mark.long
def test_a_checkpoint_drafts_for_another(capsys: pytest.CaptureFixture[str]) -> None:
    real = "".join(blocks("models")).replace("Qwen2.5-7B", str(CHECKPOINTS / "qwen2"))
    real = real.replace("Qwen2.5-0.5B", str(CHECKPOINTS / "qwen2_draft"))
    run(real.replace("max_new_tokens=64", "max_new_tokens=8"), "models")
    by_hand, by_one_call, of_ones_own, *_ = capsys.readouterr().out.split("\n")
    assert by_hand.strip() and by_hand == by_one_call
    assert of_ones_own == "[2, 0, 1, 2]"


@pytest.mark.long
def test_text_streams_with_a_tokenizer_and_is_that_of_generate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = blocks("getting_started")[4]
    real = real.replace("Qwen2.5-7B", str(CHECKPOINTS / "qwen2"))
    scope = run(real.replace("max_new_tokens=64", "max_new_tokens=12"), "getting_started")
    printed = capsys.readouterr().out
    tokenizer, prompt = scope["tokenizer"], scope["prompt"]
    plain = lm.generate_plain(
        *scope["target"], [prompt], max_new_tokens=12, stop_token_ids=tokenizer.stop_token_ids
    )
    whole = tokenizer.decode(prompt + plain.completions[0])
    assert printed == whole[len(tokenizer.decode(prompt)) :] + "\n" != "\n"


@pytest.mark.slow
def test_texts_of_two_requests_stream_as_they_come(one_layer: None) -> None:
    names = "import jax_specdec as sd\nfrom jax_specdec import lm\n"
    scope = run(names + "".join(blocks("getting_started")[5:]), "getting_started")
    output = lm.generate_plain(
        scope["target"], scope["params"], scope["prompts"], max_new_tokens=100
    )
    texts = [lm.decode_bytes(completion) for completion in output.completions]
    assert scope["pieces"] == [text[:40] for text in texts]
    assert scope["line"] == texts[0].partition("\n\n")[0]


@pytest.mark.slow
@pytest.mark.newest
def test_the_drafter_on_the_page_is_verified_with_its_own_distribution() -> None:
    drafter, features = blocks("own_drafter")
    scope = run(drafter, "own_drafter")
    assert scope["output"].steps.num_proposed.sum() > 0
    assert scope["stats"].num_fallbacks == 0 and scope["stats"].num_accepted_tokens > 0
    run(features, "own_drafter", scope)  # one that reads features
    assert scope["output"].steps.num_proposed.sum() > 0


@pytest.mark.slow
@pytest.mark.newest
def test_the_loop_with_a_store_verifies_every_request_with_its_own_rows() -> None:
    loop, *_ = blocks("draft_distributions")
    scope = run(loop, "draft_distributions")
    assert int(scope["num_fallbacks"]) == 0
    output = scope["output"]
    assert output.status.tolist() == [sd.Status.OK] * 3
    assert (np.asarray(output.num_accepted) <= [2, 0, 1]).all()
    positions = np.asarray(scope["store"].positions)
    assert (positions == [[-1, 20, 30]]).all()


@pytest.mark.newest
def test_arrays_in_the_layout_of_vllm_are_verified() -> None:
    scope = run_all("vllm")
    output = scope["output"]
    assert output.status.tolist() == [sd.Status.OK] * 3
    emitted = sd.parse_output(output)
    assert emitted[1] == [2]  # no drafts: the bonus token that was given
    argmax = np.asarray(scope["target_logits"]).argmax(axis=1)  # the first request is greedy
    drafts = np.asarray(scope["draft_token_ids"])
    assert emitted[0][0] == argmax[0] and (len(emitted[0]) > 1) == (argmax[0] == drafts[0])


@pytest.mark.slow
@pytest.mark.newest
def test_a_loop_of_ones_own_has_its_rows_processed() -> None:
    page = "sampling_parameters"
    own_loop, trainer = blocks(page)
    scope = run(own_loop, page)
    rows, raw = (np.asarray(scope[name]).reshape(2, 3, 8) for name in ("rows", "logits"))
    assert (rows[0, :, 0] == -np.inf).all(), "a stop token, too early"
    assert (rows[0, :, 5] == -np.inf).tolist() == [False, True, False], "after 4, and only there"
    np.testing.assert_allclose(rows[0, :, 4], raw[0, :, 4] + 20.0, rtol=1e-6)
    # 2 and 2 again, then 4, were emitted; the drafts 6 and 7 count in the rows after them.
    counts = (
        np.array([[0, 0, 2, 0, 1, 0, 0, 0]]) + np.tril(np.ones((3, 3)), -1) @ np.eye(8)[[6, 7, 0]]
    )
    assert (rows[1, :, 0] == -np.inf).all(), "not allowed"
    np.testing.assert_allclose(rows[1, :, 1:], (raw[1] - 0.5 * counts)[:, 1:], rtol=1e-5)
    emitted = sd.parse_output(scope["output"])
    assert emitted[0][0] == 4 and emitted[0][1] == rows[0, 1].argmax() != 5

    scope = run(trainer, page, scope)
    prompt, completion = scope["prompt"], scope["completion"]
    np.testing.assert_allclose(scope["trained"], scope["sampled"], atol=1e-4)
    rows = np.asarray(scope["logits"][0, len(prompt) - 1 : -1], np.float64)
    filtered = [sd.testing.reference._filter_row(row, 0.8, 0.0, 20, 0.9)[0] for row in rows]
    is_kept = rows >= np.asarray(scope["thresholds"])[:, None]
    np.testing.assert_array_equal(is_kept, np.array(filtered) > -np.inf)
    whole = rows[np.arange(len(rows)), completion] / 0.8 - np.log(np.exp(rows / 0.8).sum(axis=1))
    assert np.max(np.asarray(scope["sampled"]) - whole) > 0.05, "without the filters"


def run(code: str, page: str, scope: dict | None = None) -> dict:
    """The names after the code, and in `scope` those before it."""
    scope = {} if scope is None else scope
    exec(compile(code, f"{page}.md", "exec"), scope)
    return scope


def run_all(page: str) -> dict:
    return run("".join(blocks(page)), page)


# Pictures


def test_pictures_are_what_the_script_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw, "DOCS", tmp_path)
    draw.main()
    drawn = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert len(drawn) == len(draw.PICTURES)
    again = "draw again: python tools/draw.py"
    assert drawn == {name: (DOCS / name).read_text("utf-8") for name in drawn}, again


@pytest.mark.slow
@pytest.mark.newest
def test_the_demo_is_what_make_demo_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text, its colours and the table, all but the tokens per second and their ratio."""
    monkeypatch.setattr(draw, "DOCS", tmp_path)
    draw.demo()
    drawn, kept = (
        re.subn(
            r"(&#160;)+\d+((&#160;)+[\d.]+x)?(?=</text>|&#160;&#160;yes)",
            " SPEED",
            (folder / "demo.svg").read_text("utf-8"),
        )
        for folder in (tmp_path, DOCS)
    )
    assert drawn == kept, "draw again: python tools/draw.py demo"
    assert kept[1] == 2  # plain decoding, and drafted
    command = "jax-specdec generate --compare -- "
    assert f'{command}"$$PROMPT"\n' in (ROOT / "Makefile").read_text("utf-8")


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(page.read_text("utf-8") for page in (*PAGES, ROOT / "README.md"))
    assert [path.name for path in DOCS.glob("*.svg") if f"{path.name})" not in pages] == []
