"""The notebooks run from a clean kernel, hold what they claim, and are committed with pictures."""

import importlib.util
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[1]
RUNNER = runpy.run_path(str(ROOT / "tools/run_notebooks.py"))

long = pytest.mark.long

# What must hold after the last cell, in the notebook's own names.
CLAIMS = {
    "quickstart": """
        assert same_text
        assert stats.mean_acceptance_length > 2
        assert one_text
        assert all(1 < mean <= K + 1 for mean in means for K in [config.num_speculative_tokens])
    """,
    "rejection_sampling": """
        right, *wrong = p_values.values()
        assert uniform > 1e-3 and joint_p_value > 1e-3 and min(mixture_p_values) > 1e-3
        assert len(right) == 4 * B / 1000
        for level in (0.05, 0.5):
            error = np.sqrt(level * (1 - level) / len(right))
            assert abs((right < level).mean() - level) < 4 * error
        assert max(map(np.median, wrong)) < 1e-3  # the test can fail
        assert np.abs(measured - (1 - mixtures * distance)).max() < 4 * np.sqrt(0.25 / B)
    """,
    "synthetic_acceptance": """
        for name, config in configs.items():
            rates, reading = np.array(config.unconditional_rates), readings[name]
            error = np.sqrt(rates * (1 - rates) / reading.num_drafts)
            assert (np.abs(rates - reading.unconditional_rates) <= 4 * error).all()
        assert steps == [90, 30, 18, 90]  # lengths 1, 3 and 5, and plain decoding
        assert abs(sum(coin_flips(3.4)) - 2.4) < 1e-6
    """,
    "serving_loop": """
        assert texts(state)[:6] == texts(plain)[:6]
        assert (state.lengths == state.ends).all() and (plain.lengths == plain.ends).all()
        assert int(plain.step) == max(budgets) > int(state.step)
        assert sum(reading.num_fallbacks for reading in readings) == 0
        assert all(reading.num_accepted_tokens > 0 for reading in readings)
        assert min(gain["planned"]) >= 1 > min(gain[f"K = {K}"])
        assert all(map(np.greater_equal, gain["planned"], gain[f"K = {K}"]))
        assert all(same) and np.mean(per_step) > 2
    """,
}


# What a run does less of; `make notebooks` runs them as they stand.
SMALLER = {
    "quickstart": {
        "max_new_tokens=200": "max_new_tokens=60",
        "for _ in tqdm(range(7)": "for _ in tqdm(range(1)",
        "for s in range(4)]": "for s in range(1)]",
        "0.3, 0.6, 0.9, 1.2, 1.5, 1.8]": "0.9, 1.8]",
        # The agreement rule with the drafters that the cells before have used.
        '    "n-gram drafts, K = 4": agreeing(lm.NGramDrafter(), None, 4),\n': "",
        '    "model drafts, K = 2": agreeing(lm.ModelDrafter(draft), draft_params, 2),\n': "",
        '    "model drafts, K = 6": agreeing(lm.ModelDrafter(draft), draft_params, 6),\n': "",
    },
    "rejection_sampling": {
        "B = 50_000": "B = 20_000",
        "np.linspace(0, 1, 6)": "np.linspace(0, 1, 3)",
        "[[0]] * 20_000": "[[0]] * 5_000",
        "(20_000 * ": "(5_000 * ",
        " 20_000 * ": " 5_000 * ",
    },
    "serving_loop": {"levels = [0.0, 0.2, 0.4, 0.6, 0.8]": "levels = [0.0, 0.8]"},
}


def dedent(code: str) -> str:
    return re.sub(r"^        ", "", code, flags=re.MULTILINE).strip()


@pytest.fixture(params=RUNNER["NOTEBOOKS"], ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def notebook(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]


def test_every_notebook_makes_claims() -> None:
    assert {path.stem for path in RUNNER["NOTEBOOKS"]} == set(CLAIMS)


def smaller(notebook: nbformat.NotebookNode, replace: dict[str, str]) -> None:
    for old, new in replace.items():
        cells = [cell for cell in notebook.cells if old in cell.source]
        assert cells, f"no cell holds {old!r}"
        for cell in cells:
            cell.source = cell.source.replace(old, new)


# The others' code is that of pages and tests, but for what they draw.
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(x, marks=long if x.stem == "rejection_sampling" else pytest.mark.slow)
        for x in RUNNER["NOTEBOOKS"]
        if x.stem in SMALLER
    ],
    indirect=True,
)
def test_a_notebook_runs_in_a_clean_kernel_and_its_claims_hold(
    path: Path, notebook: nbformat.NotebookNode
) -> None:
    pictures = [out for out in outputs(notebook) if "image/png" in out.get("data", {})]
    smaller(notebook, SMALLER.get(path.stem, {}))
    notebook.cells.append(nbformat.v4.new_code_cell(dedent(CLAIMS[path.stem])))
    executed = RUNNER["execute"](notebook, path.parent)  # raises what a cell raises
    drawn = [out for out in outputs(executed) if "image/png" in out.get("data", {})]
    assert len(drawn) == len(pictures)
    stderr = "".join(out.text for out in outputs(executed) if out.get("name") == "stderr")
    assert "warning" not in stderr.lower()


