"""Samples the text that heads of a chat model learn from: what the model itself writes.

    python training/own_text.py --target DIR --out build/own/0.npz --seconds 120

Most windows are conversations. Whenever the target ends its answer, the next prompt is put in its
place. The others go on from the beginnings of installed files. See README.md and `prompts.py`.
"""

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import prompts

from jax_specdec import lm

TEMPERATURES = (0.0, 0.8, 1.0)  # of the windows, equally often
DOCUMENT_SHARE = 0.25  # of the windows go on from documents, the others are conversations
BEGINNINGS = (24, 160)  # tokens of a document that the target goes on from, at least and at most
LONGEST_PROMPT = 0.6  # of a window
HELD_OUT_WINDOWS = {"gpu": 512, "cpu": 8}
BATCH = {"gpu": 1024, "cpu": 16}

Params = dict[str, Any]


class Own(NamedTuple):
    """Windows of tokens; a head learns and is judged where the token that comes next is sampled.

    On the host or on the device.
    """

    ids: Any  # [M, S]
    wanted: Any  # [M, S] bool: the token after this one is the target's

    def draw(self, key: jax.Array, batch_size: int) -> tuple[jax.Array, jax.Array]:
        """Token ids `[B, S]` int32 of some windows, and where they are wanted."""
        rows = jax.random.randint(key, (batch_size,), 0, self.ids.shape[0])
        return self.ids[rows].astype(jnp.int32), self.wanted[rows]

    @staticmethod
    def all_of(ids: Any) -> "Own":
        """Windows all of whose tokens are wanted."""
        return Own(ids, np.ones(ids.shape, bool))


class Script(NamedTuple):
    """What is given of each window: its prompts, one after another, `[B, S]`."""

    ids: Any  # int32
    ends: Any  # bool: the last token of a prompt


def beginnings(windows: jax.Array, kept: int) -> Script:
    """Windows `[B, S]` of which the first `kept` tokens are given."""
    is_last = jnp.arange(windows.shape[1], dtype=jnp.int32) == kept - 1
    return Script(windows, jnp.broadcast_to(is_last, windows.shape))


