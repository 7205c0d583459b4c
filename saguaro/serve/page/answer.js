// One answer: its rounds and figures, and its view: the text (Markdown), or the tokens as they are. Both are marked.

import { Calls } from "/calls.js";
import { element } from "/dom.js";
import { Markdown } from "/markdown.js";
import { Channel, Marks, TokenView } from "/marks.js";
import { describe } from "/words.js";

const MAX_SHARE = 0.2; // of the time may go into making views while text is coming

export class Answer {
  constructor(method, kind = "text") {
    this.method = method;
    this.rounds = []; // as the server tells them
    this.ids = []; // of all tokens
    this.marks = new Marks();
    this.content = new Channel(this.marks);
    this.reasoning = new Channel(this.marks);
    this.calls = new Calls();
    this.finish = null;
    this.current = null; // index of the round that is looked at
    this.began = performance.now();
    this.first = this.last = null; // milliseconds from the request to its first and its last tokens
    this.notBefore = 0; // when the view may be made again
    this.view = element("div", "answer");
    this.view.answer = this;
    this.showAs(kind);
  }

  // ---- what comes

  add(chunk) {
    const choice = chunk.choices[0];
    if (!choice) return; // the last chunk tells usage
    for (const round of choice.speculation ?? []) {
      this.last = performance.now() - this.began;
      this.first ??= this.last;
      this.play(round);
    }
    this.reasoning.add(choice.delta.reasoning_content ?? choice.delta.reasoning ?? "");
    this.content.add(choice.delta.content ?? "");
    this.calls.add(choice.delta.tool_calls ?? []);
    this.finish = choice.finish_reason ?? this.finish;
  }

  play(round) {
    for (const token of round.tokens) {
      this.ids.push(token.id);
      this.marks.add(token, this.rounds.length);
    }
    this.rounds.push(round);
  }

  // No more will come: now the rounds can be walked through.
  end() {
    this.render(true);
    this.view.tabIndex = 0;
    this.view.role = "group";
    this.view.ariaLabel = `Answer, ${this.method}. Arrow keys walk through its ${this.rounds.length} rounds, Enter enters the tree of a round, T switches the view.`;
  }

  isEmpty() {
    return !this.content.text && !this.calls.list.length;
  }

  // As the API has it in a conversation.
  message() {
    const calls = this.calls.list.length ? { tool_calls: this.calls.message() } : {};
    return { role: "assistant", content: this.content.text || (this.calls.list.length ? null : ""), ...calls };
  }

  // A token in words, for a verdict.
  token(at) {
    const token = this.rounds.flatMap((round) => round.tokens)[at];
    return token ? `“${token.text || token.id}”` : "ended";
  }

  // ---- the view

  // Show the text or the tokens.
  showAs(kind) {
    this.kind = kind;
    this.parts = kind === "tokens" ? [this.tokenPart()] : [this.reasoningPart(), this.textPart(), this.callPart()];
    this.view.replaceChildren(...this.parts.map((part) => part.element));
    this.render(true);
  }

  // Bring the view up to date; false if it was made so lately that it must wait: a block of any length may be its last.
  render(must = false) {
    const began = performance.now();
    if (!must && began < this.notBefore) return false;
    this.parts.forEach((part) => part.update());
    if (this.current !== null) this.mark();
    void this.view.offsetHeight; // layout is a part of what a view costs
    const now = performance.now();
    this.notBefore = now + (now - began) * (1 / MAX_SHARE - 1);
    return true;
  }

  tokenPart() {
    const root = element("div", "tokens"), view = new TokenView(root, this.marks);
    return { element: root, update: () => view.update(this.content.text) };
  }

  textPart() {
    const root = element("div", "text");
    const view = new Markdown(root, (from, to) => this.content.paint(from, to));
    return { element: root, update: () => view.update(this.content.text) };
  }

  // Open while the model thinks, closed when it answers; after that as the reader has it.
  reasoningPart() {
    const root = element("div"), box = element("details", "reasoning"), text = element("div", "text");
    const view = new Markdown(text, (from, to) => this.reasoning.paint(from, to));
    let isThinking = false;
    box.ariaLabel = "Reasoning";
    box.append(element("summary", "", "Reasoning"), text);
    const update = () => {
      if (!this.reasoning.text) return;
      const thinks = this.isEmpty() && !this.finish;
      if (thinks !== isThinking) box.open = isThinking = thinks;
      if (!box.isConnected) root.append(box);
      view.update(this.reasoning.text);
    };
    return { element: root, update };
  }

  callPart() {
    const root = element("div", "calls");
    return { element: root, update: () => this.calls.draw(root, this.finish !== null) };
  }

  look(at) {
    this.view.querySelectorAll(".current").forEach((one) => one.classList.remove("current"));
    this.current = Math.max(0, Math.min(at, this.rounds.length - 1));
    return this.mark();
  }

  // Mark the current round; in the text it may be in several places, the first of which is returned.
  mark() {
    const found = this.view.querySelectorAll(`[data-at="${this.current}"]`);
    for (const one of found) {
      one.classList.add("current");
      one.title = describe(this.rounds[this.current]);
    }
    return found[0];
  }

  figures() {
    const drafted = this.rounds.filter((round) => round.hit !== null);
    const prepared = drafted.some((round) => round.hit || round.draft?.prepare);
    const later = this.ids.length - (this.rounds[0]?.tokens.length ?? 0); // the first tokens waited for the prompt
    return {
      rate: later > 0 && this.last > this.first ? later / ((this.last - this.first) / 1000) : null,
      perRound: this.rounds.length ? this.ids.length / this.rounds.length : null,
      hits: prepared ? drafted.filter((round) => round.hit).length / drafted.length : null,
      first: this.first,
    };
  }

  // ---- what is kept of it

  saved(hasRounds) {
    const { method, finish, first, last } = this;
    const texts = { content: this.content.saved(hasRounds), reasoning: this.reasoning.saved(hasRounds) };
    return { method, finish, first, last, ...texts, calls: this.calls.list, rounds: hasRounds ? this.rounds : [] };
  }

  static restored(saved, kind) {
    const made = new Answer(saved.method, kind);
    saved.rounds.forEach((round) => made.play(round));
    for (const name of ["content", "reasoning"]) Object.assign(made[name], saved[name]);
    made.calls.list = saved.calls;
    Object.assign(made, { finish: saved.finish, first: saved.first, last: saved.last });
    made.end();
    return made;
  }
}
