"""The command line, run as a user runs it."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest

import jax_specdec as sd
from jax_specdec.__main__ import main
from jax_specdec._src.cli import models as models_lib
from jax_specdec._src.cli import options as options_lib
from jax_specdec._src.cli.show import printable

pytestmark = pytest.mark.newest

PROMPT = "def quicksort(items):"
SHORT = ["--max-new-tokens", "40", "--repeats", "1", "--num-speculative-tokens", "3"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jax_specdec", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    main(["generate", PROMPT, *SHORT, "--json", *arguments])
    return json.loads(capsys.readouterr().out)


def assert_text_and_table(shown: str) -> None:
    for label in (
        PROMPT,
        "accepted",
        "recovered",
        "bonus",
        "tokens",
        "target passes",
        "mean acceptance length",
        "accepted up to each position",
        "speculative decoding",
        "plain decoding",
        "speed-up per token (median of 1)",
    ):
        assert label in shown
    assert re.search(r"greedy output identical to plain +│ +yes", shown)


def test_the_streamed_text_and_the_table_appear(capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", PROMPT, *SHORT])
    captured = capsys.readouterr()
    assert captured.err == ""
    assert_text_and_table(captured.out)


@pytest.mark.slow
def test_a_process_of_its_own_shows_them_too() -> None:
    result = run("generate", PROMPT, *SHORT)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert_text_and_table(result.stdout)


@pytest.mark.slow
def test_greedy_text_is_what_the_target_alone_writes(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys)
    (target, params), _ = sd.load_embedded_pair()
    plain = sd.generate_plain(
        target,
        params,
        [sd.encode(PROMPT)],
        max_new_tokens=40,
        stop_token_ids=[sd.DOCUMENT_SEPARATOR],
    )
    assert result["text"] == sd.decode(plain.completions[0])
    assert result["identical_to_plain"] is True
    assert result["num_tokens"] == result["num_plain_tokens"] == 40


def test_the_figures_of_a_run_agree_with_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys)
    accepted, passes = result["num_accepted_tokens"], result["num_target_passes"]
    assert result["num_verifications"] == passes
    assert result["mean_acceptance_length"] == 1 + accepted / passes
    assert result["num_emitted_tokens"] == accepted + passes
    assert result["num_emitted_tokens"] >= result["num_tokens"] > accepted
    assert sum(result["unconditional_rates"]) == pytest.approx(accepted / passes)
    assert sorted(result["unconditional_rates"], reverse=True) == result["unconditional_rates"]
    origins = [piece["origin"] for piece in result["pieces"]]
    assert len(origins) == 40
    assert origins.count("accepted") <= accepted
    assert result["config"]["num_speculative_tokens"] == 3


def test_six_tokens_are_drafted_by_default() -> None:
    config = options_lib.parse(["generate", PROMPT], sd.__version__).config
    assert config.num_speculative_tokens == 6


@pytest.mark.slow
def test_ngram_drafts_change_the_passes_and_not_the_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    by_model, by_lookup = run_json(capsys), run_json(capsys, "--draft", "ngram")
    assert by_lookup["text"] == by_model["text"]
    assert by_lookup["num_target_passes"] > by_model["num_target_passes"]


def test_a_seed_repeats_a_sampled_text_and_another_changes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = [run_json(capsys, "--temperature", "0.9", "--seed", s)["text"] for s in "778"]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.slow
def test_a_request_has_the_options_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    penalties = ["--frequency-penalty", "0.5", "--repetition-penalty", "1.2"]
    filters = ["--min-p", "0.05", "--top-k", "20", "--top-p", "0.9", "--presence-penalty", "0.1"]
    result = run_json(capsys, "--draft", "ngram", *penalties, *filters)
    options = sd.RequestOptions(0.05, 20, 0.9, 0.5, 0.1, 1.2)
    assert result["options"] == dataclasses.asdict(options)
    (target, params), _ = sd.load_embedded_pair()
    plain = sd.generate_plain(
        target,
        params,
        [sd.encode(PROMPT)],
        max_new_tokens=40,
        stop_token_ids=[sd.DOCUMENT_SEPARATOR],
        options=options,
    )
    assert result["text"] == sd.decode(plain.completions[0])
    assert result["identical_to_plain"] is True


@pytest.mark.slow
def test_synthetic_acceptance_has_the_length_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = run_json(capsys, "--method", "synthetic", "--acceptance-length", "3")
    assert result["mean_acceptance_length"] == 3
    assert result["unconditional_rates"] == [1, 1, 0]
    assert result["identical_to_plain"] is None


def test_the_block_rule_is_chosen_on_the_command_line() -> None:
    arguments = ["generate", PROMPT, "--method", "block"]
    config = options_lib.parse(arguments, sd.__version__).config
    assert config.rejection_sample_method == "block"


def test_synthetic_rates_are_read_from_the_command_line() -> None:
    rates = ["--acceptance-rates", "1,0.5,0.25,0,0,0"]
    arguments = ["generate", PROMPT, "--method", "synthetic", *rates]
    config = options_lib.parse(arguments, sd.__version__).config
    assert config.unconditional_rates == (1, 0.5, 0.25, 0, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "--temperature must be finite and not negative, but is -1.0"),
        (["--temperature", "nan"], "--temperature must be finite and not negative, but is nan"),
        (["--temperature", "hot"], "argument --temperature: invalid float value: 'hot'"),
        (["--num-speculative-tokens", "0"], "--num-speculative-tokens must be at least 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be in [1, 1003]"),
        (["--max-new-tokens", "2000"], "--max-new-tokens must be in [1, 1003]"),
        (["--top-p", "0"], "--top-p must be in (0, 1], but is 0.0"),
        (["--min-p", "2"], "--min-p must be in [0, 1], but is 2.0"),
        (["--top-k", "-1"], "--top-k must be in [0, 2147483648), but is -1"),
        (
            ["--repetition-penalty", "0"],
            "--repetition-penalty must be positive and finite, but is 0.0",
        ),
        (["--frequency-penalty", "inf"], "--frequency-penalty must be finite, but is inf"),
        (["--presence-penalty", "x"], "argument --presence-penalty: invalid float value: 'x'"),
        (["--seed", "-1"], "--seed must be in [0, 2**32), but is -1"),
        (["--repeats", "0"], "--repeats must be at least 1, but is 0"),
        (["--acceptance-length", "2"], "--acceptance-length needs --method synthetic"),
        (["--acceptance-rates", "1,1,1,1,1,1"], "--acceptance-rates needs --method synthetic"),
        (["--method", "synthetic"], "needs one of --acceptance-length and --acceptance-rates"),
        (
            ["--method", "synthetic", "--acceptance-length", "9"],
            "--acceptance-length must be in [1, 7], but is 9.0",
        ),
        (
            ["--method", "synthetic", "--acceptance-rates", "0.5,0.6,0,0,0,0"],
            "--acceptance-rates must be non-increasing",
        ),
        (
            ["--method", "synthetic", "--acceptance-rates", "1,1"],
            "--acceptance-rates must have --num-speculative-tokens=6 entries, but has 2",
        ),
        (["--acceptance-rates", "a,b"], "must be numbers separated by commas"),
        (["--draft", "oracle"], "--draft must be model or ngram without --target, but is 'oracle'"),
        (
            ["--target", ".", "--draft", "model"],
            "--draft must be a directory or ngram with --targe",
        ),
        (["--dtype", "float32"], "--dtype needs --target"),
        (["--target", ".", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--method", "strict"], "argument --method: invalid choice: 'strict'"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_is_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["generate", PROMPT, *arguments])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["generate"], "the following arguments are required: prompt"),
        (["generate", ""], "the prompt must not be empty"),
        (["generate", "x" * 2000], "the prompt must be shorter than 1024 bytes, but has 2000"),
        (["translate"], "invalid choice: 'translate'"),
    ],
    ids=["nothing", "no prompt", "empty prompt", "long prompt", "unknown command"],
)
def test_a_command_line_that_makes_no_sense_is_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


def test_a_bad_option_gives_no_traceback_and_exit_code_2() -> None:
    result = run("generate", PROMPT, "--num-speculative-tokens", "zero")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "jax-specdec generate: argument --num-speculative-tokens: invalid int value: 'zero'\n"
    )


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"jax-specdec {sd.__version__}\n"


def test_the_longest_text_is_what_the_embedded_models_were_trained_on() -> None:
    target, draft = sd.load_embedded_pair()
    for model in (target.model, draft.model):
        assert model.config.max_position_embeddings >= models_lib.MAX_LENGTH


def test_control_characters_of_a_text_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\n\tc\r\x07") == "a\ufffd[2Jb\n\tc\ufffd\ufffd"
