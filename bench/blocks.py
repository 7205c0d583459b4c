"""What a prepared block loses: a small DFlash draft is trained for a small target, and its guesses are counted.

python -m bench.blocks

While an outcome is awaited, the features of the text's last token and of those that the outcome adds are not known.
Three ways to draft after k such tokens are compared on text that neither model has seen:

    features    as just in time: the features of all tokens but the last are known
    tokens      the tokens stand in the block in place of masks
    last        the block begins with the last of them, and the others are left out (saguaro/draft/block_pass.py)

Then the engine decodes with the draft. Both models read bytes of this project's files; nothing is downloaded.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from saguaro import LLM, SamplingParams
from saguaro.measure.metrics import Summary
from saguaro.model.tiny import tiny_model, tiny_tokenizer
from saguaro.model.weights import save_tensors
from saguaro.types import RoundEvent

ROOT = Path(__file__).parent.parent
SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 288,
    "max_position_embeddings": 512,
}
N_LAYERS, TAPS, MASK, BLOCK, LENGTH = 5, (2, 3, 4), 287, 8, 192
N_DRAFT_LAYERS, D = 2, 24


@dataclass(frozen=True)
class Args:
    """How much to train, and what to decode."""

    target_steps: int = 600
    draft_steps: int = 600
    batch: int = 12
    prompts: int = 12
    max_tokens: int = 96


class Draft(torch.nn.Module):
    """A DFlash draft with gradients, over whole sequences."""

    def __init__(self) -> None:
        super().__init__()
        h, wide, n_q, n_kv = SIZES["hidden_size"], SIZES["intermediate_size"], 4 * D, 2 * D
        shapes: dict[str, tuple[int, ...]] = {"fc": (h, len(TAPS) * h), "hidden_norm": (h,), "norm": (h,)}
        for at in range(N_DRAFT_LAYERS):
            parts = {"q_proj": (n_q, h), "k_proj": (n_kv, h), "v_proj": (n_kv, h), "o_proj": (h, n_q)}
            shapes |= {f"layers.{at}.self_attn.{name}": shape for name, shape in parts.items()}
            shapes |= {f"layers.{at}.self_attn.{name}": (D,) for name in ("q_norm", "k_norm")}
            shapes |= {f"layers.{at}.mlp.{name}": (wide, h) for name in ("gate_proj", "up_proj")}
            shapes[f"layers.{at}.mlp.down_proj"] = (h, wide)
            shapes |= {f"layers.{at}.{name}": (h,) for name in ("input_layernorm", "post_attention_layernorm")}
        self.w = torch.nn.ParameterDict({name.replace(".", "/"): _new(shape) for name, shape in shapes.items()})

    def forward(
        self,
        features: Tensor,  # [B, L, F]
        x: Tensor,  # [B, A, n, h]: the embedded tokens of A blocks
        first: Tensor,  # [B, A]: position of their first token
        n_text: Tensor,  # [B, A]: positions of the text that a block sees
    ) -> Tensor:  # [B, A, n, h]
        """Hidden states of the blocks, behind the last norm."""
        b, n_blocks, n, h = x.shape
        length, x = features.shape[1], x.flatten(1, 2)
        context = F.rms_norm(F.linear(features, self._of("fc")), (h,), self._of("hidden_norm"), 1e-6)
        at = (first[..., None] + torch.arange(n)).flatten(1)
        positions = torch.cat((torch.arange(length).expand(b, -1), at), 1)
        own = torch.arange(n_blocks).repeat_interleave(n)
        sees_text = torch.arange(length) < n_text.repeat_interleave(n, 1)[..., None]
        mask = torch.cat((sees_text, (own[:, None] == own).expand(b, -1, -1)), 2)[:, None]
        for layer in range(N_DRAFT_LAYERS):
            read = F.rms_norm(x, (h,), self._of(f"layers.{layer}.input_layernorm"), 1e-6)
            x = x + self._attend(layer, read, torch.cat((context, read), 1), positions, mask)
            read = F.rms_norm(x, (h,), self._of(f"layers.{layer}.post_attention_layernorm"), 1e-6)
            gate, up = (F.linear(read, self._of(f"layers.{layer}.mlp.{name}_proj")) for name in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, self._of(f"layers.{layer}.mlp.down_proj"))
        return F.rms_norm(x, (h,), self._of("norm"), 1e-6).view(b, n_blocks, n, h)

    def save(self, folder: Path) -> None:
        """In z-lab's layout."""
        folder.mkdir()
        config = {
            **SIZES,
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "head_dim": D,
            "num_hidden_layers": N_DRAFT_LAYERS,
            "num_target_layers": N_LAYERS,
            "block_size": BLOCK,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [tap - 1 for tap in TAPS]},
        }
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {f"{name.replace('/', '.')}.weight": each.data for name, each in self.w.items()}
        save_tensors(tensors, folder / "model.safetensors")

    def _of(self, name: str) -> Tensor:
        found: Tensor = self.w[name.replace(".", "/")]
        return found

    def _attend(self, layer: int, read: Tensor, both: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        def heads(x: Tensor, name: str) -> Tensor:  # -> [B, heads, n, D]
            found = F.linear(x, self._of(f"layers.{layer}.self_attn.{name}_proj")).unflatten(2, (-1, D)).transpose(1, 2)
            own = self._of(f"layers.{layer}.self_attn.{name}_norm") if name != "v" else None
            return found if own is None else turned(F.rms_norm(found, (D,), own, 1e-6), positions[:, -x.shape[1] :])

        q, k, v = heads(read, "q"), heads(both, "k"), heads(both, "v")
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.linear(mixed.transpose(1, 2).flatten(2), self._of(f"layers.{layer}.self_attn.o_proj"))


def turned(x: Tensor, positions: Tensor) -> Tensor:  # [B, H, n, D], [B, n]
    """Rotary embedding."""
    angle = positions[:, None, :, None] * 10000.0 ** (-torch.arange(D // 2) / (D // 2))
    left, right = x.chunk(2, -1)
    return torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), -1)


def main(args: Args) -> None:
    """Train both, count guesses, decode."""
    torch.manual_seed(0)
    files = sorted(path for folder in ("saguaro", "tests") for path in (ROOT / folder).rglob("*.py"))
    held = files[::20]
    texts = [torch.tensor(list(b"\n".join(path.read_bytes() for path in part)))
             for part in ([path for path in files if path not in held], held)]  # fmt: skip
    target = tiny_model("llama", **SIZES, num_hidden_layers=N_LAYERS)
    for name, weight in target.named_parameters():
        weight.data = weight.data * 0.05 if weight.dim() == 2 else torch.ones_like(weight)
        weight.requires_grad_(name is not None)
    train_target(target, texts[0], args)
    draft = Draft()
    train_draft(draft, target, texts[0], args)
    guesses(draft, target, texts[1])
    with tempfile.TemporaryDirectory() as folder:
        target.save_pretrained(Path(folder, "target"))
        tiny_tokenizer(288).save_pretrained(Path(folder, "target"))
        draft.save(Path(folder, "draft"))
        decode(Path(folder), texts[1], args)


def train_target(target: Any, text: Tensor, args: Args) -> None:
    """Cross-entropy of the next byte."""
    target.train()
    for step, rows in trained(list(target.parameters()), text, args.target_steps, args.batch, 3e-3):
        loss = F.cross_entropy(target(rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        if step % 100 == 0 or step == args.target_steps - 1:
            print(f"target step {step}: {float(loss.detach()):.2f} nats per byte", flush=True)
    target.eval()


def train_draft(draft: Draft, target: Any, text: Tensor, args: Args) -> None:
    """Cross-entropy with the target's distribution, nearer positions more."""
    decay = 0.75 ** torch.arange(BLOCK - 1)
    for step, rows in trained(list(draft.parameters()), text, args.draft_steps, args.batch, 3e-3):
        features, laws = known(target, rows)
        first = torch.randint(8, LENGTH - BLOCK, (len(rows), 12))
        logits = said(draft, target, rows, features, first, first, 0)
        wanted = laws[torch.arange(len(rows))[:, None, None], first[..., None] + torch.arange(BLOCK - 1)]
        loss = -(wanted * logits.log_softmax(-1)).sum(-1)
        (loss * decay).mean().backward()
        if step % 100 == 0 or step == args.draft_steps - 1:
            print(f"draft step {step}: {float(loss[..., 0].detach().mean()):.2f} nats at the first mask", flush=True)


def trained(parameters: list[Any], text: Tensor, steps: int, n: int, rate: float) -> Iterator[tuple[int, Tensor]]:
    """Steps and rows of text; the step is made with the gradients that are there afterwards."""
    optimiser = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for step in range(steps):
        yield step, rows_of(text, n)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()


def rows_of(text: Tensor, n: int) -> Tensor:  # [n, L]
    """Random pieces of a text."""
    starts = torch.randint(0, len(text) - LENGTH, (n,))
    return text[starts[:, None] + torch.arange(LENGTH)]


@torch.no_grad()
def known(target: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Features of the tokens, and the target's law of the token after each."""
    found = target(rows, output_hidden_states=True)
    return torch.cat([found.hidden_states[tap] for tap in TAPS], -1), found.logits.softmax(-1)


def said(draft: Draft, target: Any, rows: Tensor, features: Tensor, first: Tensor, n_text: Tensor, k: int) -> Tensor:
    """Logits [B, A, BLOCK - 1 - k, V] at the masks of blocks that begin with 1 + k tokens from position `first` on."""
    at = (first[..., None] + torch.arange(BLOCK)).clamp(max=LENGTH - 1)
    tokens = rows[torch.arange(len(rows))[:, None, None], at]
    tokens[..., 1 + k :] = MASK
    embedded = target.get_input_embeddings().weight.detach()[tokens]
    hidden = draft(features, embedded, first, n_text)[..., 1 + k :, :]
    return F.linear(hidden, target.lm_head.weight.detach())


@torch.no_grad()
def guesses(draft: Draft, target: Any, text: Tensor) -> None:
    """How many of the first four guesses are the target's likeliest tokens, up to the first that is not."""
    torch.manual_seed(1)
    rows = rows_of(text, 64)
    features, laws = known(target, rows)
    last = torch.randint(16, LENGTH - BLOCK, (64, 12))  # position of the last token that is known
    wanted = laws.argmax(-1)[torch.arange(64)[:, None, None], last[..., None] + torch.arange(4)]
    print("guesses that are right before the first wrong one, of 4 (and the first alone), on unseen text")
    for k in (1, 2, 3):
        ways = {"features": (last, last, 0), "tokens": (last - k, last - k, k), "last": (last, last - k, 0)}
        facts = []
        for name, (first, n_text, n_known) in ways.items():
            right = said(draft, target, rows, features, first, n_text, n_known)[..., :4, :].argmax(-1) == wanted
            chain = right.long().cumprod(-1).sum(-1).float().mean()
            facts.append(f"{name} {float(chain):.2f} ({float(right[..., 0].float().mean()):.2f})")
        print(f"    {k} tokens without features before the last: {', '.join(facts)}", flush=True)


def decode(folder: Path, text: Tensor, args: Args) -> None:
    """Tokens per round of the engine, and accepted tokens by the source of a speculation."""
    starts = torch.linspace(0, len(text) - LENGTH, args.prompts).long().tolist()
    prompts: list[Any] = [text[start : start + 64].tolist() for start in starts]
    with LLM(folder / "target", device="cpu", method="ar", threads=1, kv_memory="64MiB", max_batch_rows=1) as plain:
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.max_tokens, ignore_eos=True)
            truth = [result.outputs[0].token_ids for result in plain.generate(prompts, params)]
            for method, more in (("sd", {}), ("sd", {"nodes": 12}), ("swiftspec", {}), ("swiftspec", {"nodes": 12})):
                with plain.sibling(method=method, draft=str(folder / "draft"), link="inline", **more) as llm:
                    summary, accepted = Summary(), dict[str, list[int]]()

                    def note(event: RoundEvent, accepted: dict[str, list[int]] = accepted) -> None:
                        for row in event.rows:
                            accepted.setdefault(row.source, []).append(row.k)

                    llm.engine.round.observers += [summary.add, note]
                    same = [result.outputs[0].token_ids for result in llm.generate(prompts, params)] == truth
                each = ", ".join(f"{name} {sum(ks) / len(ks):.2f} of {len(ks)}" for name, ks in accepted.items())
                shape = "trees of 12" if more else "chains"
                print(f"T={temperature:g} {method}, {shape}: {summary.tokens_per_round:.2f} tokens per round, "
                      f"{'exact' if same else 'NOT EXACT'}; accepted: {each}", flush=True)  # fmt: skip


def _new(shape: tuple[int, ...]) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.05)


if __name__ == "__main__":
    main(tyro.cli(Args))
