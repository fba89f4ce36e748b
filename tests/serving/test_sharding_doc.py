"""The code of docs/sharding.md runs as it stands, and its numbers are what it says they are."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jax_specdec as sd

from .test_tensor_parallel import moved

PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"


def program(block: int) -> str:
    text = PAGE.read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[block]


def run(block: int) -> dict[str, object]:
    scope: dict[str, object] = {}
    exec(compile(program(block), str(PAGE), "exec"), scope)
    return scope


@pytest.mark.slow
def test_the_program_on_the_page_decodes_over_all_devices(one_layer, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program.py"])
    scope = run(0)
    assert scope["mesh"].devices.size == 8
    completions = json.loads(capsys.readouterr().out)
    assert [len(tokens) for tokens in completions] == [32, 32]
    assert scope["output"].status == [sd.Status.OK] * 2


@pytest.mark.long
def test_the_check_on_the_page_moves_no_logits():
    scope = run(1)
    output, logits, arguments = scope["output"], scope["logits"], scope["arguments"]
    assert output.status.tolist() == [sd.Status.OK] * 4
    drafted, best = arguments[0][0], jnp.argmax(logits, axis=1)
    assert output.token_ids[0].tolist() == [*drafted.tolist(), int(best[2])]  # greedy
    program = scope["check"].lower(scope["split"], *arguments).compile().as_text()
    found = moved(program)
    assert found and all(np.prod(shape) < logits.size // 8 for _, shape in found)


ENGINE = """
import json
import sys
import jax

if len(sys.argv) == 4:
    jax.distributed.initialize(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

from serving import test_tensor_parallel

found, compiled, _ = test_tensor_parallel.served(on_one_device=jax.device_count() == 1)
assert compiled == []
print(json.dumps([found[request].token_ids for request in sorted(found)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [program(0), ENGINE], ids=["page", "engine"])
def test_two_processes_decode_what_one_does(code):
    def start(*arguments: str, **options: str) -> subprocess.Popen[str]:
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env=os.environ | dict(PYTHONPATH=os.pathsep.join(paths)) | options,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        address = f"localhost:{unused.getsockname()[1]}"
    options = dict(JAX_NUM_CPU_DEVICES="4", JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo")
    both = [start(address, "2", index, **options) for index in ("0", "1")]
    found = []
    for process in (*both, start(JAX_NUM_CPU_DEVICES="1")):
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        found.append(json.loads(output.splitlines()[-1]))  # gloo speaks first
    assert found[0] == found[1] == found[2]


def test_the_estimate_on_the_page_follows_its_formula():
    rows = re.findall(r"^\| (\d+) \| ([\d.]+(?: \| [\d.]+){7}) \|$", PAGE.read_text(), re.MULTILINE)
    assert [int(batch) for batch, _ in rows] == [1, 64, 256]
    for batch, row in rows:
        for n, cell in enumerate(row.split(" | "), start=1):
            read = 7 * 2 * 128256 * int(batch) / (n * 4.5e12)
            assert float(cell) == pytest.approx(1e6 * (read + (42e-6 if n > 1 else 0)), abs=0.051)