@partial(jax.jit, static_argnums=(0, 3))
def continue_windows(
    model: lm.models.Llama,
    params: Params,
    script: Script,
    kept: int,
    stop_ids: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Token ids `[B, S]`, and which of them the target drew, by a `temperature` `[B]`.

    The first prompt of a script, of at least `kept` tokens, comes first. Where the target draws one
    of `stop_ids`, the next prompt follows.
    """
    batch_size, length = script.ids.shape
    rows = jnp.arange(batch_size, dtype=jnp.int32)
    start = jnp.zeros(batch_size, jnp.int32)
    cache = model.init_cache(batch_size, length)
    given = script.ids[:, :kept]
    ((logits, _),), cache = model.apply(params, [lm.models.Rows(given, start)], cache)

    def step(carry: Any, offset: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        logits, cache, place, is_given = carry
        # With noise that is scaled instead of logits, temperature 0 is the argmax.
        noise = jax.random.gumbel(jax.random.fold_in(key, offset), logits.shape, jnp.float32)
        scores = logits.astype(jnp.float32) + temperature[:, None] * noise
        drawn = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        token = jnp.where(is_given, script.ids[rows, place], drawn)
        goes_on = jnp.where(is_given, ~script.ends[rows, place], jnp.isin(drawn, stop_ids))
        next_rows = lm.models.Rows(token[:, None], start + offset)
        ((logits, _),), cache = model.apply(params, [next_rows], cache)
        carry = (logits[:, 0], cache, place + is_given.astype(jnp.int32), goes_on)
        return carry, (token, ~is_given)

    offsets = jnp.arange(kept, length, dtype=jnp.int32)
    carry = (logits[:, -1], cache, start + kept, ~script.ends[:, kept - 1])
    _, (tokens, drawn) = jax.lax.scan(step, carry, offsets)
    # [S - kept, B] -> [B, S]
    return (
        jnp.concatenate([given, tokens.T], axis=1),
        jnp.concatenate([jnp.zeros(given.shape, bool), drawn.T], axis=1),
    )


class Segments(NamedTuple):
    """Prompts as token ids."""

    first: list[np.ndarray]  # of conversations, from their beginning
    later: list[np.ndarray]  # what comes after an answer's last token, up to the next answer
    documents: list[np.ndarray]


def encode(tokenizer: Any, texts: prompts.Prompts, most: int, length: int) -> Segments:
    """Prompts for windows of `length` tokens; at most `most` of chats."""
    first, later, stops = [], [], set(tokenizer.stop_token_ids)
    for text in texts.chat[:most]:
        user = {"role": "user", "content": text}
        ids = np.array(tokenizer.encode_chat([user]), np.int32)
        if len(ids) > LONGEST_PROMPT * length:
            continue
        first.append(ids)
        # What a template writes after an answer, but for the token by which the answer ends.
        answer = {"role": "assistant", "content": "Yes."}
        both = np.array(tokenizer.encode_chat([user, answer, user]), np.int32)
        ends = [i for i in range(len(ids), len(both)) if both[i] in stops]
        later.append(both[ends[0] + 1 :] if ends else ids)
    documents = [np.array(tokenizer.encode(text[:4000]), np.int32) for text in texts.documents]
    return Segments(first, later, [ids for ids in documents if len(ids) >= BEGINNINGS[1]])


def write_scripts(segments: Segments, rng: Any, batch: int, length: int) -> Script:
    """Scripts `[B, S]`: those of documents have one beginning after another, too."""
    script = Script(np.zeros((batch, length), np.int32), np.zeros((batch, length), bool))
    for row in range(batch):
        is_document = rng.random() < DOCUMENT_SHARE
        at = 0
        while at < length:
            if is_document:
                document = segments.documents[rng.integers(len(segments.documents))]
                size = rng.integers(*BEGINNINGS)
                begin = rng.choice([0, rng.integers(len(document) - size)])
                part = document[begin : begin + size]
            else:
                pool = segments.later if at else segments.first
                part = pool[rng.integers(len(pool))]
            part = part[: length - at]
            script.ids[row, at : at + len(part)] = part
            at += len(part)
            script.ends[row, at - 1] = True
    return script


def sample(
    target: Any, stop_ids: Any, segments: Segments, seed: int, batch: int, length: int
) -> Iterator[tuple[Own, np.ndarray]]:
    """Yields windows `[B, S]` that the target wrote, and their temperatures `[B]`."""
    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    kept = min(BEGINNINGS[0], *map(len, segments.first))
    stops = jnp.asarray(stop_ids, jnp.int32)
    while True:
        key, now = jax.random.split(key)
        script = write_scripts(segments, rng, batch, length)
        temperature = rng.choice(np.array(TEMPERATURES, np.float32), batch)
        found = continue_windows(*target, script, kept, stops, now, temperature)
        ids, drawn = map(np.asarray, found)
        wanted = np.concatenate([drawn[:, 1:], np.ones((batch, 1), bool)], axis=1)
        yield Own(ids, wanted), temperature


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The arguments, with the defaults that depend on the device filled in."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    add, device = parser.add_argument, jax.default_backend()
    add("--target", type=Path, required=True, help="checkpoint with a tokenizer and chat template")
    add("--out", type=Path, required=True, help="file to write, .npz")
    add("--seconds", type=float, default=120, help="for everything")
    add("--windows", type=int, default=10**6, help="to train on, at most")
    add("--held-out", type=int, default=HELD_OUT_WINDOWS.get(device, 8), help="windows to judge by")
    add("--batch-size", type=int, default=BATCH.get(device, 16), help="windows at a time")
    add("--length", type=int, default=768, help="tokens per window")
    add("--prompts", type=int, default=5000, help="of chats, at most")
    add("--documents", type=int, default=prompts.MOST_DOCUMENTS, help="of each kind, at most")
    add("--seed", type=int, default=0, help="another one for each file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    begin = time.monotonic()
    args = parse_args(arguments)
    tokenizer = lm.load_tokenizer(args.target)
    documents = prompts.read_documents(most=args.documents)
    segments = {}
    for held_out in (True, False):
        texts = prompts.make_prompts(documents, held_out=held_out)
        segments[held_out] = encode(tokenizer, texts, args.prompts, args.length)
    counts = {name: len(getattr(segments[False], name)) for name in ("first", "documents")}
    print(f"{time.monotonic() - begin:6.0f} s  prompts: {counts}", flush=True)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    target = lm.load_huggingface(args.target, dtype)
    written: dict[str, list[np.ndarray]] = {}
    for held_out, most in ((True, args.held_out), (False, args.windows)):
        batches = sample(
            target, tokenizer.stop_token_ids, segments[held_out],
            2 * args.seed + held_out, args.batch_size, args.length,
        )  # fmt: skip
        name = "held_out_" if held_out else ""
        count = 0
        while count < most and (count == 0 or time.monotonic() - begin < args.seconds):
            own, temperature = next(batches)
            for field, x in (*own._asdict().items(), ("temperature", temperature)):
                kept = x[: most - count]
                written.setdefault(name + field, []).append(kept)
            count += len(kept)
            seconds = time.monotonic() - begin
            print(f"{seconds:6.0f} s  {count} windows, {own.wanted.mean():.2f} sampled", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial_file = args.out.with_suffix(".part")  # a reader sees whole files
    with partial_file.open("wb") as file:
        np.savez(file, **{name: np.concatenate(parts) for name, parts in written.items()})
    partial_file.rename(args.out)
    print(f"{time.monotonic() - begin:6.0f} s  wrote {args.out}", flush=True)


if __name__ == "__main__":
    main()
