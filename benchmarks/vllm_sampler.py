"""vLLM's own rejection sampler, of its second model runner, from a few files of its wheel.

`bench_vllm_gpu.py` runs it. The files lie in a folder of the reader's, never here. Whatever else of
vLLM they import is replaced by empty modules, made at run time: nothing of it is called.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

_GPU = "vllm/v1/worker/gpu"
FILES = (
    "vllm/_version.py",
    "vllm/v1/spec_decode/fly.py",
    "vllm/v1/watermarking/prfs/base.py",
    "vllm/v1/watermarking/prfs/philox.py",
    f"{_GPU}/input_batch.py",
    f"{_GPU}/sample/gumbel.py",
    f"{_GPU}/sample/sampler.py",
    f"{_GPU}/sample/states.py",
    f"{_GPU}/sample/watermark.py",
    f"{_GPU}/spec_decode/rejection_sampler.py",
    f"{_GPU}/spec_decode/rejection_sampler_utils.py",
)
"""What is taken from the wheel; the sampler, and what its kernels are made of."""

FIRST_POSITION = 1000


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `FILES` in a folder, and makes every other module of vLLM."""

    def __init__(self, folder: pathlib.Path, given: dict[str, dict[str, Any]]) -> None:
        self._folder, self._given = folder, given

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "vllm":
            return None
        file = fullname.replace(".", "/") + ".py"
        if file in FILES:
            return importlib.util.spec_from_file_location(fullname, self._folder / file)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(self._given.get(module.__name__, {}))


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        """A class for whatever is imported: some are called, most stand in annotations."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (types.SimpleNamespace,), {})


def provenance(folder: pathlib.Path) -> dict[str, Any]:
    """vLLM's version, and a SHA-256 of each of its files.

    Raises:
      FileNotFoundError: a file is missing.
    """
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"not in {folder}: {', '.join(missing)}")
    version = re.search(r"__version__ = .*?'([^']+)'", (folder / FILES[0]).read_text())
    return {
        "vllm": version.group(1) if version else "unknown",
        "vllm_files": {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES
        },
    }


def load(folder: pathlib.Path, triton_utils: dict[str, Any] | None = None) -> Callable[[str], Any]:
    """Make the files importable.

    Args:
      folder: has `FILES`.
      triton_utils: contents of the module ``vllm.triton_utils``; by default Triton's own.

    Returns:
      What imports one of the files, such as ``"sample/states"``, or any other module of vLLM.
    """
    if triton_utils is None:
        import triton
        import triton.language as tl
        from triton.language.extra import libdevice

        device = libdevice
        if triton.knobs.runtime.interpret:  # which has no device library
            device = types.SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))
        triton_utils = {"HAS_TRITON": True, "triton": triton, "tl": tl, "tldevice": device}
    given = {
        "vllm.triton_utils": triton_utils,
        "vllm.config.model": {"PROCESSED_LOGPROBS_MODES": ()},
    }
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.meta_path[:] = [found for found in sys.meta_path if not isinstance(found, _Finder)]
    sys.meta_path.insert(0, _Finder(folder, given))
    return lambda name: importlib.import_module(f"{_GPU}/{name}".replace("/", "."))


class Sampler:
    """`RejectionSampler` for B requests with K draft tokens each, with a temperature and a seed.

    No request has top-k, penalties or anything else that would launch more. Temperatures and seeds
    lie in the GPU's memory; vLLM's own lie in the host's, and its kernels read them from there.

    Args:
      module: from `load`.
      batch: B.
      k: K.
      vocabulary: V.
      temperature: of all requests.
      device: of PyTorch.
    """

    def __init__(
        self,
        module: Callable[[str], Any],
        batch: int,
        k: int,
        vocabulary: int,
        temperature: float,
        device: Any,
    ) -> None:
        import torch

        self._torch, self._device = torch, device
        self._batch, self._rows = batch, k + 1
        every = np.full((batch,), temperature, np.float32)
        seeds = np.random.default_rng(1).integers(2**62, size=batch)
        states_module = module("sample/states")
        # Constructors would allocate host memory that the GPU reads, by parts of vLLM not here.
        states = object.__new__(states_module.SamplingStates)
        vars(states).update(
            vocab_size=vocabulary,
            temperature=self._both(every),
            seeds=self._both(seeds),
            top_k=self._both(np.full((batch,), vocabulary, np.int32)),
            top_p=self._both(np.ones((batch,), np.float32)),
            min_p=self._both(np.zeros((batch,), np.float32)),
            num_logprobs=np.full((batch,), states_module.NO_LOGPROBS, np.int32),
        )
        sampler = object.__new__(module("sample/sampler").Sampler)
        vars(sampler).update(
            sampling_states=states,
            needs_logits_processing=(every != 0) & (every != 1),  # as `SamplingStates` decides
            logits_processors=[],  # those of vLLM launch nothing for requests without such options
            thinking_budget_state=types.SimpleNamespace(apply=lambda logits, context: None),
            req_states=types.SimpleNamespace(
                prefill_len=types.SimpleNamespace(gpu=self._tensor(np.ones((batch,), np.int32)))
            ),
            use_fp64_gumbel=False,
            logprobs_mode="raw_logprobs",
            compute_nans=False,
            return_sampling_mask=False,
        )
        self._sampler = module("spec_decode/rejection_sampler").RejectionSampler(
            sampler,
            types.SimpleNamespace(
                num_speculative_tokens=k,
                rejection_sample_method="standard",
                enable_adaptive_verification=False,
                **{f"fly_{name}": 0 for name in ("window_size", "entropy_threshold")},
                fly_entropy_top_k=3,
            ),
            device,
        )
        self._kernels = module("spec_decode/rejection_sampler_utils").rejection_sample

    def _tensor(self, array: np.ndarray) -> Any:
        return self._torch.from_numpy(array).to(self._device)

    def _both(self, array: np.ndarray) -> types.SimpleNamespace:
        return types.SimpleNamespace(np=array, gpu=self._tensor(array))

    def input_batch(self, draft_token_ids: Any, step: int = 0) -> types.SimpleNamespace:
        """What the model runner hands over in a step of decoding.

        Args:
          draft_token_ids: ``[B*K]``, a tensor.
          step: other steps are at other positions, so draw other noise.
        """
        batch, rows = self._batch, self._rows
        requests = np.arange(batch, dtype=np.int32)
        offsets = np.arange(batch + 1, dtype=np.int32) * rows
        first = FIRST_POSITION + step * rows
        ids = self._torch.zeros((batch, rows), dtype=self._torch.int32, device=self._device)
        ids[:, 1:] = draft_token_ids.reshape(batch, rows - 1)  # after the last emitted token
        ends = np.full((batch,), first + rows, np.int32)
        return types.SimpleNamespace(
            num_reqs=batch,
            input_ids=ids.reshape(-1),
            positions=self._tensor(np.tile(np.arange(first, first + rows), batch)),
            logits_indices=self._tensor(np.arange(batch * rows)),
            idx_mapping=self._tensor(requests),
            idx_mapping_np=requests,
            expanded_idx_mapping=self._tensor(np.repeat(requests, rows)),
            expanded_local_pos=self._tensor(np.tile(np.arange(rows, dtype=np.int32), batch)),
            cu_num_logits=self._tensor(offsets),
            cu_num_logits_np=offsets,
            seq_lens=self._tensor(ends),
            seq_lens_cpu_upper_bound=self._torch.from_numpy(ends),
        )

    def __call__(self, logits: Any, draft_logits: Any, batch: Any) -> tuple[Any, Any]:
        """From logits of the model to token ids, as in vLLM.

        Args:
          logits: ``[B*(K+1), V]``, before the temperature.
          draft_logits: ``[B, K, V]``, before the temperature.
          batch: from `input_batch`.

        Returns:
          Token ids ``[B, K+1]``, undefined beyond the number of emitted ones; that number ``[B]``.
        """
        output = self._sampler(logits, batch, draft_logits)
        return output.sampled_token_ids, output.num_sampled

    def processed(self, logits: Any, batch: Any) -> Any:
        """Logits as `verify_alone` takes them: at the temperature, in float32 unless it is 1."""
        return self._sampler.sampler.apply_sampling_params(
            logits,
            batch.expanded_idx_mapping,
            batch.idx_mapping,
            batch.idx_mapping_np,
            batch.positions,
            batch.input_ids,
            batch.expanded_local_pos,
            batch.seq_lens_cpu_upper_bound.numpy(),
        )

    def verify_alone(self, processed: Any, draft_logits: Any, batch: Any) -> tuple[Any, Any]:
        """The kernels of `rejection_sample` and no others. Arguments and results as above."""
        states = self._sampler.sampler.sampling_states
        return self._kernels(
            processed,
            draft_logits,
            batch.input_ids,
            batch.cu_num_logits,
            batch.positions,
            batch.idx_mapping,
            batch.expanded_idx_mapping,
            batch.expanded_local_pos,
            states.temperature.gpu,
            states.seeds.gpu,
            self._rows - 1,
        )
