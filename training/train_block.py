"""Trains block heads, DFlash and DSpark, for the embedded target; see README.md.

    python training/train_block.py --out build/block --seconds 500

A head learns from the target's own distribution p, over text and over what the target continues
text with. In each window many anchors are drawn; the block of each reads the features before its
anchor and itself, as in drafting. Draft j of an anchor at position n is judged by p of n + 1 + j.

On a GPU the compute dtype is bfloat16, on a CPU float32; master weights are float32.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import stdlib_text
from train_eagle3 import (
    CHUNK,
    Params,
    Target,
    Windows,
    add_options,
    make_windows,
    mixed_batch,
    run_chunks,
    stdlib_corpus,
)
from train_embedded import (
    Data,
    State,
    attention_implementation,
    learning_rate,
    make_optimizer,
    updated,
)

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.models.layers import Attend, random_weights

LAYERS = lm.models.LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=True,
    max_position_embeddings=1024,
    qk_norm=True,
)
FEATURE_LAYERS = (2, 4, 6)
MASK = 255  # a byte that no text has
MARKOV_RANK = 64
CE_WEIGHT, TV_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
DECAY = 4.0  # draft j has the weight exp(-j / DECAY)
LOWEST_TEMPERATURE = 0.1  # of the windows that the target continues; 1 is the highest
WARMUP_STEPS = 100
SAMPLING_SHARE = 0.2  # of the seconds, at most
EVALUATION_SECONDS = 50  # for each head, kept back
TEMPERATURES = (0.0, 0.8)


def make_head(kind: str, block_size: int, dtype: Any = jnp.float32) -> lm.BlockHead:
    """A head for the embedded target, with a block of `block_size` rows.

    A "dflash" head predicts in row j the token at its own position; "dspark" predicts the next one,
    with the bias of a Markov head and a confidence.
    """
    is_dspark = kind == "dspark"
    config = lm.BlockHeadConfig(
        layer=LAYERS,
        draft_vocab_size=LAYERS.vocab_size,
        feature_layers=FEATURE_LAYERS,
        target_hidden_size=LAYERS.hidden_size,
        block_size=block_size,
        mask_token_id=MASK,
        sample_from_anchor=is_dspark,
        markov_rank=MARKOV_RANK if is_dspark else None,
        enable_confidence_head=is_dspark,
        confidence_head_with_markov=is_dspark,
    )
    return lm.BlockHead(config, dtype)


def first_params(head: lm.BlockHead, key: jax.Array) -> Params:
    """Random weights in float32, without those that are the target's."""
    shapes = {k: v for k, v in head.weight_shapes.items() if k not in ("embed_tokens", "lm_head")}
    params = random_weights(shapes, key, jnp.float32, LAYERS.num_hidden_layers)
    if "markov_w2" in params:  # [V, r], multiplied from the right: r is what each logit sums
        size, rank = params["markov_w2"].shape
        params["markov_w2"] = params["markov_w2"] * (size / rank) ** 0.5
    return params


