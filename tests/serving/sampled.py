"""Decoding with options, one token at a time, in float64 NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_specdec import lm

from . import tiny


def processed(
    row: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    temperature: float,
    options: lm.RequestOptions,
    stop_token_ids: Sequence[int] = (),
) -> np.ndarray:
    """What the next token is drawn from; for a greedy request all on the argmax."""
    row = row.astype(np.float64)
    for token, bias in (options.logit_bias or {}).items():
        row[token] += bias
    x = penalized(row, prompt, output, options)
    for word in options.bad_words or ():
        if [*prompt, *output, word[-1]][-len(word) :] == list(word):
            x[word[-1]] = -np.inf
    if len(output) < options.min_tokens:
        x[list(stop_token_ids)] = -np.inf
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
    row: np.ndarray, prompt: Sequence[int], output: Sequence[int], options: lm.RequestOptions
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
    table: np.ndarray,
    prompt: Sequence[int],
    options: lm.RequestOptions,
    count: int,
    stop_token_ids: Sequence[int] = (),
) -> list[int]:
    """A greedy completion of a `tiny.Trigram`, up to a stop token."""
    output: list[int] = []
    for _ in range(count):
        row = tiny.next_logits(table, [*prompt, *output])
        p = processed(row, prompt, output, 0.0, options, stop_token_ids)
        output.append(int(np.argmax(p)))
        if output[-1] in stop_token_ids:
            break
    return output


def exact_distribution(
    table: np.ndarray,
    prompt: Sequence[int],
    length: int,
    temperature: float,
    options: lm.RequestOptions,
    stop_token_ids: Sequence[int] = (),
) -> np.ndarray:
    """Probability of every continuation, ``[V] * length``, as if no token stopped it."""
    probabilities = np.ones(())
    for _ in range(length):
        rows = np.zeros((*probabilities.shape, table.shape[-1]))
        for tokens in np.ndindex(*probabilities.shape):
            row = tiny.next_logits(table, [*prompt, *tokens])
            rows[tokens] = processed(row, prompt, tokens, temperature, options, stop_token_ids)
        probabilities = probabilities[..., None] * rows
    return probabilities
