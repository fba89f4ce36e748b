"""The command line, run as a user runs it: mostly in this process, to share what is compiled."""

import io
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formats.checkpoints import CHECKPOINTS, copy, edit_json, edit_tensors, expected
from jax.experimental.compilation_cache import compilation_cache
from safetensors.numpy import load_file
from upper_floor import (
    OTHER_NAMES,
    drafters,
    generate_lib,
    load_models,
    load_served,
    loading,
    make_driver,
)
from upper_floor import cli_prompts as prompts_lib
from upper_floor import cli_run as run_lib
from upper_floor import cli_terminal as terminal
from upper_floor import parse as parse_line

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.__main__ import main

pytestmark = pytest.mark.newest

PROMPT = "def quicksort(items):"
NO_CACHE = "--no-compilation-cache"
# A tiny checkpoint, whose greedy text `transformers` wrote.
TINY = ["--target", str(CHECKPOINTS / "qwen2"), "--max-new-tokens", "24", NO_CACHE]
TINY_PROMPT, TINY_TEXT = (str(expected("qwen2")[key]) for key in ("prompt", "greedy_text"))
NUM_PROMPT_TOKENS = len(expected("qwen2")["prompt_token_ids"])
LINES = re.compile(
    r"(\d+) prompt tokens read, first token after \d+\.\d\d s; before that, \d+\.\d s to load and "
    r"compile\n(\d+) tokens at \d+ per second: [^;]*; \d+\.\d\d per target pass, mean acceptance "
    r"length (\d+\.\d\d|-)\n"
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jax_specdec", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command line that is refused says: one line and no output."""
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, NO_CACHE])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.BytesIO]:
    """Standard input that is no terminal; to be written to, then rewound."""
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(buffer))
    yield buffer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


# Generating


@pytest.mark.long
def test_generate_prints_the_text_and_two_lines_of_statistics(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["generate", TINY_PROMPT, *TINY])
    captured = capsys.readouterr()
    assert captured.out == TINY_PROMPT + TINY_TEXT + "\n"
    lines = LINES.fullmatch(captured.err)
    assert lines is not None
    assert lines[1] == str(NUM_PROMPT_TOKENS) and lines[2] == "24"
    assert "plain" in captured.err  # a lookup often offers nothing
    main(["generate", TINY_PROMPT, *TINY, "--no-prompt"])
    assert capsys.readouterr().out == TINY_TEXT + "\n"


