"""Hit rate of each planner, at equal budgets, on recorded rounds of a real pair.

python -m bench.planners record --draft drop:14 --prompts DATA/*.jsonl --out rounds.npz
python -m bench.planners compare --rounds rounds.npz --json planners.json --png docs/planners.png

Recording decodes just in time without planning. It stores, for every round of every row, the draft's candidates along
the speculation and the outcome. Comparing runs each planner on these rounds in their order: it plans, then learns from
the outcome, as in the engine. It starts untrained and never sees a round before planning it.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from bench.workloads import read_prompts
from saguaro import LLM, SamplingParams
from saguaro.algo.calibrate import Recorded, fit_acceptance_rate, fit_power_law, hit_curve
from saguaro.algo.planning import Ahead, Planned
from saguaro.draft.planner import Planner, make_planner
from saguaro.link.inline import Inline
from saguaro.types import Outcome

PLANNERS = ("uniform", "geometric", "general", "joint")
FACTS = ("tokens", "length", "candidates", "scores", "k", "bonus")


@dataclass(frozen=True)
class Record:
    """Decode prompts and keep every round."""

    draft: str = "drop:14"
    prompts: tuple[Path, ...] = ()
    """JSONL files; without any, our own prompts."""
    num_prompts: int = 128
    max_tokens: int = 96
    batch: int = 16
    lookahead: int = 4
    most: int = 24
    """The largest budget that will be compared: so many candidates are kept."""
    rounds: int = 3000
    """Rounds of one row, for each temperature and rule."""
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    rules: tuple[str, ...] = ("shared", "rejection")
    device: str = "auto"
    dtype: str = "float32"
    out: Path = Path("rounds.npz")


@dataclass(frozen=True)
class Compare:
    """Let every planner plan for recorded rounds."""

    rounds: tuple[Path, ...] = (Path("rounds.npz"),)
    budgets: tuple[int, ...] = (4, 8, 16, 24)
    step: int = 16
    """Rows planned for at a time."""
    json: Path | None = None
    png: Path | None = None


@dataclass
class Recorder:
    """A planner that plans nothing and stores rounds."""

    is_fixed = False
    kept: list[dict[str, torch.Tensor]] = field(default_factory=list)
    _ahead: Ahead | None = None

    def plan(self, ahead: Ahead, budget: int) -> Planned:
        """An empty plan."""
        self._ahead = ahead
        none = torch.full((len(ahead.slots), budget), -1)
        return Planned(ahead.slots, none, none + 1)

    def learn(self, outcome: Outcome) -> None:
        """Store the rows that had a full-length speculation in flight."""
        ahead = self._ahead
        if ahead is None:
            return
        places = {slot: index for index, slot in enumerate(ahead.slots.tolist())}
        full = outcome.length == ahead.tokens.shape[1]
        decided = [index for index, slot in enumerate(outcome.slots.tolist()) if slot in places and full[index]]
        rows = [places[int(outcome.slots[index])] for index in decided]
        facts = {name: getattr(ahead, name)[rows] for name in FACTS[:4]}
        self.kept.append({**facts, "k": outcome.n_accepted[decided], "bonus": outcome.bonus[decided]})
        self._ahead = None

    @property
    def n_rounds(self) -> int:
        """Rounds stored."""
        return sum(len(one["k"]) for one in self.kept)


def record(args: Record) -> None:
    """Write an .npz file with one group per rule and temperature."""
    settings: dict[str, Any] = {"device": args.device, "dtype": args.dtype, "lookahead": args.lookahead}
    llm = LLM(method="ar", **settings)
    encode = llm.engine.tokenizer.encode_chat
    texts = read_prompts(list(args.prompts), args.num_prompts)
    prompts = [encode([{"role": "user", "content": text}]) for text in texts]
    found: dict[str, np.ndarray[Any, Any]] = {}
    for rule in args.rules:
        drafted = llm.sibling(
            method="ssd-uniform",  # a method of branches: its planner is replaced
            draft=args.draft,
            fallback="draft",
            verification=rule,
            link="inline",
            budget=args.most,
            prepare="always",
        )
        for temperature in args.temperatures:
            recorder = Recorder()
            assert isinstance(drafted.engine.round.draft, Inline)
            drafted.engine.round.draft.side.planner = recorder
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.max_tokens)
            for start in range(0, len(prompts), args.batch):
                if recorder.n_rounds < args.rounds:
                    drafted.generate(prompts[start : start + args.batch], params)
            for name in FACTS:
                found[f"{rule}/{temperature}/{name}"] = torch.cat([one[name] for one in recorder.kept]).numpy()
            k = found[f"{rule}/{temperature}/k"]
            print(f"{rule} {temperature}: {len(k)} rounds, {1 + k.mean():.3f} tokens per round", flush=True)
    np.savez_compressed(args.out, allow_pickle=False, **found)


def compare(args: Compare) -> None:
    """Print a table of hit rates; optionally write it and a plot."""
    rounds = {name: values for path in args.rounds for name, values in np.load(path, allow_pickle=False).items()}
    groups = sorted({name.rsplit("/", 1)[0] for name in rounds})
    table: list[dict[str, Any]] = []
    for group in groups:
        facts = {name: torch.from_numpy(rounds[f"{group}/{name}"]) for name in FACTS}
        rule, temperature = group.split("/")
        fits = fit(facts)
        print(f"{rule:9} T={temperature}  " + ", ".join(f"{name} {value:.3f}" for name, value in fits.items()))
        for budget in args.budgets:
            rates = {name: hit_rate(facts, name, budget, args.step) for name in PLANNERS}
            n, tokens = len(facts["k"]), 1 + facts["k"].double().mean().item()
            row = {"rule": rule, "temperature": float(temperature), "budget": budget, "rounds": n}
            table.append({**row, "tokens_per_round": tokens, **fits, **rates})
            shown = "  ".join(f"{name} {rate:.3f}" for name, rate in rates.items())
            print(f"{rule:9} T={temperature}  M={budget:2}  {shown}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(table, indent=1))
    if args.png is not None:
        plot(table, args.png)


def fit(facts: dict[str, torch.Tensor]) -> dict[str, float]:
    """Acceptance rate a, and the power law of misses: exponent r, factor, error of the fit."""
    k, candidates, lookahead = facts["k"], facts["candidates"], facts["tokens"].shape[1]
    rows = torch.arange(len(k))
    here = candidates[rows, k]  # [R, C]
    said = torch.where(k < lookahead, facts["tokens"][rows, k.clamp(max=lookahead - 1)], -1)
    is_other = here != said[:, None]  # the speculated token cannot be the bonus
    is_bonus = (here == facts["bonus"][:, None]) & is_other
    rank = (is_other.long().cumsum(1) * is_bonus).sum(1) - 1
    rounds = Recorded(k, rank, lookahead, candidates.shape[2])
    law = fit_power_law(hit_curve(rank, rounds.N))
    return {"a": fit_acceptance_rate(rounds), "r": law.r, "scale": law.scale, "rms": law.rms}


def hit_rate(facts: dict[str, torch.Tensor], name: str, budget: int, step: int) -> float:
    """Share of rounds whose outcome was among the planned ones."""
    planner = make_planner(name)
    assert planner is not None
    n = len(facts["k"])
    hits = [_hits(facts, planner, slice(start, min(start + step, n)), budget) for start in range(0, n, step)]
    return sum(hits) / n


def _hits(facts: dict[str, torch.Tensor], planner: Planner, rows: slice, budget: int) -> int:
    part = {name: values[rows] for name, values in facts.items()}
    slots = torch.arange(len(part["k"]))
    tokens, length, candidates, scores = (part[name] for name in FACTS[:4])
    ahead = Ahead(slots, tokens, length, candidates, scores, is_primary=torch.ones_like(slots, dtype=torch.bool))
    planned = planner.plan(ahead, budget)
    planner.learn(Outcome(slots, part["length"], part["k"], part["bonus"]))
    is_hit = (planned.k == part["k"][:, None]) & (planned.token == part["bonus"][:, None])
    return int(is_hit.any(1).sum())


def plot(table: list[dict[str, Any]], path: Path) -> None:
    """Hit rate against budget, one panel for each rule and temperature."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rules = sorted({row["rule"] for row in table}, reverse=True)
    temperatures = sorted({row["temperature"] for row in table})
    figure, axes = plt.subplots(
        len(rules), len(temperatures), figsize=(3.6 * len(temperatures), 3 * len(rules)), sharey=True, squeeze=False
    )
    for i, rule in enumerate(rules):
        for j, temperature in enumerate(temperatures):
            rows = [row for row in table if (row["rule"], row["temperature"]) == (rule, temperature)]
            for name in PLANNERS:
                axes[i][j].plot([row["budget"] for row in rows], [row[name] for row in rows], "o-", label=name)
            axes[i][j].set_title(f"{rule}, temperature {temperature:g}", fontsize=10)
            axes[i][j].grid(alpha=0.3)
            axes[i][j].set_xlabel("outcomes prepared (M)")
        axes[i][0].set_ylabel("hit rate")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    command = tyro.cli(Record | Compare)
    record(command) if isinstance(command, Record) else compare(command)
