"""Trains the embedded target and draft model; see README.md.

    python training/train_embedded.py target --out build/target --steps 6000
    python training/train_embedded.py draft --teacher build/target --out build/draft --steps 15000

On a GPU the compute dtype is bfloat16, on a CPU float32; master weights are float32.
"""

import argparse
import dataclasses
import json
import platform
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import stdlib_text

from jax_specdec.lm.formats.checkpoint import load_huggingface, save_checkpoint
from jax_specdec.lm.formats.config_json import config_json, parse_config
from jax_specdec.lm.formats.files import JsonObject
from jax_specdec.lm.models.config import DecoderConfig, LayerSpec
from jax_specdec.lm.models.llama import Llama

LAYER = LayerSpec(num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=608)
TARGET = DecoderConfig(
    vocab_size=256,
    hidden_size=256,
    layers=(LAYER,) * 8,
    tie_word_embeddings=True,
    max_position_embeddings=1024,
)
DRAFT = DecoderConfig(
    vocab_size=256,
    hidden_size=128,
    layers=(dataclasses.replace(LAYER, head_dim=32, intermediate_size=512),) * 2,
    tie_word_embeddings=True,
    max_position_embeddings=1024,
)

DEFAULTS = {
    "target": {"learning_rate": 2e-3, "dropout": 0.2, "weight_decay": 0.3},
    "draft": {"learning_rate": 4e-3, "dropout": 0.0, "weight_decay": 0.1},
}
REGION_SHARES = (0.3, 0.25, 0.45)  # of the windows: library, library without docstrings, tests
BLOCK_SHARE = 0.2  # of the windows begin at a def or class, as a prompt does
WARMUP_STEPS = 200
FINAL_LEARNING_RATE = 0.01  # of the peak
DISTILLATION = 0.9  # of the draft's loss; the rest is cross entropy with the text
CHUNK = 50  # steps per call of the compiled loop


class Data(NamedTuple):
    """Training text on the device, region after region."""

    text: jax.Array  # [n] uint8
    block_starts: jax.Array  # [m] int32, ascending, offsets into text
    region_ends: jax.Array  # [3] int32
    region_shares: jax.Array  # [3] float32, of the windows; they need not sum to one


def load_data(text: stdlib_text.Text) -> Data:
    """The training text as `sample_windows` reads it."""
    code = [(name, stdlib_text.without_docstrings(source)) for name, source in text.library]
    regions = [stdlib_text.join(files) for files in (text.library, code, text.tests)]
    shares = [*REGION_SHARES[:2], REGION_SHARES[2] if text.tests else 0.0]  # some ship no tests
    joined = np.concatenate(regions)
    ends = np.cumsum([len(region) for region in regions])
    return Data(
        jnp.asarray(joined),
        jnp.asarray(stdlib_text.block_starts(joined)),
        jnp.asarray(ends, jnp.int32),
        jnp.asarray(shares, jnp.float32),
    )


class State(NamedTuple):
    """What a training step changes."""

    params: Any  # float32, without what is frozen
    optimizer: Any
    step: jax.Array  # [] int32
    key: jax.Array


@cache
def attention_implementation() -> str:
    """cuDNN's fused attention where it works. To be called outside of jit first."""
    if jax.default_backend() != "gpu":
        return "xla"
    x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)

    def loss(query: jax.Array) -> jax.Array:
        read = jax.nn.dot_product_attention(
            query, x[:, :, :1], x[:, :, :1], is_causal=True, implementation="cudnn"
        )
        return read.astype(jnp.float32).sum()

    try:
        jax.block_until_ready(jax.jit(jax.grad(loss))(x))
    except Exception as error:  # a missing or old library, by whatever name it is reported
        print(f"attention by XLA: cuDNN does not work here ({error})", flush=True)
        return "xla"
    return "cudnn"


