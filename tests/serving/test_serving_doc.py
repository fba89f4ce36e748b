"""The code of docs/serving.md runs as it stands, and does what the page says."""

import re
from pathlib import Path

import jax
import pytest

pytestmark = pytest.mark.newest

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


def run(block: int) -> dict[str, object]:
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    scope: dict[str, object] = {}
    exec(compile(code[block], str(PAGE), "exec"), scope)
    return scope


@pytest.mark.slow
def test_the_driver_on_the_page_serves_every_prompt(one_layer, capsys):
    texts = run(0)["texts"]
    assert len(texts) == 5
    for tokens in texts.values():
        assert len(tokens) == 32 or (tokens[-1] == 10 and len(tokens) > 4)
    *progress, last = capsys.readouterr().out.splitlines()
    assert progress == [f"compiled {done} of 8" for done in range(9)]
    assert last.startswith("SpecDecoding metrics: Mean acceptance length: ")


def test_compiled_programs_are_kept_where_the_page_says():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        run(1)
        assert [getattr(jax.config, name) for name in names] == ["/tmp/my-server-programs", 0.5]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
