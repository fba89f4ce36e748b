"""Makes the tiny random Gemma 4 checkpoints and assistants beside this file, and what they compute.

    python -m venv venv && venv/bin/pip install torch transformers==5.24.0
    venv/bin/python tests/formats/gemma4/make.py

`wide` has the switches of 31B and 12B, `edge` those of E2B and E4B; `wide_assistant` has a dense
head, `edge_assistant` an ordered one. Each directory is what `save_pretrained` writes, in bfloat16,
and `expected.npz` in float32. Of a target: logits of `token_ids`, and the states after the final
norm. Of an assistant: after the first `length` tokens, with the target's cache of them and the
newest token after them, logits, states and ids of a chain of argmax drafts, at two fixed positions.
`make test-models` makes others, of other sizes.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "huggingface"))
from make import SPECIAL, TEXT, make_tokenizer, randomize  # noqa: E402

VOCAB_SIZE = 320
NUM_TOKENS = 283
LENGTH = 20
NUM_DRAFTS = 3
CENTROIDS = {"num_centroids": 20, "centroid_intermediate_top_k": 4}

SHARED = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "max_position_embeddings": 512,
}
"""What a target and its assistant have in common."""
WIDE = {
    **SHARED,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}
EDGE = {**SHARED, "num_key_value_heads": 1}
SIZES = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 2}
ASSISTANT = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}


def kinds(pattern: str) -> list[str]:
    """The types of layers: "s" for sliding ones, "f" for full ones."""
    names = {"s": "sliding_attention", "f": "full_attention"}
    return [names[kind] for kind in pattern]


def fill(model: transformers.PreTrainedModel, seed: int) -> None:
    """Random weights, and scalars of layers that are not one."""
    randomize(model, NUM_TOKENS, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    for name, scalar in model.named_buffers():
        if name.endswith("layer_scalar"):
            scalar.data = 0.5 + torch.rand(scalar.shape, generator=generator)


def save(directory: Path, model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Returns the model as it is read again, in float32."""
    shutil.rmtree(directory, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    return type(model).from_pretrained(directory, dtype=torch.float32).eval()


def make_target(
    directory: Path, token_ids: list[int], seed: int, pattern: str, **options: Any
) -> transformers.Gemma4ForCausalLM:
    config = transformers.Gemma4TextConfig(
        final_logit_softcapping=30.0,
        layer_types=kinds(pattern),
        num_hidden_layers=len(pattern),
        **options,
    )
    model = transformers.Gemma4ForCausalLM(config)
    fill(model, seed)
    model = save(directory, model)
    with torch.no_grad():
        output = model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
    np.savez_compressed(
        directory / "expected.npz",
        token_ids=np.array(token_ids, np.int32),
        logits=output.logits[0].numpy(),
        states=output.hidden_states[-1][0].numpy(),
    )
    return model


def make_assistant(
    directory: Path,
    target: transformers.Gemma4ForCausalLM,
    token_ids: list[int],
    seed: int,
    **options: Any,
) -> None:
    """Makes an assistant with an ordered head if `options` have centroids, else a dense one."""
    ordered = {name: options.pop(name) for name in CENTROIDS if name in options}
    text = transformers.Gemma4TextConfig(
        **{**options, "vocab_size_per_layer_input": 0},
        layer_types=kinds("sssf"),
        num_hidden_layers=4,
        hidden_size_per_layer_input=0,
    )
    config = transformers.Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=target.config.hidden_size,
        use_ordered_embeddings=bool(ordered),
        **ordered,
    )
    model = transformers.Gemma4AssistantForCausalLM(config)
    fill(model, seed)
    if ordered:
        generator = torch.Generator().manual_seed(seed)
        ordering = torch.randperm(text.vocab_size, generator=generator)
        model.masked_embedding.token_ordering.data = ordering
    model = save(directory, model)

    positions = [LENGTH, LENGTH - 1]
    found = [draft(model, target, token_ids, position) for position in positions]
    logits, states, drafts = (np.stack(arrays) for arrays in zip(*found, strict=True))
    np.savez_compressed(
        directory / "expected.npz",
        length=LENGTH,
        positions=np.array(positions, np.int32),
        logits=logits,
        states=states,
        token_ids=drafts,
    )


def draft(
    model: transformers.Gemma4AssistantForCausalLM,
    target: transformers.Gemma4ForCausalLM,
    token_ids: list[int],
    position: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns logits [K, V], states [K, Ht] and the K drafts, each the argmax of its row."""
    logits, states, drafts = [], [], []
    with torch.no_grad():
        read = target(
            torch.tensor([token_ids[:LENGTH]]),
            output_hidden_states=True,
            return_shared_kv_states=True,
            use_cache=False,
        )
        state = read.hidden_states[-1][:, -1:]
        token = torch.tensor([[token_ids[LENGTH]]])
        for _ in range(NUM_DRAFTS):
            embedded = target.get_input_embeddings()(token)
            output = model(
                inputs_embeds=torch.cat([embedded, state], dim=-1),
                position_ids=torch.tensor([[position]]),
                shared_kv_states=read.shared_kv_states,
            )
            state = output.last_hidden_state
            token = output.logits.argmax(dim=-1)
            logits.append(output.logits[0, 0].numpy())
            states.append(state[0, 0].numpy())
            drafts.append(int(token))
    return np.stack(logits), np.stack(states), np.array(drafts, np.int32)


def make_all(
    directory: Path, token_ids: list[int], seed: int = 0, edge: str = "sfssf", wide: str = "sfsf"
) -> None:
    """Makes both targets, of such layers, and their assistants.

    The last two layers of `edge` have the keys of the last ones of their kinds before them.
    """
    shared = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    of_edge = {**SIZES, **EDGE, **shared, "hidden_size_per_layer_input": 8}
    of_wide = {**SIZES, **WIDE, "hidden_size_per_layer_input": 0}
    targets = {
        "edge": make_target(directory / "edge", token_ids, seed + 1, edge, **of_edge),
        "wide": make_target(directory / "wide", token_ids, seed + 2, wide, **of_wide),
    }
    both = {"edge": {**EDGE, **CENTROIDS}, "wide": WIDE}
    for index, (name, target) in enumerate(targets.items(), start=seed + 3):
        own = directory / f"{name}_assistant"
        make_assistant(own, target, token_ids, index, **ASSISTANT, **both[name])


def main() -> None:
    tokenizer = make_tokenizer(HERE / "tokenizer.json")
    make_all(HERE, tokenizer.encode(TEXT).ids[:24])
    end = {"eos_token_id": [tokenizer.token_to_id(SPECIAL[1])]}
    for name in ("edge", "wide"):
        shutil.copy(HERE / "tokenizer.json", HERE / name)
        (HERE / name / "generation_config.json").write_text(json.dumps(end))
    (HERE / "tokenizer.json").unlink()
    for path in sorted(HERE.glob("*/*")):
        print(path.relative_to(HERE), path.stat().st_size)


if __name__ == "__main__":
    main()