def causal_attention(model: Llama) -> Callable[..., jax.Array]:
    """What a layer's heads read of whole sequences, without a cache; see `Attend`."""
    implementation = attention_implementation() if model.dtype == jnp.bfloat16 else "xla"

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=implementation
        )

    return attend


def full_logits(
    model: Llama,
    params: Any,
    token_ids: jax.Array,
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Logits `[B, S, V]` of whole sequences `[B, S]` from position 0, without a cache.

    `dropout` is the share of the residual stream's inputs that is dropped, at random by `key`.
    """
    keys = iter(jax.random.split(key, 2 * len(model.config.layers) + 1) if dropout else ())

    def drop(branch: jax.Array) -> jax.Array:
        if not dropout:
            return branch
        kept = jax.random.bits(next(keys), branch.shape, jnp.uint8) >= round(256 * dropout)
        return jnp.where(kept, branch / (1 - round(256 * dropout) / 256), 0)

    params = jax.tree.map(lambda x: x.astype(model.dtype), params)
    # As a product, the gradient of the embedding is summed in float32.
    embedded = jax.nn.one_hot(token_ids, model.vocab_size, dtype=model.dtype)
    embedded = drop(embedded @ params["embed_tokens"])
    positions = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
    whole = jnp.broadcast_to(positions, token_ids.shape)
    return model.run(params, embedded, whole, causal_attention(model), drop)[0]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log softmax(logits)[label] in nats, `[B, S]`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def bits_per_byte(
    model: Llama, params: Any, data: np.ndarray, length: int = 1024, batch_size: int = 32
) -> float:
    """Mean -log2 p of the bytes of `data` after the first.

    Windows of `length` bytes overlap by half; a byte is scored in the window that gives it the
    longer context, at least `length / 2` bytes past the beginning of the data.
    """
    half = length // 2
    count = max(1, -(-(len(data) - 1 - half) // half))
    padded = np.zeros((count + 1) * half + 1, np.uint8)
    padded[: len(data)] = data
    windows = np.stack([padded[i * half : i * half + length + 1] for i in range(count)])
    scored = np.zeros((count, length), bool)
    scored[:, half:] = True
    scored[0] = True
    scored &= np.arange(count)[:, None] * half + np.arange(length)[None, :] + 1 < len(data)
    total = 0.0
    for first in range(0, count, batch_size):
        rows = slice(first, first + batch_size)
        missing = batch_size - len(windows[rows])
        batch = np.pad(windows[rows], ((0, missing), (0, 0)))
        mask = np.pad(scored[rows], ((0, missing), (0, 0)))
        total += float(_sum_of_losses(model, params, jnp.asarray(batch), jnp.asarray(mask)))
    return total / scored.sum() / np.log(2)


@partial(jax.jit, static_argnums=0)
def _sum_of_losses(model: Llama, params: Any, windows: jax.Array, mask: jax.Array) -> jax.Array:
    windows = windows.astype(jnp.int32)
    losses = cross_entropy(full_logits(model, params, windows[:, :-1]), windows[:, 1:])
    return jnp.sum(jnp.where(mask, losses, 0.0))


def sample_windows(data: Data, key: jax.Array, batch_size: int, length: int) -> jax.Array:
    """`[batch_size, length + 1]` int32, random windows of the training text."""
    region_key, start_key, block_key = jax.random.split(key, 3)
    region = jax.random.categorical(region_key, jnp.log(data.region_shares), shape=(batch_size,))
    ends = jnp.concatenate([jnp.zeros(1, jnp.int32), data.region_ends])
    start = jax.random.randint(start_key, (batch_size,), ends[region], ends[region + 1])
    block = data.block_starts[
        jnp.minimum(jnp.searchsorted(data.block_starts, start), data.block_starts.shape[0] - 1)
    ]
    at_block = jax.random.bernoulli(block_key, BLOCK_SHARE, (batch_size,))
    last = data.text.shape[0] - length - 1
    start = jnp.minimum(jnp.where(at_block, block, start), last)
    window = jax.vmap(lambda s: jax.lax.dynamic_slice(data.text, (s,), (length + 1,)))(start)
    return window.astype(jnp.int32)


def make_optimizer(weight_decay: float) -> optax.GradientTransformation:
    """AdamW for a learning rate of one; the schedule scales its updates."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(
            weight_decay, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
        ),
    )


