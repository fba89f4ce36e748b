"""The comparison with vLLM finds its files, tells a right sampler from a wrong one, and draws."""

import sys
import types

import bench_vllm_gpu as bench
import inputs
import numpy as np
import pytest
import vllm_sampler
from verify_cases import Case

CASE = Case("", 2, k=2, vocabulary=40, temperature=0.8, dtype="float32")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Files that import what vLLM's import, and nothing of vLLM."""
    for name in vllm_sampler.FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(
            "from vllm.config import Config\n"
            "from vllm.config.model import PROCESSED_LOGPROBS_MODES as modes\n"
            "from vllm.triton_utils import tl\n"
            "from vllm.v1.spec_decode.fly import __file__ as fly\n"
            "def f(x: Config | None): return Config(x=x)\n"
        )
    fly = tmp_path / "vllm/v1/spec_decode/fly.py"
    fly.write_text("")
    (tmp_path / vllm_sampler.FILES[0]).write_text("__version__ = version = '1.2.3'\n")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def test_files_of_the_folder_are_imported_others_are_empty(files):
    module = vllm_sampler.load(files, {"tl": 5})("sample/gumbel")
    assert module.__file__ == str(files / "vllm/v1/worker/gpu/sample/gumbel.py")
    assert module.fly == str(files / "vllm/v1/spec_decode/fly.py")
    assert module.tl == 5 and module.modes == () and module.f(3).x == 3
    assert vllm_sampler.load(files, {"tl": 6})("sample/gumbel").tl == 6  # nothing is kept


def test_a_result_says_which_files_ran(files):
    found = vllm_sampler.provenance(files)
    assert found["vllm"] == "1.2.3" and list(found["vllm_files"]) == list(vllm_sampler.FILES)
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert found["vllm_files"]["vllm/v1/spec_decode/fly.py"] == empty
    (files / "vllm/v1/spec_decode/fly.py").unlink()
    with pytest.raises(FileNotFoundError, match="vllm/v1/spec_decode/fly.py"):
        vllm_sampler.provenance(files)


@pytest.fixture(scope="module")
def drawn():
    sets = inputs.make(CASE, 1, with_probs=False)
    return sets, *bench.draw_ours(CASE, sets, 1000, "xla")


@pytest.mark.slow
@pytest.mark.newest
def test_a_right_sampler_agrees_with_exact_probabilities(drawn):
    row = bench.compare(CASE, *drawn)
    assert row["ok"] and row["drafts_kept"] and len(row["z"]) == CASE.k + 2
    assert 1 < row["expected"] < 3
    assert row["emitted_per_request"] == drawn[2].mean()


@pytest.mark.long
@pytest.mark.newest
def test_wrong_samplers_do_not(drawn):
    given, token_ids, emitted = drawn
    assert not bench.compare(CASE._replace(temperature=1.1), given, token_ids, emitted)["ok"]
    every = np.full_like(emitted, CASE.k + 1)
    assert not bench.compare(CASE, given, np.maximum(token_ids, 0), every)["ok"]
    other = np.where(np.arange(CASE.k + 1) < emitted[..., None] - 1, 39, token_ids)
    row = bench.compare(CASE, given, other, emitted)
    assert not row["drafts_kept"] and not row["ok"]
    last = np.arange(CASE.k + 1) == emitted[..., None] - 1
    uniform = np.random.default_rng(0).integers(CASE.vocabulary, size=token_ids.shape)
    row = bench.compare(CASE, given, np.where(last, uniform, token_ids), emitted)
    assert row["drafts_kept"] and abs(row["z"][-1]) > 5 > max(map(abs, row["z"][:-1]))


def test_inputs_without_a_normalizer_are_the_same_inputs():
    sets = [inputs.make(CASE, seed, with_probs=False) for seed in (1, 2)]
    ours = types.SimpleNamespace(case=CASE._replace(distribution="logits"))
    drafts = bench.Ours._stored(ours, sets[0][1])
    assert drafts.distribution.log_normalizer is None
    np.testing.assert_array_equal(drafts.distribution.logits, sets[0][1].distribution.logits)
    np.testing.assert_array_equal(drafts.token_ids, sets[0][1].token_ids)


@pytest.mark.parametrize(
    ("command", "reason"), [(["--vllm-files", "x"], "JAX runs on cpu"), (["--tiny"], "no folder")]
)
def test_what_cannot_run_is_no_failure(command, reason, capsys):
    assert bench.main(command) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "nothing to measure" in line and reason in line
