"""Decoding with options, one token at a time, in float64 NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import jax_specdec as sd

from . import tiny


def processed(
    row: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    temperature: float,
    options: sd.RequestOptions,
) -> np.ndarray:
    """What the next token is drawn from; for a greedy request all on the argmax."""
    x = penalized(row, prompt, output, options)
    if options.allowed_token_ids is not None:
        x[np.setdiff1d(np.arange(len(x)), options.allowed_token_ids)] = -np.inf
    if temperature == 0:
        return np.eye(len(x))[np.argmax(x)]
    p = np.exp((x - x.max()) / temperature)
    p /= p.sum()
    p[p < options.min_p * p.max()] = 0
    p /= p.sum()
    if options.top_k:
        p[p < np.sort(p)[::-1][min(options.top_k, len(p)) - 1]] = 0
        p /= p.sum()
    falling = np.sort(p)[::-1]
    needed = np.searchsorted(np.cumsum(falling), options.top_p - 1e-12)
    p[p < falling[min(needed, len(p) - 1)]] = 0
    return p / p.sum()


def penalized(
    row: np.ndarray, prompt: Sequence[int], output: Sequence[int], options: sd.RequestOptions
) -> np.ndarray:
    x = row.astype(np.float64)
    for token in range(len(x)):
        count = list(output).count(token)
        if count or token in prompt:
            r = options.repetition_penalty
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        x[token] -= options.frequency_penalty * count + options.presence_penalty * (count > 0)
    return x


def greedy(
    table: np.ndarray, prompt: Sequence[int], options: sd.RequestOptions, count: int
) -> list[int]:
    """A greedy completion of a `tiny.Trigram`."""
    output: list[int] = []
    for _ in range(count):
        row = tiny.next_logits(table, [*prompt, *output])
        output.append(int(np.argmax(processed(row, prompt, output, 0.0, options))))
    return output


def exact_distribution(
    table: np.ndarray,
    prompt: Sequence[int],
    length: int,
    temperature: float,
    options: sd.RequestOptions,
) -> np.ndarray:
    """Probability of every continuation, ``[V] * length``."""
    probabilities = np.ones((table.shape[-1],) * length)
    for tokens in np.ndindex(*probabilities.shape):
        for i, token in enumerate(tokens):
            row = tiny.next_logits(table, [*prompt, *tokens[:i]])
            p = processed(row, prompt, tokens[:i], temperature, options)
            probabilities[tokens] *= p[token]
    return probabilities
