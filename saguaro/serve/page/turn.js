// A turn of the conversation: what was said to the model (a message, or results of tools), and its answers: one, or
// one for each method side by side, with a verdict.

import { Answer } from "/answer.js";
import { element } from "/dom.js";

const NO_RESULT = "no result was given";

export class Turn {
  // says: messages as the API has them.
  constructor(says, answers, isTrio) {
    this.says = says;
    this.answers = answers;
    this.isTrio = isTrio;
    this.isKept = false; // whether it is a part of the conversation
    this.view = element("article", isTrio ? "turn trio" : "turn");
    this.view.append(...says.map(spoken));
    this.feet = answers.map(() => element("p", "foot"));
    this.verdict = element("p", "verdict");
    if (isTrio) this.view.append(columns(answers, this.feet), this.verdict);
    else this.view.append(answers[0].view, this.feet[0]);
  }

  judge(text, kind = "") {
    this.verdict.textContent = text;
    this.verdict.className = `verdict ${kind}`.trim();
  }

  saved(hasRounds) {
    const { says, isTrio, isKept, verdict } = this;
    return {
      says,
      isTrio,
      isKept,
      answers: this.answers.map((answer) => answer.saved(hasRounds)),
      feet: this.feet.map((foot) => foot.textContent),
      verdict: [verdict.textContent, verdict.classList[1] ?? ""],
    };
  }

  static restored(saved, kind) {
    const made = new Turn(saved.says, saved.answers.map((answer) => Answer.restored(answer, kind)), saved.isTrio);
    saved.feet.forEach((text, at) => (made.feet[at].textContent = text));
    made.judge(...saved.verdict);
    made.isKept = saved.isKept;
    return made;
  }
}

function spoken({ role, content }) {
  return element("p", "user", role === "tool" ? `Result: ${content}` : content);
}

function columns(answers, feet) {
  const all = element("div", "columns");
  answers.forEach((answer, at) => {
    const column = element("section");
    column.append(element("h3", "", answer.method), answer.view, feet[at]);
    all.append(column);
  });
  return all;
}

// The messages of all turns that are kept, and then some more. Every call has a result after it, as the API wants it.
export function conversation(turns, says) {
  const messages = [];
  let calls = [];
  const say = (more) => {
    if (more[0].role !== "tool") {
      for (const { id } of calls) messages.push({ role: "tool", tool_call_id: id, content: NO_RESULT });
    }
    messages.push(...more);
  };
  for (const turn of turns.filter((one) => one.isKept)) {
    const message = turn.answers[0].message();
    say(turn.says);
    messages.push(message);
    calls = message.tool_calls ?? [];
  }
  say(says);
  return messages;
}