@pytest.mark.long
def test_several_prompts_are_one_batch_printed_in_order(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(["generate", "Other", TINY_PROMPT, *TINY, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [request["prompt"] for request in found["requests"]] == ["Other", TINY_PROMPT]
    assert found["requests"][1]["text"] == TINY_TEXT
    assert found["num_tokens"] == 48 and found["num_target_passes"] <= 24
    (tmp_path / "prompt").write_text(TINY_PROMPT + "\n")
    main(["generate", "Other", "--prompt-file", str(tmp_path / "prompt"), *TINY])
    captured = capsys.readouterr()
    other = found["requests"][0]["text"]
    assert captured.out == (
        f"==> 1 of 2 <==\nOther{other}\n==> 2 of 2 <==\n{TINY_PROMPT}{TINY_TEXT}\n"
    )
    assert LINES.fullmatch(captured.err)


@pytest.mark.long
def test_json_holds_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", TINY_PROMPT, *TINY, "-t", "0.9", "-n", "8", "--json"])
    found = json.loads(capsys.readouterr().out)
    asked = {"temperature": 0.9, "max_new_tokens": 8, "stop_token_ids": [281, 282]}
    assert found["options"].items() >= asked.items()
    assert found["config"]["num_speculative_tokens"] == 4 and found["num_tokens"] <= 8
    assert "rows" not in found  # nobody asked to compare


def test_tokens_without_drafts_are_plain_and_no_bonus(capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", TINY_PROMPT, *TINY, "--json"])
    found = json.loads(capsys.readouterr().out)
    origins = [piece["origin"] for piece in found["requests"][0]["pieces"]]
    assert origins[0] == "plain"
    passes = found["num_verifications"] - found["num_drafts"]  # those without drafts
    assert origins.count("plain") == passes > 0
    assert found["tokens_per_target_pass"] == found["num_tokens"] / (found["num_verifications"])


def test_a_file_is_what_the_text_is_expected_to_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "expected").write_text(TINY_TEXT)
    main(["generate", TINY_PROMPT, *TINY, "--json", "--prediction", str(tmp_path / "expected")])
    found = json.loads(capsys.readouterr().out)
    assert found["requests"][0]["text"] == TINY_TEXT
    # Without it nothing is drafted: 24. The model did not write the tokens that its text has.
    assert found["num_target_passes"] <= 16 and found["num_accepted_tokens"] >= 8


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_text_that_drafts_made_late_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """Steps without drafts take 5 ms, those with drafts much longer, or as long; all emit one."""

    def steps(*_: object, **__: object) -> Iterator[lm.StepRecord]:
        one = np.ones(1, np.int32)
        for i in range(12):
            has_drafts = i % 2
            time.sleep(0.1 if has_drafts and is_slow else 0.005)
            token_ids = np.array([[37, -1]], np.int32)
            yield lm.StepRecord(token_ids, one, has_drafts * one, 0 * one, one)

    monkeypatch.setattr(run_lib, "generate_stream", steps)
    monkeypatch.setattr("jax_specdec.lm.cli.show._LEAST_SECONDS", 0.3)
    main(["generate", TINY_PROMPT, *TINY, "-n12"])
    last = capsys.readouterr().err.splitlines()[-1]
    found = re.fullmatch(r"Drafts cost more .*: 0\.\d s, and about 0\.\d s with --draft none", last)
    assert bool(found) == is_slow


@pytest.mark.long
@pytest.mark.parametrize("arguments", ["--draft=none", "-k0"])
def test_text_without_drafts_is_asked_for(
    capsys: pytest.CaptureFixture[str], arguments: str
) -> None:
    main(["generate", TINY_PROMPT, *TINY, "--json", arguments])
    found = json.loads(capsys.readouterr().out)
    assert found["requests"][0]["text"] == TINY_TEXT
    assert (found["num_draft_tokens"], found["num_target_passes"]) == (0, found["num_tokens"])


@pytest.mark.parametrize(
    ("arguments", "method", "budget", "is_fixed"),
    [
        ("--draft=none", "agreement", (0,), False),
        ("-k0", "agreement", (0,), False),
        ("--draft=ngram", "agreement", (0, 4), False),
        ("--draft=suffix -k2", "agreement", (0, 2), False),
        ("--draft=ngram --method=standard", "standard", (0, 4), True),
        ("", "standard", (0, 4), True),
        ("--draft=model --method=agreement", "agreement", (0, 4), False),
    ],
)
def test_a_server_drafts_where_it_pays_if_no_text_depends_on_it(
    arguments: str, method: str, budget: tuple[int, ...], is_fixed: bool
) -> None:
    options = parse("serve", *arguments.split())
    driver = make_driver(options, load_served(options))
    engine, choice = driver.engine, driver.draft_choice
    assert (engine.config.rejection_sample_method, engine.draft_budget) == (method, budget)
    assert choice is not None and choice.is_fixed == is_fixed
    assert engine.max_drafts(lm.RequestOptions()) == budget[-1]


def test_steps_of_a_server_read_prompts_if_asked_for() -> None:
    options = parse("serve", "--prompts-in-steps", "--chunk-size=128", "--plain-messages")
    assert options.plain_messages
    driver = make_driver(options, load_served(options))
    assert (driver.prompts_in_steps, driver.chunk_size) == (True, 128)
    options = parse("serve", "--exact")
    driver = make_driver(options, load_served(options))
    assert driver.engine.exact and driver.engine.config.rejection_sample_method == "agreement"
    assert driver.draft_choice is None  # it always drafts: a step without drafts costs as much


@pytest.mark.parametrize("command", [["generate", TINY_PROMPT], ["serve", "--port=0"]])
def test_a_model_that_depends_on_rows_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.delenv("JAX_SPECDEC_API_KEY", raising=False)
    right = lm.models.Llama.apply

    def by_row(self: Any, params: Any, groups: Any, *given: Any) -> Any:
        (output,), cache = right(self, params, groups, *given)
        row = jnp.arange(output.logits.shape[1], dtype=output.logits.dtype)
        return [output._replace(logits=output.logits + row[None, :, None])], cache

    monkeypatch.setattr(lm.models.Llama, "apply", by_row)
    wanted = "same bits in every row of a pass if exact, but on this device outputs.logits depends"
    assert wanted in refuse(capsys, *command, "--exact", *TINY[:2])


def test_a_stop_token_ends_the_text_and_is_not_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wanted = expected("qwen2")["greedy_token_ids"].tolist()
    index = wanted.index(38)
    target = copy("qwen2", tmp_path / "target")
    edit_json(target / "generation_config.json", eos_token_id=[282, 38])
    main(["generate", TINY_PROMPT, *TINY, "--target", str(target), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["num_tokens"] == index + 1 < len(wanted)
    decode = lm.load_tokenizer(target).decode
    assert found["requests"][0]["text"] == decode(wanted[:index]) != decode(wanted[: index + 1])


@pytest.mark.long
def test_comparing_shows_origins_the_text_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", TINY_PROMPT, *TINY, "--compare=1"])
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "Tokens:  accepted  recovered  bonus\n" in captured.out
    assert TINY_PROMPT + TINY_TEXT + "\n" in captured.out
    assert "standard verification at temperature T, 1 run each\n" in captured.out
    plain, speculative = (line.split() for line in captured.out.rstrip().splitlines()[-2:])
    assert plain[:5] == ["0", "plain", "24", "1.00", "-"]
    assert speculative[:4] == ["0", "ngram", "4", "24"] and speculative[-1] == "yes"


@pytest.mark.slow
def test_a_seed_repeats_a_sampled_text_and_another_changes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = []
    for seed in "778":
        main(["generate", TINY_PROMPT, *TINY, "--temperature", "0.9", "--seed", seed])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    main(["generate", TINY_PROMPT, *TINY, "--temperature", "0.9", "--top-k", "1"])
    assert capsys.readouterr().out == TINY_PROMPT + TINY_TEXT + "\n"


def test_a_text_that_cannot_be_verified_ends_with_code_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = copy("qwen2", tmp_path / "target")
    name = "model.norm.weight"  # finite itself, but not what is multiplied by it
    norm = np.full_like(load_file(target / "model.safetensors")[name], 3e38)
    edit_tensors(target / "model.safetensors", **{name: norm})
    with pytest.raises(SystemExit) as exit_:
        main(["generate", TINY_PROMPT, *TINY, "--target", str(target)])
    assert exit_.value.code == 1
    captured = capsys.readouterr()
    assert captured.out.startswith(TINY_PROMPT)
    last = captured.err.splitlines()[-1]
    assert last == "jax-specdec: text broke off: the target's logits there are not finite"


# Chat


def test_chat_answers_a_message_in_the_template(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = copy("qwen2", tmp_path / "target")
    template = (
        "{{ bos_token }}{% for message in messages %}<|turn|>{{ message.role }}: "
        "{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<|turn|>model:{% endif %}"
    )
    names = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **names}))
    own = [*TINY, "--target", str(target)]
    # The tokenizer itself begins a text that is no chat with <|begin|>.
    main(["generate", "<|turn|>user: Hi\n<|turn|>model:", *own, "--json"])
    wanted = json.loads(capsys.readouterr().out)["requests"][0]["text"]
    main(["generate", "--chat", "Hi", *own])
    assert capsys.readouterr().out == wanted + "\n"


def test_chat_without_a_template_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    error = refuse(capsys, "generate", "--chat", "Hi", *TINY)
    assert "has no chat template, neither chat_template.jinja nor one in tokenizer_" in error


# Benchmarks


@pytest.mark.slow
def test_bench_compares_drafters_numbers_of_drafts_and_temperatures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = ["--draft", "ngram", "--num-speculative-tokens", "2,6", "--temperature", "0,0.8"]
    main(["bench", TINY_PROMPT, *TINY, *own, "--repeats", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    ks = [row["config"] and row["config"]["num_speculative_tokens"] for row in rows]
    assert ks == [None, 2, 6] * 2
    assert [row["draft"] for row in rows] == [None, "ngram", "ngram"] * 2
    assert [row["temperature"] for row in rows] == [0] * 3 + [0.8] * 3
    assert [row["identical_to_plain"] for row in rows] == [None, True, True] + [None] * 3
    for row, plain in zip(rows, [rows[0]] * 3 + [rows[3]] * 3, strict=True):
        assert row["tokens_per_second"] == pytest.approx(row["num_tokens"] / row["seconds"])
        assert row["speedup"] == pytest.approx(
            row["tokens_per_second"] / plain["tokens_per_second"]
        )
        passes = row["num_target_passes"]
        assert row["tokens_per_target_pass"] == pytest.approx(row["num_tokens"] / passes)
    assert rows[0]["tokens_per_target_pass"] == 1 and rows[0]["num_tokens"] == 24

    main(["bench", TINY_PROMPT, *TINY, *own, "--repeats", "2"])
    captured = capsys.readouterr()
    assert captured.err == ""
    table, _, answer = captured.out.partition("Fastest on these prompts: ")
    lines = table.splitlines()
    fastest = r"(ngram with K = [26] \(\d+\.\d\d times plain decoding\)|plain decoding)"
    wanted = rf"{fastest} at temperature 0, {fastest} at temperature 0.8\."
    assert re.fullmatch(wanted, " ".join(answer.split()))
    assert max(map(len, lines)) <= 80
    cells = [cell for line in lines if len(cell := line.split()) > 2]
    assert [row[:3] for row in cells if row[1:2] == ["ngram"]] == [
        [t, "ngram", k] for t in ("0", "0.8") for k in "26"
    ]
    assert [row[1] for row in cells].count("plain") == 2


def test_rows_are_named_as_drafters_were_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    monkeypatch.chdir(tmp_path)
    for name in ("generate", "generate_plain"):
        monkeypatch.setattr(run_lib, name, fail)
    given = ["a/draft", "b/draft"]
    drafts = [f"--draft={copy('qwen2_draft', Path(name))}" for name in given]
    with pytest.raises(SystemExit):
        main(["bench", TINY_PROMPT, *TINY, *drafts, "-k4", "-t0", "--repeats=1"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[1] for row in rows if row[-1:] == ["failed"]] == ["plain", *given]


@pytest.mark.long
def test_a_row_that_fails_costs_no_other_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(*args: object, **given: object) -> object:
        if isinstance(given["drafter"], lm.SuffixDrafter):
            raise RuntimeError("RESOURCE_EXHAUSTED:\nno memory")
        return lm.generate_plain(*args, options=given["options"])

    monkeypatch.setattr(run_lib, "generate", generate)
    own = ["--draft=suffix", "--draft=ngram", "-k4", "-t0", "--repeats=1"]
    says = "suffix with K = 4 at temperature 0 failed: RuntimeError: RESOURCE_EXHAUSTED: no memory"
    for form in ([], ["--json"]):
        with pytest.raises(SystemExit) as exit_:
            main(["bench", TINY_PROMPT, *TINY, *own, *form])
        assert exit_.value.code == 1
        captured = capsys.readouterr()
        assert captured.err == f"jax-specdec bench: {says}\n"
        if form:
            plain, failed, row = json.loads(captured.out)["rows"]
            assert failed["error"] == says.partition("failed: ")[2]
            assert plain["error"] is row["error"] is None and row["num_tokens"] == 24
        else:
            rows = [line.split() for line in captured.out.splitlines()]
            assert ["0", "suffix", "4", *"----", "failed"] in rows
            assert any(row[:4] == ["0", "ngram", "4", "24"] for row in rows)
            assert "Fastest on these prompts: " in captured.out


def test_compilation_inside_of_compilation_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    record = jax.monitoring.record_event_duration_secs
    trace, compile_ = "jaxpr_trace_duration", "backend_compile_duration"
    with run_lib.compilations(names.append) as spans:
        for now, event, seconds in ((10, trace, 1), (11, trace, 3), (15, compile_, 1)):
            monkeypatch.setattr(run_lib.time, "perf_counter", lambda now=now: now)
            record(f"/jax/core/compile/{event}", seconds, fun_name="jit(f)")
        record("/jax/compilation_cache/cache_retrieval_time_sec", 100.0)
    record(f"/jax/core/compile/{trace}", 1)  # nobody listens any more
    assert spans == [(8, 11), (14, 15)] and names == ["jit(f)"]


# Prompts


def read(arguments: list[str]) -> list[str]:
    return prompts_lib.read_prompts(parse("generate", *arguments))


def test_prompts_come_from_arguments_files_and_standard_input(
    stdin: io.BytesIO, tmp_path: Path
) -> None:
    stdin.write("x = é\n\n".encode())
    stdin.seek(0)
    for name, data in {"unix": b"a\nb\n", "windows": b"\xef\xbb\xbfa\r\n", "bare": b" a"}.items():
        (tmp_path / name).write_bytes(data)
    files = [f"--prompt-file={tmp_path / name}" for name in ("unix", "windows", "bare")]
    assert read([*files, "first", "-"]) == ["first", "x = é\n", "a\nb", "a", " a"]


def test_a_pipe_is_read_where_no_prompt_is_given(stdin: io.BytesIO) -> None:
    stdin.write(b"from a pipe\n")
    stdin.seek(0)
    assert read(["given"]) == ["given"]
    assert read([]) == ["from a pipe"]


@pytest.mark.parametrize(
    ("arguments", "data", "message"),
    [
        ([], b"", "the prompt must not be empty, but standard input holds nothing"),
        ([], b"\n", "the prompt must not be empty, but standard input holds nothing"),
        (["-"], b"ab\xff", "standard input must be text in UTF-8, but byte 2 is 0xff"),
        (["-", "-"], b"a", "standard input (-) can be read once, but is asked for twice"),
        (["--prompt-file", "nowhere"], b"", "nowhere cannot be read: No such file or directory"),
        (["--prompt-file", "."], b"", ". cannot be read: Is a directory"),
        (["--prompt-file", "/dev/null"], b"", "must not be empty, but /dev/null holds nothing"),
        (["--prompt-file", "/dev/zero"], b"", "/dev/zero must hold at most 16777216 bytes, but"),
        (["x", "--draft=ngram", "--prediction=no"], b"", "no cannot be read: No such file"),
        (["x", "--draft=ngram", "--prediction=-"], b"\n", "the prediction must not be empty, but"),
        (["-", "--prediction=-"], b"a", "standard input (-) can be read once, but is asked for tw"),
        (["--prediction=-"], b"a", "for twice, once as the prompt, since there is no other"),
        (["x", "--prediction=-"], b"a", "--draft must look in texts for --prediction, as ngram, s"),
        (["x", "--draft=none", "--prediction=-"], b"a", "--draft must look in texts for --predic"),
        (["--prompt-file", "a\0b"], b"", "cannot be read: embedded null byte"),
    ],
    ids=str,
)
def test_a_prompt_that_cannot_be_read_gets_one_line(
    capsys: pytest.CaptureFixture[str],
    stdin: io.BytesIO,
    arguments: list[str],
    data: bytes,
    message: str,
) -> None:
    stdin.write(data)
    stdin.seek(0)
    assert message in refuse(capsys, "generate", *arguments)


def test_a_terminal_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    message = "a prompt is needed: an argument, --prompt-file FILE, or standard input (-)"
    assert message in refuse(capsys, "generate")


def test_a_text_without_a_budget_ends_where_the_model_does() -> None:
    options = parse("generate", "x" * 1000)
    for prompts, room in ((["x" * 1000, "y"], 24), (["y"], 256)):
        assert load_models(options, prompts)[-1] == room


# Streams


def test_a_terminal_gets_colours_and_a_spinner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    shown = {}
    generate_lib._prefill.clear_cache()  # as in a new process
    for name, wanted in (("colours", f"reading {NUM_PROMPT_TOKENS} prompt tokens"), ("none", "")):
        out, err = Terminal(), Terminal()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        main(["generate", TINY_PROMPT, *TINY])
        shown[name] = out.getvalue()
        for text in ("loading the models", "compiling", wanted):
            assert text in err.getvalue()
        monkeypatch.setenv("NO_COLOR", "1")
    assert shown["none"] == TINY_PROMPT + terminal.printable(TINY_TEXT) + "\n"
    assert "\x1b[2m" in shown["colours"]
    assert re.sub(r"\x1b\[[\d;]*m", "", shown["colours"]) == shown["none"]


def test_what_would_command_a_terminal_is_shown_as_an_escape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    hostile = "a\x1b[2J\x07\x7f\x9b31m\u202eb\u2066\u200f\u061c\n\tc"
    shown = "a\\x1b[2J\\x07\\x7f\\x9b31m\\u202eb\\u2066\\u200f\\u061c\n\tc"
    for stream, wanted in ((Terminal(), shown), (io.StringIO(), hostile)):
        monkeypatch.setattr(sys, "stdout", stream)
        terminal.write(hostile)
        assert stream.getvalue() == wanted
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(SystemExit):
        main(["generate", "x", f"--draft={hostile}"])
    main_error = sys.stderr.getvalue()
    with pytest.raises(SystemExit):
        main(["generate", "x", "--prompt-file=\x9b2J"])
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", main_error + sys.stderr.getvalue())


def test_a_prompt_is_escaped_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    prompt = f"\x9b2J\u202e{TINY_PROMPT[:4]}"  # no longer than others: one program
    for stream, wanted in ((Terminal(), terminal.printable(prompt)), (io.StringIO(), prompt)):
        monkeypatch.setattr(sys, "stdout", stream)
        main(["generate", prompt, *TINY, "-n", "4"])
        assert stream.getvalue().startswith(wanted)


def test_an_interrupt_leaves_a_cursor_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with terminal.progress("working", 2) as begin:
        begin("one")
        terminal.leave_line()
        shown = sys.stderr.getvalue()
        assert shown.endswith("\x1b[?25h\n") and shown.count("\x1b[?25l") == 1
    for stream in (io.StringIO(), Full()):
        monkeypatch.setattr(sys, "stderr", stream)
        terminal.leave_line()  # what is no terminal gets nothing


@pytest.mark.long
def test_text_and_tables_are_ascii_where_the_stream_is(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    main(["generate", TINY_PROMPT, *TINY, "--compare=1"])
    shown, text = buffer.getvalue().decode("ascii"), TINY_PROMPT + TINY_TEXT + "\n"
    assert not text.isascii() and text.encode("ascii", "backslashreplace").decode() in shown
    assert "\n" + 80 * "-" + "\n" in shown and re.search(r"yes +\|", shown) and "\\u25" not in shown


def test_a_reader_that_leaves_ends_the_command_quietly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as exit_:
            main(["generate", TINY_PROMPT, *TINY])
    assert exit_.value.code == 141  # what a shell says of a program that SIGPIPE ended
    assert capsys.readouterr().err == ""


def test_a_full_disk_is_named_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(SystemExit) as exit_:
        main(["generate", TINY_PROMPT, *TINY])
    assert exit_.value.code == 1
    error = capsys.readouterr().err
    assert error == "jax-specdec: output cannot be written: No space left on device\n"


# Interrupts, in processes of their own


def interrupt(command: list[str], when: str, **environment: str) -> tuple[int, str, list[str]]:
    """Runs a command, and interrupts it once a line of standard error holds `when`.

    Returns:
      The exit code, standard output, and the lines of standard error from then on.
    """
    environment = os.environ | environment | {"PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if when in line:
                process.send_signal(signal.SIGINT)
                break
        out, rest = process.communicate(timeout=60)
        return process.returncode, out, rest.splitlines()


@pytest.mark.long
def test_an_interrupt_while_compiling_ends_it_in_one_line() -> None:
    command = [sys.executable, "-m", "jax_specdec", "generate", PROMPT, NO_CACHE]
    compiling = "Compiling jit(prefilled_state)"
    code, out, lines = interrupt(command, compiling, JAX_LOG_COMPILES="1")
    assert (code, out) == (128 + signal.SIGINT, "")
    compiled = "Finished XLA compilation of jit(prefilled_state)"
    assert [line for line in lines if compiled in line] == []
    assert lines[-1] == "jax-specdec: interrupted"
    assert "Traceback" not in "".join(lines)


# Compiled programs


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache directory for the user, and JAX's settings as they were."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        yield tmp_path / "jax_specdec"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.mark.long
def test_compiled_programs_are_kept_for_the_user_alone(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["generate", TINY_PROMPT, *TINY])
    assert not cache.exists()  # --no-compilation-cache
    kept = ["generate", TINY_PROMPT, *(argument for argument in TINY if argument != NO_CACHE)]
    files: list[dict[str, int]] = []
    for _ in range(2):
        for program in (generate_lib._prefill, generate_lib._step):
            program.clear_cache()  # as in a new process
        main(kept)
        files.append({path.name: path.stat().st_mtime_ns for path in cache.glob("*-cache")})
    assert any("_step" in name for name in files[0])
    assert files[0].items() <= files[1].items()  # what takes no time to compile may come later
    assert cache.stat().st_mode & 0o777 == 0o700
    assert capsys.readouterr().out == 3 * (TINY_PROMPT + TINY_TEXT + "\n")


def test_a_folder_that_the_user_has_chosen_is_left_alone(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jax.config.update("jax_compilation_cache_dir", str(cache.parent / "own"))
    main(["generate", TINY_PROMPT, *(x for x in TINY if x != NO_CACHE)])
    assert jax.config.jax_compilation_cache_dir == str(cache.parent / "own")
    assert not cache.exists()


@pytest.mark.parametrize("place", ["a file", "no home"])
def test_where_no_folder_can_be_made_programs_are_compiled(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    if place == "a file":
        cache.write_text("")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setenv("HOME", "/dev/null")
    main(["generate", TINY_PROMPT, *(x for x in TINY if x != NO_CACHE)])
    captured = capsys.readouterr()
    assert captured.out == TINY_PROMPT + TINY_TEXT + "\n"
    assert LINES.fullmatch(captured.err) and jax.config.jax_compilation_cache_dir is None


# Options


def parse(*arguments: str) -> Any:
    return parse_line(arguments, "0")


def test_a_request_has_the_options_of_the_command_line() -> None:
    asked: dict[str, float] = dict(
        min_p=0.05,
        top_k=20,
        top_p=0.9,
        frequency_penalty=0.5,
        presence_penalty=0.1,
        repetition_penalty=1.2,
    )
    named = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items()]
    found = vars(parse("generate", PROMPT, *named).request)
    assert {name: found[name] for name in asked} == asked


@pytest.mark.parametrize("flag", ["--weights=int8", "--draft-weights=int8"])
def test_matrices_are_in_8_bits_where_a_gpu_asks_for_that(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    def in_int8(params: Any) -> bool:
        return any(x.dtype == jnp.int8 for x in jax.tree.leaves(params))

    for backend in ("gpu", "cpu"):
        is_on = backend == "gpu"
        monkeypatch.setattr(jax, "default_backend", lambda name=backend: name)
        for draft in ("model", "dspark"):
            models, *_ = load_models(parse("generate", "x", f"--draft={draft}", flag))
            target, head = models.target.params, models.drafters[draft].params
            assert in_int8(target) == (is_on and flag == "--weights=int8")
            # The head shares the target's output matrix, or has an int8 copy of it.
            is_shared = draft == "dspark" and not (is_on and "draft" in flag)
            output = target.get("lm_head", target["embed_tokens"])
            assert (head.get("lm_head") is output) == is_shared
            assert in_int8(head) == (is_on and (is_shared or "draft" in flag))
        told = "Weights are not held in int8, which is slower on a CPU.\n"
        assert capsys.readouterr().err == ("" if is_on else 2 * told)


def test_compare_makes_five_runs_unless_it_is_told() -> None:
    for arguments, repeats in (([], None), (["--compare"], 5), (["--compare", "2"], 2)):
        assert parse("generate", PROMPT, *arguments).repeats == repeats
    options = parse("generate", "--compare", "--", "-x")
    assert (options.repeats, options.prompts) == (5, ("-x",))


def test_bench_compares_two_drafters_unless_it_is_told() -> None:
    options = parse("bench", PROMPT)
    assert options.drafters == ("model", "ngram") and options.temperatures == (0.0, 0.8)
    assert [config.num_speculative_tokens for config in options.configs] == [2, 4, 6]
    options = parse("bench", PROMPT, "--draft=ngram", "--draft=model", "--draft=ngram", "-t1,1")
    assert options.drafters == ("ngram", "model") and options.temperatures == (1.0,)


def test_every_drafter_drafts_as_many_tokens_by_default() -> None:
    for arguments in ([], ["--draft", "ngram"], ["--target", "somewhere"], ["--draft", "eagle3"]):
        assert parse("generate", "text", *arguments).config.num_speculative_tokens == 4


def test_no_reader_of_a_drafter_reads_weights_before_those_of_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("load_embedded_pair", "load_embedded_head"):
        monkeypatch.setattr(lm, name, None)
    names = [kind.name for kind in drafters.DRAFTERS if not kind.name.endswith("DIR")]
    loads = {name: drafters.kind_of_drafter(name).read(drafters.Given(None), "") for name in names}
    assert "model" in loads
    monkeypatch.undo()
    target, _ = lm.load_embedded_pair()
    assert type(loads["none"](target).drafter).__name__ == "NoDrafter"


def test_a_row_of_the_table_is_all_that_a_drafter_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files: the drafter's own, and `lm/drafters.py`."""

    def read(given: drafters.Given, directory: str) -> drafters.Load:
        return lambda target: drafters.Draft(lm.NGramDrafter(1, int(directory)))

    row = drafters.DrafterKind("short:DIR", "a lookup of short matches", read, has_weights=False)
    monkeypatch.setattr(drafters, "DRAFTERS", (*drafters.DRAFTERS, row))
    models, *_ = load_models(parse("generate", "x", "--draft=short:3"))
    assert models.drafters["short:3"].drafter == lm.NGramDrafter(1, 3)
    assert parse("serve", "--draft=short:3").config.rejection_sample_method == "agreement"
    assert "a lookup of short matches (short:DIR)" in drafters.described()


def test_a_rule_is_chosen_on_the_command_line() -> None:
    for method in ("block", "agreement"):
        config = parse("generate", PROMPT, "--method", method).config
        assert config.rejection_sample_method == method
    rates = ["--acceptance-rates", "1,0.5,0.25,0"]
    config = parse("generate", PROMPT, "--method", "synthetic", *rates).config
    assert config.unconditional_rates == (1, 0.5, 0.25, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate --temperature=-1", "--temperature must"),
        ("generate --temperature=hot", "-t/--temperature: must be a number, but it is 'hot'"),
        ("generate -kzero", "generate: argument -k/--num-speculative-tokens: must be an integer"),
        ("generate --max-new-tokens=0", "--max-new-tokens must"),
        ("generate -n many", "-n/--max-new-tokens: must be an integer, but it is 'many'"),
        ("generate --top-k=.5", "argument --top-k: must be an integer, but it is '.5'"),
        ("generate --top-p=high", "argument --top-p: must be a number, but it is 'high'"),
        ("generate x --max-new-tokens=2000", "--max-new-tokens must"),
        ("generate --top-p=0", "--top-p must"),
        ("generate --seed=-1", "--seed must"),
        ("generate --compare=0", "--compare must"),
        ("generate --compare text", "a number of runs, but it is 'text'; a prompt goes before it"),
        ("generate --acceptance-length=2", "--acceptance-length needs --method synthetic"),
        ("generate --method=synthetic", "needs one of --acceptance-length and --acceptance-rates"),
        ("generate --method=synthetic --acceptance-length=9", "--acceptance-length must"),
        ("generate --method=synthetic --acceptance-rates=.5,.6,0,0", "--acceptance-rates[1] must"),
        ("generate --method=synthetic --acceptance-rates=1,1", "--acceptance-rates must"),
        ("generate --acceptance-rates=a,b", "must be numbers separated by commas"),
        (
            "generate --target=. --draft=model",
            "must be DIR, eagle3:DIR, block:DIR, gemma:DIR, ngram",
        ),
        ("generate --draft=eagle3:", "--draft eagle3: must be followed by the directory of a head"),
        (
            "generate --draft=oracle",
            "must be eagle3:DIR, block:DIR, ngram, suffix, model, eagle3, dflash, dspark or none",
        ),
        ("generate --draft=suffix+ngram", "--draft suffix+ must be followed by a head or a model"),
        ("generate --draft=suffix+none", "--draft suffix+ must be followed by a head or a model"),
        ("generate x --draft=none --compare", "--draft none is plain decoding, which is compared"),
        ("bench x --draft=none", "--draft none is plain decoding, which is compared anyway"),
        ("generate x -k0 --tree=8", "--tree needs --draft eagle3:DIR"),
        ("generate x --exact --draft=eagle3 --tree=8", "--exact cannot be given with --tree"),
        ("serve --exact --prompts-in-steps", "--exact cannot be given with --prompts-in-steps"),
        ("serve --exact --method=block", "--exact needs --method agreement, but it is 'block'"),
        ("generate x --exact --method=standard", "--exact needs --method agreement, but it is 's"),
        ("serve --draft=eagle3 --history=9", "--history needs --draft suffix, or suffix+ before"),
        ("serve --draft=suffix --history=-1", "--history must be in [0, 16777216]"),
        ("generate --dtype=float32", "--dtype needs --target"),
        ("generate --weights=int4", "argument --weights: invalid choice: 'int4'"),
        ("generate --draft=ngram --draft-weights=int8", "--draft-weights needs a draft model or a"),
        ("generate --chat", "--chat needs --target, whose tokenizer has the chat template"),
        ("generate --method=strict", "argument --method: invalid choice: 'strict'"),
        ("generate --frobnicate", "unrecognized arguments: --frobnicate\n"),
        ("generate --temprature=1", "arguments: --temprature=1; did you mean '--temperature'?"),
        ("serve a --target=b", "one target must be given, but there are two: 'a' and --target 'b'"),
        ("serve --model a", "unrecognized arguments: --model; did you mean '--target'?"),
        ("serve a --max_model_len=9", "--max_model_len=9; did you mean '--max-length'?"),
        ("serve a --enable-prefix-caching", "; prompts that begin alike are read once by default"),
        ("serve a --no-enable-prefix-caching", "; did you mean '--prefix-caching off'?"),
        ("serve a -tp 2", "arguments: -tp 2; a command runs on one device; in the library, Tensor"),
        (
            "serve a --api-key",
            "; the key is read from $JAX_SPECDEC_API_KEY or from a file, --api-k",
        ),
        ("generate x --max-num-seqs=4", "--max-num-seqs=4; jax-specdec serve has --num-slots"),
        ("generate x --version", "unrecognized arguments: --version; jax-specdec has --version"),
        ("bench x --host=::1", "unrecognized arguments: --host=::1; jax-specdec serve has --host"),
        ("generate x --draft=dspark:y", ", but it is 'dspark:y': did you mean 'block:y'?"),
        ("serve a --draft=suffix+eagle:y", "'suffix+eagle:y': did you mean 'suffix+eagle3:y'?"),
        ("serve a --draft=dspark", ", but it is 'dspark': a head of another target is block:DIR"),
        ("serve a --draft=eagle3", ", but it is 'eagle3': a head of another target is eagle3:DIR"),
        ("generate x --draft=block:dspark", "the head of the embedded target is --draft dspark."),
        (
            "serve . --draft=eagle4:y",
            "DIR, eagle3:DIR, block:DIR, gemma:DIR, ngram, suffix or none",
        ),
        ("serve . --draft=eagle4:y", "is neither such a directory nor a prefix 'eagle4:'\n"),
        ("serve . --draft=hf:OWNER/MODEL", "neither such a directory nor a prefix 'hf:'\n"),
        ("serve . --draft=model:y", "neither such a directory nor a prefix 'model:'\n"),
        ("bench x --draft=eagle4:y", "be eagle3:DIR, block:DIR, ngram, suffix, model, eagle3, d"),
        ("serve . --draft=Gemma:y", "but it is 'Gemma:y': did you mean 'gemma:y'?"),
        ("serve . --draft=suffix+DSpark:y", "'suffix+DSpark:y': did you mean 'suffix+block:y'?"),
        ("serve . --draft=NGRAM", "but it is 'NGRAM': did you mean 'ngram'?"),
        ("generate x --draft=Suffix+EAGLE3", "did you mean 'suffix+eagle3'?"),
        ("generate x --draft=suffix+", "as in suffix+eagle3, but it is 'suffix+'"),
        ("generate x --draft=suffix+suffix+eagle3", "but it is 'suffix+suffix+eagle3'"),
        ("serve . --draft=", "suffix or none with --target, but it is ''\n"),
        ("serve . '--draft=gemma: '", "--draft gemma: must be followed by the directory of a head"),
        ("generate x --target=", "--target must be the directory of a checkpoint, but it is ''"),
        ("serve ''", "--target must be the directory of a checkpoint, but it is ''"),
        (
            "generate x --target=eagle3:y",
            "it is 'eagle3:y': eagle3:DIR is a drafter, which --draft",
        ),
        ("generate x --target=a/b:latest", "a/b:latest does not exist.\n"),
        ("generate x --draft=eagle3:nowhere", "nowhere does not exist; `hf download OWNER/nowhere"),
        (
            f"generate x --draft=eagle3:{__file__}",
            "is a file, but a checkpoint must be a directory",
        ),
        (
            f"generate x --draft=block:{Path(__file__).parent}",
            "a checkpoint directory must hold it",
        ),
        ("generate ''", "the prompt must not be empty"),
        (f"generate {2000 * 'x'}", "the prompt must be shorter than 1024 bytes, but has 2000"),
        ("bench x --repeats=0", "--repeats must"),
        ("bench x -k2,x", "must be integers separated by commas"),
        ("serve --port=0 --host=0.0.0.0", "--host 0.0.0.0 needs a key, in $JAX_SPECDEC_API_KEY"),
        ("serve --port=0 --host=256.1.1.1", "cannot be listened on"),
        ("serve --port=70000", "--port must be in [0, 65535], but it is 70000"),
        ("serve --max-logprobs=21", "--max-logprobs must be in [0, 20]"),
        ("serve --api-key-file=/nowhere", "/nowhere cannot be read"),
        ("serve --max-queue=0", "--max-queue must be in"),
        ("serve --client-seconds=0", "--client-seconds must be in"),
        ("serve --chunk-size=0", "--chunk-size must be in"),
        ("serve --port=0 --chunk-size=100", "--chunk-size must be one of 64, 128, 256, but is 100"),
        ("generate x -k2 --max-drafts=3", "--max-drafts must be in [0, 2], but it is 3"),
    ],
    ids=lambda value: value[:60],
)
def test_a_wrong_command_line_gets_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    message: str,
) -> None:
    monkeypatch.delenv("JAX_SPECDEC_API_KEY", raising=False)
    assert message in refuse(capsys, *shlex.split(arguments))


FAMILIES = "Llama, Qwen2, Qwen3, Gemma 2, Gemma 3 and Gemma 4"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "usage: jax-specdec [-h] [--version] COMMAND ..."),
        (["--version"], f"jax-specdec {sd.__version__}\n"),
        (["generate", "--help"], "texts go to standard output, everything else to standard error."),
        (["generate", "--help"], f"Hugging Face checkpoints of {FAMILIES}."),
        (
            ["serve", "--help"],
            f"Hugging Face checkpoints of {FAMILIES}, to clients of OpenAI's API",
        ),
    ],
)
def test_help_and_version_are_printed(
    capsys: pytest.CaptureFixture[str], arguments: list[str], wanted: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 0
    assert " ".join(wanted.split()) in " ".join(capsys.readouterr().out.split())


def test_names_of_others_lead_to_options_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And the page about vLLM has the table of them."""
    for command in ("generate", "bench", "serve"):
        with pytest.raises(SystemExit):
            parse(command, "--help")
    option = r"--[a-z][-a-z0-9]*"
    own = {*re.findall(option, capsys.readouterr().out), "--local-dir"}
    rows = []
    for ours, names in itertools.groupby(OTHER_NAMES, OTHER_NAMES.get):
        assert set(re.findall(option, ours)) <= own
        # Options are code: all of an option with its value, and those in a sentence.
        options = r"(^--.*|`.*?`|(?<!\S)-[-a-z]+)"
        shown = re.sub(options, lambda found: f"`{found[0].strip('`')}`", ours)
        rows.append(f"| {', '.join(f'`{name}`' for name in names)} | {shown} |\n")
    page = (Path(__file__).parents[1] / "docs" / "vllm.md").read_text("utf-8")
    assert "".join(rows) in page


def test_options_come_after_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--target", "x", "serve")
    says = "--target must come after a command, as in jax-specdec generate --target\n"
    assert capsys.readouterr().err == f"jax-specdec: {says}"


def test_a_server_is_given_its_target_as_that_of_others() -> None:
    for arguments in (["a"], ["a", "--draft=ngram"], ["--draft", "ngram", "a"], ["--target=a"]):
        assert parse("serve", *arguments).target == Path("a")
    assert parse("serve").target is None


def test_the_commands_in_the_documents_are_understood() -> None:
    root = Path(__file__).parents[1]
    commands = []
    for path in (root / "README.md", *(root / "docs").glob("*.md")):
        blocks = re.findall(r"^```sh\n(.*?)^```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE)
        commands += re.findall(
            r'jax-specdec ((?:generate|bench)(?: "[^"]*"| [^"\s]+)*)', "".join(blocks)
        )
    assert len(commands) >= 8
    for command in commands:
        parse(*shlex.split(command, comments=True))


def test_the_longest_text_is_what_models_were_trained_on() -> None:
    target, draft = lm.load_embedded_pair()
    for model in (target.model, draft.model):
        assert model.config.max_position_embeddings >= loading.MAX_LENGTH
        assert model.vocab_size == loading.read_target_text(None).vocab_size