def block_attention(
    keys: jax.Array, values: jax.Array, anchors: jax.Array, block_size: int
) -> Attend:
    """Attention of the blocks of `anchors` `[B, A]` at `keys` and `values` `[B, M, N_kv, D]`.

    A row reads the M positions that are before its anchor, and all rows of its own block.
    """
    length = keys.shape[1]
    visible = jnp.arange(length, dtype=jnp.int32)[None, None, :] < anchors[:, :, None]
    visible = visible[:, None, None, :, None, :]  # [B, N_kv, group, A, S, M]

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        batch_size, rows, num_kv, head_dim = key.shape
        blocks = (batch_size, rows // block_size, block_size, num_kv)
        query = query.reshape(*blocks, -1, head_dim)
        key, value = key.reshape(*blocks, head_dim), value.reshape(*blocks, head_dim)
        wide = {"preferred_element_type": jnp.float32}
        far = jnp.einsum("baskgd,bjkd->bkgasj", query, keys, **wide)
        far = jnp.where(visible, far, -jnp.inf)
        near = jnp.einsum("baskgd,batkd->bkgast", query, key, **wide)
        weights = jax.nn.softmax(jnp.concatenate([far, near], axis=-1) * head_dim**-0.5, axis=-1)
        weights = weights.astype(value.dtype)
        read = jnp.einsum("bkgasj,bjkd->baskgd", weights[..., :length], values)
        read = read + jnp.einsum("bkgast,batkd->baskgd", weights[..., length:], value)
        return read.reshape(batch_size, rows, -1, head_dim)

    return attend


def run_blocks(
    head: lm.BlockHead,
    params: Params,
    embedding: jax.Array,
    features: jax.Array,
    anchor_ids: jax.Array,
    anchors: jax.Array,
) -> jax.Array:
    """States `[B, A, K, H]` of the rows that draft, for blocks at the anchors `[B, A]`.

    `features` `[B, M, A * H]` are those of positions 0 to M - 1; `anchor_ids` `[B, A]` are the
    tokens at the anchors.
    """
    batch_size, length = features.shape[:2]
    size, count = head.config.block_size, head.config.max_drafts
    positions = jnp.arange(length, dtype=jnp.int32)[None, :]
    context = head.context(params, features, jnp.broadcast_to(positions, (batch_size, length)))

    def attend(index: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return block_attention(*context[index], anchors, size)(query, key, value)

    masks = jnp.full((*anchors.shape, size - 1), MASK, jnp.int32)
    ids = jnp.concatenate([anchor_ids[:, :, None], masks], axis=2)  # [B, A, S]
    places = anchors[:, :, None] + jnp.arange(size, dtype=jnp.int32)[None, None, :]
    # All blocks of a window are rows of one sequence: [B, A * S].
    ids, places = (x.reshape(batch_size, -1) for x in (ids, places))
    states = head.run(params, embedding[ids], places, attend)
    return states.reshape(*anchors.shape, size, -1)[:, :, size - count :]


def draft_logits(
    params: Params, embedding: jax.Array, states: jax.Array, previous: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Logits `[..., V]` of q after the tokens `previous`, and those `[...]` of the confidence.

    A head without a confidence gives zeros for it.
    """
    logits = (states @ embedding.T).astype(jnp.float32)
    if "markov_w1" not in params:
        return logits, jnp.zeros(previous.shape)
    # As a product, the gradient of W1 is summed in float32.
    memory = jax.nn.one_hot(previous, embedding.shape[0], dtype=states.dtype) @ params["markov_w1"]
    logits = logits + (memory @ params["markov_w2"].T).astype(jnp.float32)
    seen = jnp.concatenate([states, memory], axis=-1).astype(jnp.float32)
    confidence = seen @ params["confidence_proj"].astype(jnp.float32)
    return logits, confidence[..., 0] + params["confidence_bias"].astype(jnp.float32)[0]


class Measures(NamedTuple):
    """Of each draft `[..., K]`; the text itself stands for the drafts before it."""

    cross_entropy: jax.Array  # of the target's distribution, nats
    acceptance: jax.Array  # alpha = sum min(p, q), at temperature 1
    agreement: jax.Array  # whether the argmaxes are the same
    confidence_loss: jax.Array  # cross entropy of alpha, nats
    confidence_error: jax.Array  # |a - alpha|


def measure(
    head: lm.BlockHead, params: Params, target: Target, tokens: jax.Array, anchors: jax.Array
) -> Measures:
    """The measures `[B, A, K]` of blocks at `anchors` `[B, A]` in [1, S - K] of tokens `[B, S]`."""
    params = jax.tree.map(lambda x: x.astype(head.dtype), params)
    logits, features = jax.lax.stop_gradient(target.run(tokens, FEATURE_LAYERS))
    embedding = target.params["embed_tokens"]
    offsets = jnp.arange(head.config.max_drafts, dtype=jnp.int32)
    batch = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None, None]
    rows = anchors[:, :, None] + offsets[None, None, :]
    previous = tokens[batch, rows]  # the anchor, then what the drafts before should be
    p = jax.nn.softmax(logits[batch, rows].astype(jnp.float32))
    states = run_blocks(head, params, embedding, features, previous[:, :, 0], anchors)
    drafted, confidence = draft_logits(params, embedding, states, previous)
    log_q = jax.nn.log_softmax(drafted)
    alpha = jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1)
    label = jax.lax.stop_gradient(alpha)
    return Measures(
        cross_entropy=-jnp.sum(p * log_q, axis=-1),
        acceptance=alpha,
        agreement=jnp.argmax(drafted, axis=-1) == jnp.argmax(p, axis=-1),
        confidence_loss=optax.sigmoid_binary_cross_entropy(confidence, label),
        confidence_error=jnp.abs(jax.nn.sigmoid(confidence) - label),
    )


def loss_of(head: lm.BlockHead, found: Measures) -> jax.Array:
    """The loss []: cross entropy, |p - q|_1 = 2 (1 - alpha), and that of the confidence."""
    losses = CE_WEIGHT * found.cross_entropy + TV_WEIGHT * 2 * (1 - found.acceptance)
    if head.config.enable_confidence_head:
        losses = losses + CONFIDENCE_WEIGHT * found.confidence_loss
    losses = losses.mean(axis=(0, 1))
    weights = jnp.exp(-jnp.arange(losses.shape[0], dtype=jnp.float32) / DECAY)
    return jnp.sum(weights * losses) / jnp.sum(weights)


def draw_anchors(head: lm.BlockHead, tokens: jax.Array, count: int, key: jax.Array) -> jax.Array:
    """`count` anchors of each window, such that the target knows all that their drafts predict."""
    shape, end = (tokens.shape[0], count), tokens.shape[1] - head.config.max_drafts
    return jax.random.randint(key, shape, 1, end + 1, jnp.int32)


def make_chunk(head: lm.BlockHead, model: lm.models.Llama, args: argparse.Namespace) -> Callable:
    """CHUNK training steps in one compiled loop; returns the state and the mean loss."""
    optimizer = make_optimizer(args.weight_decay)

    @partial(jax.jit, donate_argnums=0)
    def chunk(
        state: State, target_params: Params, data: Data, pool: jax.Array, total: jax.Array
    ) -> tuple[State, jax.Array]:
        target = Target(model, target_params)

        def step(state: State, _: None) -> tuple[State, jax.Array]:
            key, window_key, pool_key, anchor_key = jax.random.split(state.key, 4)
            tokens = mixed_batch(data, pool, args, window_key, pool_key)
            anchors = draw_anchors(head, tokens, args.anchors, anchor_key)

            def loss_fn(params: Params) -> jax.Array:
                return loss_of(head, measure(head, params, target, tokens, anchors))

            loss, grads = jax.value_and_grad(loss_fn)(state.params)
            rate = learning_rate(args.learning_rate, state.step, total, WARMUP_STEPS)
            return updated(optimizer, state, grads, rate, key), loss

        state, losses = jax.lax.scan(step, state, length=CHUNK)
        return state, losses.mean()

    return chunk


def train(
    target: Target,
    head: lm.BlockHead,
    data: Data,
    pool: np.ndarray,
    args: argparse.Namespace,
    seconds: float,
    save: Callable[[Params], None],
) -> tuple[Params, list[dict[str, float]]]:
    """Trains for args.steps steps, or as many as fit into `seconds`; weights and losses."""
    init_key, key = jax.random.split(jax.random.key(args.seed))
    params = first_params(head, init_key)
    state = State(params, make_optimizer(args.weight_decay).init(params), jnp.int32(0), key)
    chunk, pool_on_device = make_chunk(head, target.model, args), jnp.asarray(pool)
    state, log = run_chunks(
        lambda state, total: chunk(state, target.params, data, pool_on_device, total),
        state,
        args,
        seconds,
        lambda state: save(state.params),
    )
    save(state.params)
    return jax.tree.map(lambda x: x.astype(head.dtype), state.params), log


def save_head(directory: Path, head: lm.BlockHead, target: Target, params: Params) -> None:
    """Writes a head in the layout of speculators, in bfloat16; what is the target's is left out."""
    embedding = target.params["embed_tokens"]
    whole = {**params, "embed_tokens": embedding, "lm_head": embedding}
    lm.formats.save_block_head(directory, head, whole, jnp.bfloat16, target_name="embedded target")


@partial(jax.jit, static_argnums=(0, 1))
def measure_batch(
    head: lm.BlockHead,
    model: lm.models.Llama,
    params: Params,
    target_params: Params,
    tokens: jax.Array,
    anchors: jax.Array,
) -> tuple[Measures, jax.Array, jax.Array]:
    """Means of `measure` `[K]`, and 1 + the mean number of drafts accepted at T = 1 and T = 0."""
    found = measure(head, params, Target(model, target_params), tokens, anchors)
    lengths = [
        1 + jnp.cumprod(x.astype(jnp.float32), axis=-1).sum(axis=-1).mean()
        for x in (found.acceptance, found.agreement)
    ]
    return jax.tree.map(lambda x: x.astype(jnp.float32).mean(axis=(0, 1)), found), *lengths


def evaluate_text(
    head: lm.BlockHead,
    params: Params,
    target: Target,
    windows: np.ndarray,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """What `measure_batch` finds in windows `[M, S]`, where the text stands for the drafts."""
    batch = min(len(windows), args.batch_size)
    key, parts = jax.random.key(args.seed + 2), []
    for index, rows in enumerate(range(0, len(windows) - batch + 1, batch)):
        tokens = jnp.asarray(windows[rows : rows + batch], jnp.int32)
        anchors = draw_anchors(head, tokens, args.anchors, jax.random.fold_in(key, index))
        given = (params, target.params, tokens, anchors)
        parts.append(jax.device_get(measure_batch(head, target.model, *given)))
    found, length, greedy_length = jax.tree.map(lambda *x: np.mean(x, axis=0), *parts)
    rounded = {
        name: np.round(x.astype(float), 4).tolist()
        for name, x in found._asdict().items()
        if head.config.enable_confidence_head or not name.startswith("confidence")
    }
    return {**rounded, "length": round(float(length), 3), "greedy": round(float(greedy_length), 3)}


class Decoding(NamedTuple):
    """What a decoding step changes; the target has run all tokens but the newest."""

    tokens: jax.Array  # [B, L], the texts so far, then anything
    lengths: jax.Array  # [B]
    features: jax.Array  # [B, L, A * H]
    steps: jax.Array  # [B]
    done: jax.Array  # [B]


@partial(jax.jit, static_argnums=(0, 1, 2))
def decode(
    head: lm.BlockHead,
    model: lm.models.Llama,
    num_drafts: int,
    params: Params,
    target_params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    limits: jax.Array,
    temperature: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Speculative decoding without caches, by the standard rule: tokens, lengths, steps `[B]`.

    The whole block is drafted, and the first `num_drafts` of it are verified. A text ends where it
    reaches its limit; at temperature 0 also with the byte that ends a document.
    """
    target = Target(model, target_params)
    embedding = target_params["embed_tokens"]
    config = sd.SpecDecodeConfig(num_speculative_tokens=num_drafts)
    batch_size = tokens.shape[0]
    batch = jnp.arange(batch_size, dtype=jnp.int32)
    sampling = sd.SamplingParams(temperature=jnp.broadcast_to(temperature, (batch_size,)))
    keys = jax.random.split(jax.random.key(3), batch_size)
    counts = jnp.full(batch_size, num_drafts, jnp.int32)
    after = jnp.arange(num_drafts + 1, dtype=jnp.int32)[None, :]

    def step(state: Decoding) -> Decoding:
        anchors = state.lengths - 1
        previous = state.tokens[batch, anchors]
        states = run_blocks(
            head, params, embedding, state.features, previous[:, None], anchors[:, None]
        )
        drafts, store = [], []
        for j in range(num_drafts):
            logits, _ = draft_logits(params, embedding, states[:, 0, j], previous)
            drawn = sd.sample_draft_tokens(
                logits, sampling=sampling, keys=keys, positions=state.lengths, offset=j,
                config=config,
            )  # fmt: skip
            previous = drawn.token_ids
            drafts.append(previous)
            store.append(logits)
        proposed, rows = jnp.stack(drafts, axis=1), anchors[:, None] + after
        tokens = state.tokens.at[batch[:, None], rows[:, 1:]].set(proposed)
        logits, features = target.run(tokens, FEATURE_LAYERS)
        kept = jnp.stack(store, axis=1).reshape(batch_size * num_drafts, -1)
        output = sd.rejection_sample(
            logits[batch[:, None], rows].reshape(batch_size * (num_drafts + 1), -1),
            sd.Drafts.from_flat(proposed.ravel(), counts, sd.DraftLogits(kept)),
            sampling=sampling, keys=keys, positions=state.lengths, config=config,
            implementation="xla",
        )  # fmt: skip
        # What comes after the emitted tokens is read by nothing.
        emitted = jnp.maximum(output.token_ids, 0)
        tokens = tokens.at[batch[:, None], rows + 1].set(emitted)
        ends = (emitted == lm.DOCUMENT_SEPARATOR) & (after < output.num_emitted[:, None])
        ends = ends.any(axis=1) & (temperature == 0)
        lengths = state.lengths + output.num_emitted
        done = ends | (lengths >= limits)
        fresh = Decoding(tokens, lengths, features, state.steps + 1, done)
        # A text that is done stays as it is.
        return jax.tree.map(
            lambda old, new: jnp.where(jnp.expand_dims(state.done, range(1, new.ndim)), old, new),
            state,
            fresh,
        )

    _, features = target.run(tokens, FEATURE_LAYERS)
    zeros = jnp.zeros(batch_size, jnp.int32)
    state = Decoding(tokens, lengths, features, zeros, zeros > 0)
    state = jax.lax.while_loop(lambda state: ~state.done.all(), step, state)
    return state.tokens, state.lengths, state.steps


def evaluate_decoding(
    head: lm.BlockHead,
    params: Params,
    target: Target,
    prompts: list[np.ndarray],
    num_drafts: int,
    new_tokens: int,
) -> dict[str, float]:
    """Mean acceptance length by temperature: emitted tokens per target pass, over all prompts."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    room = -(-(lengths.max() + new_tokens + 2 * num_drafts + 2) // 128) * 128
    tokens = np.zeros((len(prompts), room), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    given = jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(lengths + new_tokens)
    found = {}
    for temperature in TEMPERATURES:
        _, ends, steps = decode(
            head, target.model, num_drafts, params, target.params, *given, jnp.float32(temperature)
        )
        emitted = np.asarray(ends) - lengths
        found[f"{temperature:g}"] = round(float(emitted.sum() / np.asarray(steps).sum()), 3)
    return found


def evaluate(
    head: lm.BlockHead,
    params: Params,
    target: Target,
    windows: Windows,
    prompts: list[np.ndarray],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """All the measurements, which are printed too."""
    results: dict[str, Any] = {}
    for name, tokens in (("held-out text", windows.held_out), ("target's own", windows.own)):
        results[name] = evaluate_text(head, params, target, tokens, args)
        print(f"  {name:16} {json.dumps(results[name])}", flush=True)
    results["mean acceptance length"] = {}
    for count in sorted({min(4, head.config.max_drafts), head.config.max_drafts}):
        found = evaluate_decoding(head, params, target, prompts, count, args.new_tokens)
        results["mean acceptance length"][f"K = {count}"] = found
        print(f"  acceptance length, K = {count}, by temperature {found}", flush=True)
    return results


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The arguments, with the defaults that depend on the device filled in."""
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for one folder per head")
    add("--kinds", nargs="+", choices=["dflash", "dspark"], default=["dflash", "dspark"])
    add("--stdlib", type=Path, help="folder to learn from; default: that of the running Python")
    add("--seconds", type=float, default=500 if on_gpu else 7200, help="for everything together")
    add("--steps", type=int, default=10**6 if on_gpu else 1000, help="at most, per head")
    add("--block-size", type=int, default=8)
    add("--anchors", type=int, default=64, help="per window and step")
    add("--functions", type=int, default=24, help="held-out functions that are decoded at the end")
    add("--new-tokens", type=int, default=192, help="of each of them")
    add_options(parser, batch_size=128, length=512, windows=2**15)
    parser.set_defaults(learning_rate=2e-3)
    args = parser.parse_args(arguments)
    if args.batch_size < 2 or args.length < 2 * args.block_size:
        parser.error("--batch-size must be at least 2, --length at least twice --block-size")
    return args


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    begin = time.monotonic()
    args = parse_args(arguments)
    device, attention = jax.devices()[0], attention_implementation()
    dtype = jnp.dtype("bfloat16" if device.platform == "gpu" else "float32")
    target, corpus = Target(*lm.load_embedded_pair(dtype)[0]), stdlib_corpus(args.stdlib)
    functions = stdlib_text.function_heads(
        stdlib_text.read_text(args.stdlib).held_out, args.functions
    )
    prompts = [lm.encode_bytes(context + text) for context, text in functions]
    limit = SAMPLING_SHARE * args.seconds
    windows = make_windows(target, corpus, args, LOWEST_TEMPERATURE, limit)
    print(f"{time.monotonic() - begin:6.0f} s  {len(windows.pool)} windows sampled", flush=True)

    for index, kind in enumerate(args.kinds):
        head, directory = make_head(kind, args.block_size, dtype), args.out / kind
        left = args.seconds - (time.monotonic() - begin)
        budget = left / (len(args.kinds) - index) - EVALUATION_SECONDS
        print(f"{kind}: {budget:.0f} s of training", flush=True)
        params, log = train(
            target, head, corpus.training, windows.pool, args, budget,
            partial(save_head, directory, head, target),
        )  # fmt: skip
        record = {
            "device": device.device_kind,
            "attention": attention,
            "jax": jax.__version__,
            "python": platform.python_version(),
            "text": corpus.name,
            "target": "embedded target",
            "windows": len(windows.pool),
            **{k: v for k, v in vars(args).items() if k not in ("out", "stdlib")},
            "results": evaluate(head, params, target, windows, prompts, args),
            "log": log,
        }
        (directory / "training.json").write_text(json.dumps(record, indent=2) + "\n")
        size = (directory / "model.safetensors").stat().st_size
        print(f"{time.monotonic() - begin:6.0f} s  wrote {directory}, {size} bytes", flush=True)


if __name__ == "__main__":
    main()
