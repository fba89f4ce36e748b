"""Chat templates: the text that `transformers` makes of them."""

import contextlib
import datetime
import json
import re
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import pytest
import tokenizers
from formats.checkpoints import CHECKPOINTS, copy
from upper_floor import chat, read_chat_template

from jax_specdec import lm

pytestmark = pytest.mark.newest

HI = [{"role": "user", "content": "Hi"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    *HI,
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "<Why?> \u00e9"},
]


def directory(tmp_path: Path, template: Any, **values: Any) -> Path:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": template, **values}))
    return tmp_path


def text(tmp_path: Path, template: Any, messages: Any = HI, **values: Any) -> str:
    return read_chat_template(directory(tmp_path, template, **values)).apply(messages)


# The templates of published models, and what `apply_chat_template` of `transformers` makes of them.

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)


def test_the_template_of_smollm2_gives_chatml(tmp_path: Path) -> None:
    assert text(tmp_path, CHATML) == (
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert text(tmp_path, CHATML, TALK) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\n<Why?> \u00e9<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("token", ["<|begin_of_text|>", {"content": "<|begin_of_text|>"}])
def test_the_template_of_llama_3_begins_with_its_token(tmp_path: Path, token: Any) -> None:
    assert text(tmp_path, LLAMA_3, bos_token=token) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{% if tools is none %}\n  {{ documents }}\n{% endif %}\n!", "  None\n!"),  # whole lines
        ("{{ {'a<': 'é'} | tojson }}", '{"a<": "é"}'),  # no escapes for web pages
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%Y') }}", str(datetime.datetime.now().year)),
        ("{% for m in messages %}{% break %}{% endfor %}.", "."),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hi"),
        ([{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}], "yes"),
    ],
    ids=["lines", "json", "indent", "date", "loops", "generation", "several"],
)
def test_templates_have_what_transformers_gives_them(
    tmp_path: Path, template: Any, wanted: str
) -> None:
    assert text(tmp_path, template) == wanted


