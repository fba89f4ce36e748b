"""Transformers, 5.17 as tried, as an engine of `engine_load`: batches alone, no arrivals."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import engine_load
import torch
import transformers


class TransformersEngine(engine_load.Engine):
    """`generate`: plain with a static cache and a compiled pass, or assisted; then of one request.

    The whole batch decodes until the largest budget is spent, and a token beyond its request's own
    budget does not count.

    Args:
      config: of the target, as its `config.json` has it.
      device: of PyTorch.
      temperature: of all requests.
      assistant: the config of a draft model; None for none.
      max_ngram: the longest n-gram that a lookup looks for; 0 for no lookup.
      num_drafts: of an assistant or a lookup.
    """

    has_arrivals = False

    def __init__(
        self,
        config: dict[str, Any],
        device: str,
        temperature: float,
        assistant: dict[str, Any] | None,
        max_ngram: int,
        num_drafts: int,
    ) -> None:
        self.model, self._device = _random_model(config, device), device
        self._num_passes = 0
        # Neither a stop token nor a filter, as the other engines have none.
        self._options = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0)
        self._options |= dict(pad_token_id=0, num_assistant_tokens=num_drafts)
        if assistant is not None:
            model = _random_model(assistant, device)
            model.generation_config.num_assistant_tokens = num_drafts
            model.generation_config.num_assistant_tokens_schedule = "constant"
            model.generation_config.assistant_confidence_threshold = 0.0
            self._options["assistant_model"] = model
        elif max_ngram:
            self._options["prompt_lookup_num_tokens"] = num_drafts
            self._options["max_matching_ngram_size"] = max_ngram
        self._is_plain = assistant is None and not max_ngram
        self.most_requests = math.inf if self._is_plain else 1
        if not self._is_plain:  # a compiled pass needs none
            self.model.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._num_passes += 1

    def prepare(self) -> None:
        """Forgets what was compiled, so that no program is made for several sizes of batches."""
        torch.compiler.reset()
        vars(self.model).pop("_compiled_call", None)

    def _generate(self, prompts: list[list[int]], count: int, **options: Any) -> tuple[float, int]:
        """Returns the seconds and the passes of the target that `count` tokens for each take."""
        token_ids = torch.tensor(prompts, device=self._device)
        self._num_passes, begin = 0, time.perf_counter()
        output = self.model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=count,
            **self._options,
            **options,
        ).cpu()
        seconds = time.perf_counter() - begin
        if output.shape[1] != token_ids.shape[1] + count:
            raise RuntimeError(f"generate made {output.shape[1]} tokens")
        return seconds, count if self._is_plain else self._num_passes

    def serve(
        self, requests: Sequence[engine_load.Request], due: Sequence[float] | None = None
    ) -> engine_load.Log:
        """Returns a log of evenly spaced steps.

        Their time is the difference of two calls: each captures a CUDA graph of its own.
        """
        prompts = [request.prompt for request in requests]
        budgets = [request.budget for request in requests]
        first, _ = self._generate(prompts, 1)
        options = {"cache_implementation": "static"} if self._is_plain else {}
        long, passes = self._generate(prompts, max(budgets), **options)
        short, fewer = self._generate(prompts, max(budgets) // 3, **options)
        seconds = (long - short) / max(passes - fewer, 1)
        return engine_load.even_log(budgets, first, first + seconds * (passes - 1), passes - 1)

    def submit(self, number: int, request: engine_load.Request) -> None:
        raise NotImplementedError("a batch is served as a whole")

    def step(self) -> list[engine_load.Event]:
        raise NotImplementedError("a batch is served as a whole")

    @property
    def is_idle(self) -> bool:
        return True


def _random_model(config: dict[str, Any], device: str) -> Any:
    """Returns a model with random weights in bfloat16, made on the device."""
    settings = transformers.LlamaConfig(**config | {"bos_token_id": None, "eos_token_id": None})
    with torch.device(device):
        model = transformers.LlamaForCausalLM._from_config(settings, dtype=torch.bfloat16)
    return model.eval()
