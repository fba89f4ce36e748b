"""Batches whose draft distributions are on a list of ids, and the same ones over all ids."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import scipy.special

import jax_specdec as sd

from .batch import Batch


def with_ids(batch: Batch, ids: str, length: int, seed: int = 0) -> tuple[Batch, Batch]:
    """A batch with draft rows over all ids, cut down to lists of them.

    Args:
      batch: of a layout with a draft distribution as wide as the target.
      ids: "map" for one list for all rows, "candidates" for a list of each row.
      length: of a list.
      seed: which ids, and in which order.

    Returns:
      The batch with ``ids``, and the same scattered over all ids.
    """
    rng, drafts, layout = np.random.default_rng(seed), batch.drafts, batch.layout
    given: Any = drafts.distribution
    is_probs = isinstance(given, sd.DraftProbs)
    storage, fill = (given.probs, 0.0) if is_probs else (given.logits, -np.inf)
    num_rows, real = len(storage), layout.real_vocab
    if ids == "map":
        lists = np.tile(rng.permutation(real)[:length], (num_rows, 1))
    else:
        lists = np.stack([rng.permutation(real)[:length] for _ in range(num_rows)])
    owned = np.full(num_rows, False)
    temperatures = np.ones(num_rows)
    rows = np.arange(len(drafts.token_ids)) if given.rows is None else given.rows
    for b, temperature in enumerate(batch.temperature):
        for n in range(*drafts.cu_num_draft_tokens[b : b + 2]):
            if not 0 <= rows[n] < num_rows:
                continue
            row, x = rows[n], drafts.token_ids[n]
            owned[row], temperatures[row] = True, temperature
            if ids == "candidates":  # likely ones, as a drafter has; the drafted one mostly
                likely = np.argsort(-np.nan_to_num(storage[row, :real].astype(np.float64)))
                chosen = likely[: length - length // 4]
                if 0 <= x < real and rng.random() < 0.9:
                    chosen = np.append(chosen, x)
                own = np.concatenate([chosen, lists[row]])
                _, first = np.unique(own, return_index=True)
                lists[row] = rng.permutation(own[np.sort(first)][:length])
    listed = np.take_along_axis(storage, lists, axis=1)
    if is_probs:
        with np.errstate(all="ignore"):
            listed = (listed / listed.sum(axis=1, keepdims=True)).astype(np.float32)
    changes: dict[str, Any] = {}
    if not is_probs and given.log_normalizer is not None:
        with np.errstate(all="ignore"):
            kept = listed.astype(np.float64)
            if given.threshold is not None:
                kept = np.where(kept < given.threshold[:, None], -np.inf, kept)
            peak = np.zeros(num_rows) if given.row_max is None else kept.max(axis=1)
            relative = (kept - peak[:, None]) / temperatures[:, None]
            sums = scipy.special.logsumexp(relative, axis=1)
        of_list = dict(log_normalizer=sums)
        if given.row_max is not None:
            of_list["row_max"] = peak
        for name, values in of_list.items():
            before = getattr(given, name)
            is_good = owned & np.isfinite(before) & (np.abs(before) < 1024)
            changes[name] = np.where(is_good, values, before).astype(np.float32)
    scattered = np.full_like(storage, fill)
    np.put_along_axis(scattered, lists, listed, axis=1)
    if ids == "candidates":
        lists[~owned] = rng.integers(-5, real + 5, lists[~owned].shape)  # of no row that is read
    name = "probs" if is_probs else "logits"

    def of(storage: np.ndarray, ids: np.ndarray | None) -> Batch:
        distribution = dataclasses.replace(given, **{name: storage}, **changes, ids=ids)
        return batch.replace(drafts=dataclasses.replace(drafts, distribution=distribution))

    own_ids = (lists[0] if ids == "map" else lists).astype(np.int32)
    return of(listed, own_ids), of(scattered, None)


def with_bad_ids(listed: Batch, seed: int) -> Batch:
    """The same with an id that is out of range, or there twice, in every third list or the map."""
    rng, distribution = np.random.default_rng(seed), listed.drafts.distribution
    ids, size = distribution.ids.copy(), listed.layout.real_vocab
    lists = ids.reshape(-1, ids.shape[-1])
    for row in range(0, len(lists), 3):
        j = rng.integers(lists.shape[1])
        twice = lists[row, j - 1]
        lists[row, j] = rng.choice([-1, size, 2**31 - 1, -(2**31), twice, twice])
    distribution = dataclasses.replace(distribution, ids=ids)
    return listed.replace(drafts=dataclasses.replace(listed.drafts, distribution=distribution))