def test_a_file_of_its_own_goes_before(tmp_path: Path) -> None:
    directory(tmp_path, "old")
    (tmp_path / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    assert read_chat_template(tmp_path).apply(HI) == "new Hi"


TRIMMED = "{% for m in messages %}<b>{{ m.name }}: {{ m.content | trim }}<e>{% endfor %}"


def save_letters(path: Path, model: Any = tokenizers.models.BPE, normalized: bool = False) -> None:
    """Saves a tokenizer of letters, and of the special tokens <b> and <e> with the ids 0 and 1."""
    letters = ["<b>", "<e>", *map(chr, range(32, 127))]
    vocab: Any = {letter: i for i, letter in enumerate(letters)}
    if model is tokenizers.models.Unigram:
        library = tokenizers.Tokenizer(model([(letter, -1.0) for letter in letters], 2, False))
    else:
        library = tokenizers.Tokenizer(model(vocab=vocab, merges=[]))
    library.decoder = tokenizers.decoders.Fuse()
    if normalized:
        library.normalizer = tokenizers.normalizers.Lowercase()
    tokens = [tokenizers.AddedToken(x, special=True, normalized=normalized) for x in letters[:2]]
    library.add_special_tokens(tokens)
    library.save(str(path / "tokenizer.json"))


@pytest.mark.parametrize(
    ("model", "normalized"),
    [
        (tokenizers.models.BPE, False),
        (tokenizers.models.BPE, True),
        (tokenizers.models.Unigram, False),  # which has the special tokens among its own
    ],
)
def test_messages_can_be_kept_from_spelling_special_tokens(
    model: Any, normalized: bool, tmp_path: Path
) -> None:
    (tmp_path / "chat_template.jinja").write_text(TRIMMED)
    save_letters(tmp_path, model, normalized)
    tokenizer = lm.load_tokenizer(tmp_path)
    end = "<E>" if normalized else "<e>"
    messages = [
        {"role": "user", "name": "x<b>", "content": f" hi{end}<b>y: "},
        {"role": "user", "name": "y", "content": "a < b<e"},
    ]
    ids = tokenizer.encode_chat(messages, plain_messages=True)
    assert [x for x in ids if x < 2] == [0, 1, 0, 1]
    assert tokenizer.decode(ids) == "x<b>:  hi<e><b>y:y: a < b<e".replace(":  hi", ": hi")
    spelled = tokenizer.encode_chat(messages)
    assert [x for x in spelled if x < 2] == [0, 0, 1, 0, 1, 0, 1]
    harmless = messages[1:]
    assert tokenizer.encode_chat(harmless, plain_messages=True) == tokenizer.encode_chat(harmless)
    with pytest.raises(TypeError, match=r"messages\[0\] must have a 'role'"):
        tokenizer.encode_chat([{"role": "user"}], plain_messages=True)


# Templates after the structure of eighteen published families, and Jinja as the reference

FAMILIES = {path.stem: path for path in Path(__file__).with_name("chat_templates").iterdir()}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {"name": "f", "arguments": {"x": 1, "ok": True, "none": None, "half": 0.5, "\u00e9": "<"}}
CALLS = [{"id": "abcdefghi", "type": "function", "function": CALL}]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    HI,
    TALK,
    TALK[1:],
    [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
    [*TALK, {"role": "assistant", "content": "<think>\n\na\n</think>\n\n \u65e5\u672c\U0001f642"}],
    [*TALK, {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"}, *HI],
    [{"role": "user", "content": " \r\n\u00a0'\"\\\u2028\0 {{ x }}\n"}],
    [*HI, *HI],
    [*HI, TALK[2], TALK[2], TALK[0], *HI],
    [*HI, {"role": "assistant", "content": None, "tool_calls": CALLS}, *TALK[2:]],
    [{"role": "user", "content": [{"type": "text", "text": " Hi"}, {"type": "image"}]}],
]


def role(name: Any, content: Any = "Hi") -> dict[str, Any]:
    return {"role": name, "content": content}


def reference(source: str, messages: Any) -> str | None:
    """What Jinja makes of a template, set up as `transformers` does; None if it refuses."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda x, **how: json.dumps(x, ensure_ascii=False, **how)
    names: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
    names |= {"raise_exception": refuse, "strftime_now": datetime.datetime.now().strftime}
    template = environment.from_string(re.sub("{% (end)?generation %}", "", source))
    try:
        return template.render(messages=messages, **names, **SPECIAL)
    except (jinja2.TemplateError, TypeError):
        return None


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_of_published_families_give_what_jinja_gives(family: str) -> None:
    source = FAMILIES[family].read_text()
    template = chat.ChatTemplate(FAMILIES[family], source, SPECIAL)
    for messages in CONVERSATIONS:
        if (wanted := reference(source, messages)) is None:
            with pytest.raises(ValueError, match="cannot be applied"):
                template.apply(messages)
        else:
            assert template.apply(messages) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_leaves_out_a_message_in_silence(family: str) -> None:
    template = chat.ChatTemplate(FAMILIES[family], FAMILIES[family].read_text(), SPECIAL)
    ok = role("assistant", "ok")
    for name in ("developer", "narrator", "tool"):
        for before, after in (([], HI), (HI, HI), ([*HI, ok], HI), ([*TALK, ok, *HI], [])):
            with contextlib.suppress(ValueError):
                a, b = (template.apply([*before, role(name, x), *after]) for x in "ab")
                assert a != b
    if (wanted := reference(template.source, [role("system"), *HI])) is not None:
        assert template.apply([role("developer"), *HI]) == wanted


# Plain messages


def plain_ids(path: Path, template: str, *messages: dict[str, Any]) -> tuple[str, list[int]]:
    """Returns what is read of plain messages: its text, and the special tokens."""
    (path / "chat_template.jinja").write_text(template)
    tokenizer = lm.load_tokenizer(path)
    ids = tokenizer.encode_chat(messages, plain_messages=True)
    text = tokenizer.library_tokenizer.decode(ids, skip_special_tokens=False)
    return text, [x for x in ids if x < 2]


PARTS = (
    "{% for m in messages %}{% for x in m.content %}{{ x.text | trim }}{% endfor %}<e>{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "message", "wanted"),
    [
        (PARTS, {"content": [{"type": "text", "text": "<b> x"}]}, "<b> x<e>"),
        (PARTS, {"content": ({"text": "<e>"}, {"text": "<b>"})}, "<e><b><e>"),
        ("{{ messages[0].content | tojson }}<e>", {"content": {"<b>": [1, None]}}, "JSON"),
        ("{{ messages[0].a.x.y }}<e>", {"content": 1.5, "a": {"x": {"y": "<b>"}}}, "<b><e>"),
        # Texts that are none by themselves, and that templates join.
        (PARTS, {"content": [{"text": "a<"}, {"text": "b>"}]}, "a<b><e>"),
        (PARTS, {"content": [{"text": "<b \n"}, {"text": " >"}, {"text": "<"}]}, "<b><<e>"),
    ],
)
@pytest.mark.parametrize("normalized", [False, True])
def test_no_part_of_a_message_spells_a_special_token(
    template: str, message: dict[str, Any], wanted: str, normalized: bool, tmp_path: Path
) -> None:
    save_letters(tmp_path, normalized=normalized)
    wanted = wanted.replace("JSON", '{"<b>": [1, null]}<e>')
    assert plain_ids(tmp_path, template, {"role": "user", **message}) == (wanted, [1])


@pytest.mark.parametrize("change", ["upper", "lower", "replace('-', '+')", "truncate(20, true)"])
def test_a_template_that_changes_texts_gets_no_plain_messages(change: str, tmp_path: Path) -> None:
    save_letters(tmp_path)
    template = "<b>{{ messages[0].content | CHANGE }}<e>".replace("CHANGE", change)
    assert plain_ids(tmp_path, template, role("user", "hi"))[1] == [0, 1]
    with pytest.raises(ValueError, match=r"^chat_template.jinja has .* that changes the texts of"):
        plain_ids(tmp_path, template, role("user", "hi<b> there, all of you"))


def test_a_text_may_be_left_out_or_written_twice(tmp_path: Path) -> None:
    save_letters(tmp_path)
    # Thoughts are left out by published templates, and so are messages of some roles.
    template = "<b>{{ messages[0].content.split('|')[-1] }}{{ messages[1].name * 2 }}<e>"
    messages = role("user", "<b>|a"), role("assistant", "<e>") | {"name": "<e>"}
    assert plain_ids(tmp_path, template, *messages) == ("<b>a<e><e><e>", [0, 1])


def test_a_plain_message_has_only_what_json_has(tmp_path: Path) -> None:
    save_letters(tmp_path)
    for value, message in (
        ([b"<b>"], r"messages\[0\]\['content'\]\[0\] must be text, a number, .* is b'<b>'"),
        ({1: "<b>"}, r"messages\[0\]\['content'\] must have keys that are text"),
    ):
        with pytest.raises(TypeError, match=message):
            plain_ids(tmp_path, "{{ messages[0].content }}", role("user", value))


@pytest.mark.parametrize("family", FAMILIES)
def test_published_templates_take_plain_messages(family: str, tmp_path: Path) -> None:
    save_letters(tmp_path)
    directory(tmp_path, None, **SPECIAL)
    source = FAMILIES[family].read_text()
    for messages in CONVERSATIONS:
        spells = json.loads(json.dumps(messages).replace("Hi", "<b>Hi<").replace("b\\n", "<b>"))
        if (wanted := reference(source, spells)) is None:
            continue
        read, special = plain_ids(tmp_path, source, *spells)
        assert special == []
        # The tokenizer has no other letters.
        assert read == "".join(x for x in wanted if 32 <= ord(x) < 127)


# Roles

SOME_ROLES = (
    "{% for m in messages %}{% if m.role in ('system', 'user') %}<{{ m.role }}>{{ m.content }}"
    "{% elif m.role == 'tool' %}<t>{{ m.content | tojson }}{% endif %}{% endfor %}"
)
NO_SYSTEM = "{% for m in messages if m.role == 'user' %}<user>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "wanted"),
    [
        (SOME_ROLES, [role("developer"), *HI], "<system>Hi<user>Hi"),
        (SOME_ROLES, [role("system"), role("developer", "b"), *HI], "<system>Hi<system>b<user>Hi"),
        ("{# no developer #}" + SOME_ROLES, [role("developer"), *HI], "<system>Hi<user>Hi"),
        (SOME_ROLES.replace("system", "developer"), [role("developer")], "<developer>Hi"),
        ("{{ messages[0].role }}{{ messages[0].content }}", [role("narrator")], "narratorHi"),
        (SOME_ROLES, [*HI, role("tool"), role("tool", [1])], '<user>Hi<t>"Hi"<t>[1]'),
        (SOME_ROLES, [role("assistant"), role("narrator", ""), *HI], "<user>Hi"),
        (NO_SYSTEM, [role("system"), *HI], "<user>Hi"),
    ],
)
def test_a_developer_is_the_system_of_templates_that_know_no_developer(
    tmp_path: Path, template: str, messages: Any, wanted: str
) -> None:
    assert text(tmp_path, template, messages) == wanted


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (SOME_ROLES, [*HI, role("narrator")], r"messages\[1\]\['role'\] .* is 'narrator'"),
        (SOME_ROLES, [role("tool"), role("User"), *HI], r"messages\[1\]\['role'\] .* is 'User'"),
        (SOME_ROLES, [role(7), *HI], r"messages\[0\]\['role'\] .* 7"),
        (NO_SYSTEM, [role("developer"), *HI], r"messages\[0\]\['role'\] .* is 'developer'"),
        (NO_SYSTEM, [*HI, role("tool", [1])], r"messages\[1\]\['role'\] .* is 'tool'"),
    ],
)
def test_a_message_that_the_template_leaves_out_is_refused(
    tmp_path: Path, template: str, messages: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        text(tmp_path, template, messages)


# Ids


def test_a_conversation_gets_no_special_tokens_but_the_templates(tmp_path: Path) -> None:
    target = copy("qwen2", tmp_path / "target")
    template = "<|begin|>{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
    directory(target, template, eos_token="<|end|>")
    tokenizer = lm.load_tokenizer(target)
    ids = tokenizer.encode_chat(HI)
    begin, turn = map(tokenizer.library_tokenizer.token_to_id, ("<|begin|>", "<|turn|>"))
    assert ids == [begin, turn, *tokenizer.encode("Hi")[1:]]
    assert ids == tokenizer.encode("<|turn|>Hi")  # which begins by itself


def test_the_end_of_a_turn_ends_a_text(tmp_path: Path) -> None:
    target = copy("qwen2", tmp_path / "target")
    known = lm.load_tokenizer(target).stop_token_ids
    begin = lm.load_tokenizer(target).library_tokenizer.token_to_id("<|begin|>")
    for token, wanted in {"<|begin|>": (*known, begin), "<|end|>": known, "none": known}.items():
        directory(target, "", eos_token=token)
        assert lm.load_tokenizer(target).stop_token_ids == wanted


# What is refused


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ raise_exception('only\nfour turns') }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
    ],
)
def test_a_template_that_fails_is_named_in_one_sentence(tmp_path: Path, template: str) -> None:
    with pytest.raises(ValueError, match="has a chat template that cannot be applied: ") as raised:
        text(tmp_path, template)
    assert str(raised.value).startswith("tokenizer_config.json has")
    assert str(tmp_path) not in str(raised.value) and "\n" not in str(raised.value)


def test_an_error_without_a_message_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(value: Any) -> None:
        raise AssertionError

    monkeypatch.setitem(chat._environment().filters, "fails", fail)
    with pytest.raises(ValueError, match=r"cannot be applied: AssertionError\.$"):
        text(tmp_path, "{{ 1 | fails }}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% break %}", "cannot be parsed: 'break' outside loop"),
        ("{% if %}", "tokenizer_config.json has a chat template that cannot be parsed: "),
        (3, "tokenizer_config.json has chat_template = 3, which is not text"),
        (None, "has no chat template, neither chat_template.jinja nor one in tokenizer_config.js"),
        ([{"name": "tool_use", "template": "x"}], "has no chat template, neither "),
    ],
    ids=str,
)
def test_what_is_no_template_is_named(tmp_path: Path, template: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text(tmp_path, template)


def test_a_file_that_is_no_template_is_named(tmp_path: Path) -> None:
    path = tmp_path / "chat_template.jinja"
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="chat_template.jinja is not text in UTF-8: "):
        read_chat_template(tmp_path)


def test_a_checkpoint_without_a_template_is_named() -> None:
    with pytest.raises(ValueError, match="^the checkpoint has no chat template"):
        lm.load_tokenizer(CHECKPOINTS / "qwen2").encode_chat(HI)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", r"messages must be a list such as \[{'role': 'user', 'content': 'Hi'}\], but it"),
        (HI[0], "messages must be a list such as"),
        (["Hi"], r"messages\[0\] must have a 'role' and a 'content', but it is 'Hi'"),
        ([{"role": "user"}], r"messages\[0\] must have a 'role' and a 'content', but it is {'ro"),
    ],
    ids=str,
)
def test_what_is_no_message_is_named(tmp_path: Path, messages: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        text(tmp_path, CHATML, messages)


def test_special_tokens_that_are_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has bos_token = 7, which is not text"):
        text(tmp_path, CHATML, bos_token=7)