def learning_rate(
    peak: float, step: jax.Array, total: jax.Array, warmup: int = WARMUP_STEPS
) -> jax.Array:
    """Linear warmup, then a cosine down to FINAL_LEARNING_RATE * peak at step `total`."""
    progress = jnp.clip((step - warmup) / jnp.maximum(total - warmup, 1), 0.0, 1.0)
    cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
    rise = jnp.minimum((step + 1) / warmup, 1.0)
    return peak * rise * (FINAL_LEARNING_RATE + (1.0 - FINAL_LEARNING_RATE) * cosine)


def updated(
    optimizer: optax.GradientTransformation, state: State, grads: Any, rate: Any, key: jax.Array
) -> State:
    """The state after one step."""
    updates, opt_state = optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, jax.tree.map(lambda u: -rate * u, updates))
    return State(params, opt_state, state.step + 1, key)


def make_chunk(
    model: Llama, teacher: tuple[Llama, Any] | None, args: argparse.Namespace
) -> Callable[..., tuple[State, jax.Array]]:
    """CHUNK training steps in one compiled loop; returns the state and the mean loss."""
    optimizer = make_optimizer(args.weight_decay)

    def loss_fn(params: Any, windows: jax.Array, teacher_params: Any, key: jax.Array) -> jax.Array:
        logits = full_logits(model, params, windows[:, :-1], args.dropout, key)
        loss = cross_entropy(logits, windows[:, 1:]).mean()
        if teacher is None:
            return loss
        soft = full_logits(teacher[0], teacher_params, windows[:, :-1]).astype(jnp.float32)
        distilled = optax.softmax_cross_entropy(
            logits.astype(jnp.float32), jax.nn.softmax(jax.lax.stop_gradient(soft))
        ).mean()
        return DISTILLATION * distilled + (1 - DISTILLATION) * loss

    @partial(jax.jit, donate_argnums=0)
    def chunk(
        state: State, data: Data, teacher_params: Any, total_steps: jax.Array
    ) -> tuple[State, jax.Array]:
        def step(state: State, _: None) -> tuple[State, jax.Array]:
            key, window_key, drop_key = jax.random.split(state.key, 3)
            windows = sample_windows(data, window_key, args.batch_size, args.length)
            loss, grads = jax.value_and_grad(loss_fn)(
                state.params, windows, teacher_params, drop_key
            )
            rate = learning_rate(args.learning_rate, state.step, total_steps)
            return updated(optimizer, state, grads, rate, key), loss

        state, losses = jax.lax.scan(step, state, length=CHUNK)
        return state, losses.mean()

    return chunk


