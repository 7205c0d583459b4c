// One answer: its tokens on the page, marked by origin and grouped by round, and its figures.
// Text from the model or the user becomes text nodes only.

const ORIGINS = {
  cache: "prepared in time",
  draft: "drafted just in time",
  ngram: "repeated from the text",
  random: "guessed at random",
  target: "the target's own",
};

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

export class Answer {
  constructor(method) {
    this.method = method;
    this.rounds = []; // as the server tells them
    this.ids = []; // of all tokens
    this.content = "";
    this.finish = null;
    this.current = null; // index of the round that is looked at
    this.began = performance.now();
    this.first = this.last = null; // milliseconds from the request to its first and its last tokens
    this.view = element("div", "answer");
    this.view.answer = this;
  }

  add(chunk) {
    const choice = chunk.choices[0];
    if (!choice) return; // the last chunk tells usage
    this.content += choice.delta.content ?? "";
    this.finish = choice.finish_reason ?? this.finish;
    for (const round of choice.speculation ?? []) this.play(round);
  }

  play(round) {
    this.last = performance.now() - this.began;
    this.first ??= this.last;
    const group = element("span", "round");
    group.dataset.at = this.rounds.length;
    for (const token of round.tokens) {
      this.ids.push(token.id);
      const word = token.text.trimStart(); // the space before it is no part of the mark
      group.append(token.text.slice(0, token.text.length - word.length));
      if (word) group.append(element("span", `token ${token.origin}`, word));
    }
    this.rounds.push(round);
    group.title = describe(round);
    this.view.append(group);
  }

  // No more will come: half a character at the end may be in no token's text; then the rounds can be walked through.
  end() {
    const shown = this.view.textContent;
    if (this.content.length > shown.length && this.content.startsWith(shown)) {
      this.view.append(this.content.slice(shown.length));
    }
    this.view.tabIndex = 0;
    this.view.role = "group";
    this.view.ariaLabel = `Answer, ${this.method}. Arrow keys walk through its ${this.rounds.length} rounds.`;
  }

  // A token in words, for a verdict.
  token(at) {
    const token = this.rounds.flatMap((round) => round.tokens)[at];
    return token ? `“${token.text || token.id}”` : "ended";
  }

  look(at) {
    this.current = Math.max(0, Math.min(at, this.rounds.length - 1));
    this.view.querySelector(".current")?.classList.remove("current");
    this.view.querySelector(`[data-at="${this.current}"]`)?.classList.add("current");
  }

  figures() {
    const drafted = this.rounds.filter((round) => round.hit !== null);
    const prepared = drafted.some((round) => round.hit || round.draft?.prepare);
    const later = this.ids.length - (this.rounds[0]?.tokens.length ?? 0); // the first tokens waited for the prompt
    return {
      rate: later > 0 ? later / ((this.last - this.first) / 1000) : null,
      perRound: this.rounds.length ? this.ids.length / this.rounds.length : null,
      hits: prepared ? drafted.filter((round) => round.hit).length / drafted.length : null,
      first: this.first,
    };
  }
}

const SHAPES = {
  rate: (value) => value.toFixed(1),
  perRound: (value) => value.toFixed(2),
  hits: (value) => `${Math.round(100 * value)} %`,
  first: (value) => (value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(2)} s`),
};

// A figure as people read it.
export function spell(name, value) {
  return value === null ? "–" : SHAPES[name](value);
}

// All figures of an answer in a line.
export function line(answer) {
  const { rate, perRound, hits, first } = answer.figures();
  const speed = `${spell("rate", rate)} tok/s, ${spell("perRound", perRound)} per round`;
  return `${speed}${hits === null ? "" : `, ${spell("hits", hits)} hits`}, first token after ${spell("first", first)}`;
}

// What a round did, in words.
export function describe(round) {
  const gained = round.tokens.length === 1 ? "one token" : `${round.tokens.length} tokens`;
  if (!round.drafted.length) return `Round ${round.round}: nothing was drafted; the target gave ${gained}.`;
  const text = round.drafted.map((token) => token.text).join("");
  const how = round.hit ? "prepared in time (hit)" : ORIGINS[round.source] ?? round.source;
  const accepted = `${round.accepted} of ${round.drafted.length} accepted`;
  return `Round ${round.round}: “${text}” was ${how}; ${accepted}, ${gained} gained.`;
}

// Where answers first differ: null, or the index of the token.
export function difference(one, other) {
  const n = Math.max(one.ids.length, other.ids.length);
  for (let at = 0; at < n; at++) if (one.ids[at] !== other.ids[at]) return at;
  return null;
}
