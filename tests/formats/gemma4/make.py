"""Makes the tiny random Gemma 4 checkpoints and assistants beside this file, and what they compute.

    python -m venv venv && venv/bin/pip install torch transformers==5.24.0
    venv/bin/python tests/formats/gemma4/make.py

`wide` has the switches of 31B and 12B, `edge` those of E2B and E4B; `wide_assistant` has a dense
head, `edge_assistant` an ordered one. Each directory is what `save_pretrained` writes, in bfloat16,
and `expected.npz` in float32. Of a target: logits of `token_ids`, and the states after the final
norm. Of an assistant: after the first `length` tokens, with the target's cache of them and the
newest token after them, logits and states of a chain of argmax drafts, at two fixed positions.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "huggingface"))
from make import SPECIAL, TEXT, make_tokenizer, randomize  # noqa: E402

VOCAB_SIZE = 320
WINDOW = 8
LENGTH = 20
NUM_DRAFTS = 3

SHARED = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
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


def fill(model: transformers.PreTrainedModel, num_tokens: int, seed: int) -> None:
    """Random weights, and scalars of layers that are not one."""
    randomize(model, num_tokens, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    for name, scalar in model.named_buffers():
        if name.endswith("layer_scalar"):
            scalar.data = 0.5 + torch.rand(scalar.shape, generator=generator)


def save(name: str, model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Returns the model as it is read again, in float32."""
    directory = HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    return type(model).from_pretrained(directory, dtype=torch.float32).eval()


def make_target(name: str, seed: int, **options: object) -> transformers.Gemma4ForCausalLM:
    config = transformers.Gemma4TextConfig(final_logit_softcapping=30.0, **options)
    model = transformers.Gemma4ForCausalLM(config)
    fill(model, 283, seed)
    model = save(name, model)
    tokenizer = make_tokenizer(HERE / name / "tokenizer.json")
    end = tokenizer.token_to_id(SPECIAL[1])
    (HERE / name / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    token_ids = tokenizer.encode(TEXT).ids
    with torch.no_grad():
        output = model(torch.tensor([token_ids[:24]]), output_hidden_states=True, use_cache=False)
    np.savez_compressed(
        HERE / name / "expected.npz",
        token_ids=np.array(token_ids[:24], np.int32),
        logits=output.logits[0].numpy(),
        states=output.hidden_states[-1][0].numpy(),
    )
    return model


def make_assistant(
    name: str, target: transformers.Gemma4ForCausalLM, seed: int, ordered: bool, **options: object
) -> None:
    size = target.config.hidden_size
    text = transformers.Gemma4TextConfig(
        **{**options, "vocab_size_per_layer_input": 0},
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        hidden_size_per_layer_input=0,
    )
    config = transformers.Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=size,
        use_ordered_embeddings=ordered,
        num_centroids=20,
        centroid_intermediate_top_k=4,
    )
    model = transformers.Gemma4AssistantForCausalLM(config)
    fill(model, 283, seed)
    if ordered:
        ordering = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
        model.masked_embedding.token_ordering.data = ordering
    model = save(name, model)

    found = [draft(model, target, position) for position in (LENGTH, LENGTH - 1)]
    logits, states, token_ids = (np.stack(arrays) for arrays in zip(*found, strict=True))
    np.savez_compressed(
        HERE / name / "expected.npz",
        length=LENGTH,
        positions=np.array([LENGTH, LENGTH - 1], np.int32),
        logits=logits,
        states=states,
        token_ids=token_ids,
    )


def draft(
    model: transformers.Gemma4AssistantForCausalLM,
    target: transformers.Gemma4ForCausalLM,
    position: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns logits [K, V], states [K, Ht] and the K drafts, each the argmax of its row."""
    token_ids = np.load(HERE / "edge" / "expected.npz")["token_ids"]
    logits, states, drafts = [], [], []
    with torch.no_grad():
        read = target(
            torch.tensor([token_ids[:LENGTH].tolist()]),
            output_hidden_states=True,
            return_shared_kv_states=True,
            use_cache=False,
        )
        state = read.hidden_states[-1][:, -1:]
        token = torch.tensor([[int(token_ids[LENGTH])]])
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


def main() -> None:
    shape = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 2}
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    edge = make_target(
        "edge",
        1,
        **shape,
        **EDGE,
        num_hidden_layers=5,
        layer_types=[kinds[x] for x in "sfssf"],
        num_kv_shared_layers=2,  # they read layers 2 and 1
        hidden_size_per_layer_input=8,
        use_double_wide_mlp=True,
    )
    wide = make_target(
        "wide",
        2,
        **shape,
        **WIDE,
        num_hidden_layers=4,
        layer_types=[kinds[x] for x in "sfsf"],
        hidden_size_per_layer_input=0,
    )
    make_assistant("edge_assistant", edge, 3, True, **EDGE)
    make_assistant("wide_assistant", wide, 4, False, **WIDE)
    for path in sorted(HERE.glob("*/*")):
        print(path.relative_to(HERE), path.stat().st_size)


if __name__ == "__main__":
    main()