@pytest.mark.newest
def test_a_cell_that_raises_is_reported() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 == 2")])
    with pytest.raises(CellExecutionError, match="AssertionError"):
        RUNNER["execute"](notebook, ROOT)


def test_a_notebook_is_committed_as_a_clean_run_left_it(
    path: Path, notebook: nbformat.NotebookNode
) -> None:
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = {(out.output_type, out.get("name")) for out in outputs(notebook)}
    assert kinds <= {("stream", "stdout"), ("display_data", None), ("execute_result", None)}
    pictures = [out for out in outputs(notebook) if "image/png" in out.get("data", {})]
    assert len(pictures) >= 2
    assert path.stat().st_size < 400_000
    assert RUNNER["tidy"](nbformat.from_dict(notebook)) == notebook


# Installing


class Machine:
    """Runs the cells that install a notebook's package, on a machine that is only described.

    Args:
      wheels: files beside the notebook.
      has_package: jax_specdec is installed.
      driver: the CUDA version that nvidia-smi shows; None on a machine without it.
      jax: what a probe of the JAX that is installed prints; nothing where there is none.
      pip: exit status.
    """

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        wheels: tuple[str, ...] = (),
        has_package: bool = False,
        driver: str | None = None,
        jax: str = "cpu",
        pip: int = 0,
    ) -> None:
        self.installs: list[str] = []
        self._driver, self._jax, self._pip = driver, jax, pip
        for wheel in wheels:
            (folder / wheel).touch()
        monkeypatch.chdir(folder)
        monkeypatch.setattr(subprocess, "run", self._run)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: has_package or None)

    def _run(self, command: str | list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if command == "nvidia-smi":
            if self._driver is None:
                raise FileNotFoundError(command)
            shown = f"Driver Version: 570.1   CUDA Version: {self._driver}"
            return subprocess.CompletedProcess(command, 0, shown, "")
        if command[1] == "-c":
            return subprocess.CompletedProcess(command, 0, f"{self._jax}\n", "")
        assert command[:-1] == [sys.executable, "-m", "pip", "install", "--quiet"]
        self.installs.append(command[-1])
        return subprocess.CompletedProcess(command, self._pip, "", "no such file")

    def start(self, notebook: nbformat.NotebookNode) -> None:
        scope: dict[str, object] = {}
        for cell in [cell for cell in notebook.cells if cell.cell_type == "code"][:2]:
            exec(cell.source, scope)


WHEEL = "jax_specdec-0.1.0-py3-none-any.whl"


@pytest.mark.parametrize(
    ("machine", "installs"),
    [
        ({"has_package": True, "driver": "12.4"}, []),
        ({}, ["..[lm]"]),  # of a clone, on a CPU
        ({"wheels": (WHEEL,)}, [f"{WHEEL}[lm]"]),
        ({"wheels": (WHEEL,), "driver": "12.4", "jax": "gpu"}, [f"{WHEEL}[lm]"]),  # it serves
        ({"driver": "12.4", "jax": "cpu"}, ["..[lm,cuda12]"]),  # it does not see the GPU
        ({"driver": "12.4", "jax": "False"}, ["..[lm,cuda12]"]),  # it is too old
        ({"wheels": (WHEEL,), "driver": "13.0", "jax": ""}, [f"{WHEEL}[lm,cuda]"]),  # there is none
    ],
)
def test_a_notebook_installs_what_is_missing_from_one_place(
    machine: dict[str, object],
    installs: list[str],
    notebook: nbformat.NotebookNode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described = Machine(tmp_path, monkeypatch, **machine)
    described.start(notebook)
    assert described.installs == installs


def test_an_install_that_fails_says_which_place_it_was(
    notebook: nbformat.NotebookNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch, pip=1)
    with pytest.raises(
        RuntimeError, match=r"PLACE must be a clone or a wheel, not \.\.: no such file"
    ):
        machine.start(notebook)


def test_the_readme_leads_to_every_notebook(path: Path) -> None:
    assert f"](notebooks/{path.name})" in (ROOT / "README.md").read_text("utf-8")


def test_the_extras_that_a_notebook_may_install_are_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["cuda"] == ["jax[cuda13]>=0.10.2"]
    assert extras["cuda12"] == ["jax[cuda12]>=0.10.2"]


def test_a_notebook_says_on_what_it_runs(notebook: nbformat.NotebookNode) -> None:
    _, _, imports, *_ = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (shown,) = imports.outputs
    assert shown.text == "device: cpu, implementation of rejection_sample: xla\n"


def test_nothing_installs_from_a_registry_or_names_a_repository_that_does_not_exist() -> None:
    files = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *RUNNER["NOTEBOOKS"],
    ]
    files += [*(ROOT / "jax_specdec").rglob("*.py"), *(ROOT / "tools").glob("*.*")]
    files.remove(ROOT / "jax_specdec/lm/extras.py")  # said where the package is installed
    wrong = re.compile(r"jax-specdec\[|github\.com/jax-specdec|colab\.research|git\+https")
    found = [path.name for path in files if wrong.search(path.read_text("utf-8"))]
    assert found == []


def test_the_links_of_a_notebook_lead_somewhere(
    path: Path, notebook: nbformat.NotebookNode
) -> None:
    prose = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)\s]+)\)", prose)
    local = [link for link in links if not link.startswith("https:")]
    assert [link for link in local if not (path.parent / link).exists()] == []
