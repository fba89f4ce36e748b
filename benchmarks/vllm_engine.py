"""All of vLLM, 0.24 as tried, as an engine of `engine_load`; from a folder, with few packages.

The folder has vLLM's wheel, unpacked, and the packages that `ABSENT` does not name. What
`ABSENT` names is imported by vLLM and never called on these paths: empty modules stand in for it.
Nothing here is vLLM's; `import_vllm` and `VllmEngine` also serve models that are read from disk.
"""

from __future__ import annotations

import collections
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import math
import os
import pathlib
import sys
import types
from collections.abc import Sequence
from typing import Any, ClassVar
from unittest import mock

import engine_load

ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # its engine's process has the stand-ins of this one
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # else `apply_model` takes no function
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
"""What is set unless the caller has set it."""
ABSENT = frozenset(
    "anthropic blake3 compressed_tensors cv2 depyf diskcache email_validator fastsafetensors gguf "
    "ijson lark llguidance lmformatenforcer mcp mistral_common model_hosting_container_standards "
    "ninja numba openai_harmony opentelemetry outlines outlines_core python_multipart quack "
    "sentencepiece setproctitle tilelang watchfiles xgrammar jsonschema".split()
)


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes a module for each name of `ABSENT` that nothing else has found."""

    made: ClassVar[list[Any]] = []

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module = mock.MagicMock(name=spec.name)
        module.__name__, module.__spec__, module.__path__ = spec.name, spec, []
        module.__file__, module.__version__ = "stand-in", "99.0"
        self.made.append(module)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""

    @classmethod
    def num_calls(cls) -> int:
        """Returns how often something of a stand-in was called, as decorators are on import."""
        return sum(len(module.mock_calls) for module in cls.made)


def _version_of(name: str, find: Any = importlib.metadata.version) -> str:
    """Returns the version of a distribution, of a stand-in a large one."""
    try:
        return str(find(name))
    except importlib.metadata.PackageNotFoundError:
        if name.replace("-", "_") not in ABSENT:
            raise
        return "2.0.0" if name.startswith("email") else "99.0"  # pydantic compares that one


def import_vllm(folder: pathlib.Path) -> types.ModuleType:
    """Returns vLLM, imported from a folder; to be called before anything imports PyTorch."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    # vLLM looks at a model's class in a process of its own.
    os.environ.update({**ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    sys.path.insert(0, str(folder))
    sys.meta_path.append(_StandIns())
    importlib.metadata.version = _version_of
    return importlib.import_module("vllm")


def version(folder: pathlib.Path) -> str | None:
    """Returns the version of vLLM in a folder, without importing it; None if it is not there."""
    found = importlib.metadata.distributions(name="vllm", path=[str(folder)])
    return next((one.version for one in found), None)


def model_folder(path: pathlib.Path, config: dict[str, Any]) -> str:
    """Writes a folder that has a model's config and no weights; returns its path."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


class VllmEngine(engine_load.Engine):
    """`vllm.LLM` step by step, after `import_vllm`; with vLLM's defaults where nothing is given.

    Raises a RuntimeError if a stand-in is called while requests are served.

    Args:
      model: the folder of the target.
      batch: the most requests that will ever run at a time.
      max_length: tokens of a request.
      temperature: of all requests.
      speculative: vLLM's `speculative_config`; None for plain decoding.
      settings: further ones of `vllm.LLM`, such as ``load_format="dummy"``.
    """

    def __init__(
        self,
        model: str,
        *,
        batch: int,
        max_length: int,
        temperature: float,
        speculative: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        import vllm
        from vllm.sampling_params import RequestOutputKind

        self._batch = batch
        self._limit = math.inf
        self._waiting: collections.deque[Any] = collections.deque()
        self._num_running = 0
        if speculative is not None:
            settings["speculative_config"] = speculative
        self._sampling = functools.partial(
            vllm.SamplingParams,
            temperature=temperature,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.llm = vllm.LLM(
            model=model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=max_length,
            max_num_seqs=batch,
            gpu_memory_utilization=0.85,
            enable_prefix_caching=False,  # runs repeat their prompts
            async_scheduling=True,
            **settings,
        )

    def resize(self, batch: int) -> None:
        """From now on, while nobody runs, serves at most so many requests at a time."""
        # Its engine takes as many as there are places: of fewer, the others wait here.
        self._limit = math.inf if batch == self._batch else batch

    def add(self, number: int, prompt: list[int], sampling: Any) -> None:
        """Queues a request with its `SamplingParams`."""
        self._waiting.append((str(number), {"type": "token", "prompt_token_ids": prompt}, sampling))

    def outputs(self) -> list[Any]:
        """Goes on, until the next tokens are there; returns vLLM's `RequestOutput`s."""
        while self._waiting and self._num_running < self._limit:
            self.llm.llm_engine.add_request(*self._waiting.popleft())
            self._num_running += 1
        outputs = self.llm.llm_engine.step()
        self._num_running -= sum(one.finished for one in outputs)
        return outputs

    def serve(
        self, requests: Sequence[engine_load.Request], due: Sequence[float] | None = None
    ) -> engine_load.Log:
        before = _StandIns.num_calls()
        log = super().serve(requests, due)
        if _StandIns.num_calls() != before:
            raise RuntimeError("vLLM has called a package that is not there")
        return log

    def submit(self, number: int, request: engine_load.Request) -> None:
        self.add(number, request.prompt, self._sampling(max_tokens=request.budget))

    def step(self) -> list[engine_load.Event]:
        return [
            (int(one.request_id), len(one.outputs[0].token_ids), one.finished)
            for one in self.outputs()
        ]

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    @property
    def is_idle(self) -> bool:
        return not self._num_running and not self._waiting