def train(
    model: Llama,
    teacher: tuple[Llama, Any] | None,
    text: stdlib_text.Text,
    args: argparse.Namespace,
    save: Callable[[Any, dict[str, Any]], None],
) -> None:
    """Trains for args.steps steps, or for as many as fit into args.minutes."""
    begin = time.monotonic()
    data = load_data(text)
    validation = stdlib_text.join(text.validation)
    # "rbg" draws the many bits of dropout much faster than the default on a GPU.
    init_key, key = jax.random.split(jax.random.key(args.seed, impl="rbg"))
    params = Llama(model.config).init_params(init_key)
    state = State(params, make_optimizer(args.weight_decay).init(params), jnp.int32(0), key)
    chunk = make_chunk(model, teacher, args)
    teacher_params = teacher[1] if teacher else None
    total = args.steps or 10**6  # until the speed is known; the warmup does not depend on it
    best, log, record, saved = np.inf, [], {}, begin
    while int(state.step) < total:
        tick = time.monotonic()
        state, loss = chunk(state, data, teacher_params, jnp.int32(total))
        loss, done = float(loss), int(state.step)
        seconds = time.monotonic() - tick
        if done == 2 * CHUNK and not args.steps:  # the first chunk was compilation, mostly
            left = args.minutes * 60 - (time.monotonic() - begin)
            total = done + int(0.92 * left / seconds) * CHUNK
            print(f"{seconds / CHUNK * 1e3:.1f} ms a step: {total} steps in all", flush=True)
        late = time.monotonic() - begin > args.minutes * 60
        last = done >= total or late
        if not (last or done % (args.evaluate_every * CHUNK) == 0):
            continue
        bits = bits_per_byte(model, state.params, validation, args.length)
        log.append({"step": done, "training_loss": round(loss, 4), "validation": round(bits, 4)})
        elapsed = time.monotonic() - begin
        print(f"{elapsed:6.0f} s  step {done}  loss {loss:.4f}  validation {bits:.4f}", flush=True)
        if bits < best:
            best = bits
            best_params = jax.tree.map(np.asarray, state.params)
            record = {
                "validation_bits_per_byte": bits,
                "chosen_step": done,
                "training_loss_nats": loss,
            }
        if last or time.monotonic() - saved > 60:
            saved = time.monotonic()
            save(best_params, {**record, "steps": done, "planned_steps": total, "log": log})
        if late:
            break


def parse_args() -> argparse.Namespace:
    """The arguments, with the defaults that depend on others filled in."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=["target", "draft"])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--stdlib", type=Path, help="default: that of the running Python")
    parser.add_argument("--teacher", type=Path, help="checkpoint that the draft learns from")
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="time limit; a run that hits it ends before its schedule does",
    )
    parser.add_argument("--steps", type=int, help="default: as many as fit into --minutes")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024, help="bytes per sequence")
    parser.add_argument("--learning-rate", type=float, help="peak")
    parser.add_argument("--weight-decay", type=float, help="of matrices; default by model")
    parser.add_argument("--dropout", type=float, help="of the residual branches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=5, help=f"in chunks of {CHUNK} steps")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON, of config.json")
    args = parser.parse_args()
    if args.model == "draft" and not args.teacher:
        parser.error("draft needs --teacher, the directory of a trained target")
    for name, default in DEFAULTS[args.model].items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    return args


def main() -> None:
    """Command line."""
    args = parse_args()
    device = jax.devices()[0]
    dtype = jnp.bfloat16 if device.platform == "gpu" else jnp.float32
    base = TARGET if args.model == "target" else DRAFT
    raw = config_json(base, "float32") | args.config
    model = Llama(parse_config(JsonObject(raw, "--config")), dtype)
    teacher = load_huggingface(args.teacher, dtype) if args.teacher else None
    text = stdlib_text.read_text(args.stdlib)
    sizes = {name: sum(len(source) for _, source in getattr(text, name)) for name in text._fields}
    shapes = jax.eval_shape(model.init_params, jax.random.key(0))
    about = {
        "parameters": sum(x.size for x in jax.tree.leaves(shapes)),
        "device": device.device_kind,
        "attention": attention_implementation(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "text_bytes": sizes,
        "text_sha256": stdlib_text.digest(text),
        "seed": args.seed,
        "batch_size": args.batch_size,
        "length": args.length,
        "learning_rate": args.learning_rate,
        "weight_decay": args.weight_decay,
        "dropout": args.dropout,
    }
    print(json.dumps(about), flush=True)

    def save(params: Any, record: dict[str, Any]) -> None:
        save_checkpoint(args.out, model, params, jnp.bfloat16)
        (args.out / "training.json").write_text(json.dumps({**about, **record}, indent=2) + "\n")

    train(model, teacher, text, args, save)


if __name__ == "__main__":
    main()
