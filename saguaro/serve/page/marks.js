// Tokens and their origins, and the texts that are made of them.
//
//   raw        <think>Add them.</think>The sum is **4**.      all tokens, in order
//   reasoning         [       ]                               a Channel: text, and where each part of it is in raw
//   content                            [              ]

import { element, textNodes } from "/dom.js";

export class Marks {
  constructor() {
    this.raw = "";
    this.starts = []; // of each token in raw
    this.origins = [];
    this.rounds = []; // index of each token's round
  }

  add(token, round) {
    if (!token.text) return; // a part of a character: the token that completes it has the text
    this.starts.push(this.raw.length);
    this.origins.push(token.origin);
    this.rounds.push(round);
    this.raw += token.text;
  }

  // raw[from, to) as nodes: a span.round for each round, with a span.token for each token.
  paint(from, to) {
    const found = document.createDocumentFragment();
    let group = null;
    for (let at = lastUpTo(this.starts, from); from < to; at++) {
      const end = Math.min(to, this.starts[at + 1] ?? this.raw.length);
      const text = this.raw.slice(from, end), word = text.trimStart(); // the space before it is no part of the mark
      if (group?.dataset.at !== String(this.rounds[at])) {
        group = element("span", "round");
        group.dataset.at = this.rounds[at];
        found.append(group);
      }
      group.append(text.slice(0, text.length - word.length));
      if (word) {
        const token = element("span", `token ${this.origins[at]}`);
        token.append(...textNodes(word));
        group.append(token);
      }
      from = end;
    }
    return found;
  }
}

// Index of the last of these rising places that is not after `place`.
export function lastUpTo(places, place) {
  let low = 0, high = places.length;
  while (low + 1 < high) {
    const middle = (low + high) >> 1;
    if (places[middle] <= place) low = middle;
    else high = middle;
  }
  return low;
}

// A text the server makes of the tokens: content, or reasoning.
export class Channel {
  constructor(marks) {
    this.marks = marks;
    this.text = "";
    this.parts = []; // [start in text, start in raw; -1: in no token]
    this.read = 0; // raw up to here is in some part
  }

  // More text. Markup between the texts is left out by the server, so it is looked for behind what is known.
  add(text) {
    if (!text) return;
    const raw = this.marks.raw.indexOf(text, this.read);
    const [start, before] = this.parts.at(-1) ?? [0, null];
    const goesOn = before === -1 ? raw === -1 : before !== null && raw === before + this.text.length - start;
    if (!goesOn) this.parts.push([this.text.length, raw]);
    if (raw !== -1) this.read = raw + text.length;
    this.text += text;
  }

  // What is kept of it; without rounds there are no tokens.
  saved(hasRounds) {
    return { text: this.text, parts: hasRounds ? this.parts : [[0, -1]] };
  }

  // text[from, to) as nodes.
  paint(from, to) {
    const found = document.createDocumentFragment();
    for (const [at, [start, raw]] of this.parts.entries()) {
      const a = Math.max(from, start), b = Math.min(to, this.parts[at + 1]?.[0] ?? this.text.length);
      if (a >= b) continue;
      if (raw === -1) found.append(...textNodes(this.text.slice(a, b)));
      else found.append(this.marks.paint(a - start + raw, b - start + raw));
    }
    return found;
  }
}

// The tokens as they are, a block for each line: nothing that was shown is made again.
export class TokenView {
  constructor(root, marks) {
    this.root = root;
    this.marks = marks;
    this.shown = 0;
    this.line = null;
    this.rest = document.createTextNode("");
  }

  // `text`: what the server made of the tokens. Half a character at its end may be in no token.
  update(text) {
    const { raw } = this.marks;
    this.rest.remove();
    while (this.shown < raw.length) {
      const newline = raw.indexOf("\n", this.shown), end = newline === -1 ? raw.length : newline + 1;
      if (!this.line) this.root.append((this.line = element("div", "line")));
      this.line.append(this.marks.paint(this.shown, end));
      if (newline !== -1) this.line = null;
      this.shown = end;
    }
    this.rest.data = text.startsWith(raw) ? text.slice(raw.length) : "";
    if (this.rest.data) (this.line ?? this.root).append(this.rest);
  }
}
