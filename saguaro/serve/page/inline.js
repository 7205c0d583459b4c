// Markdown inside a paragraph: code, links, emphasis. In one pass from left to right, in linear time.
//
// Every character that is shown is painted by its place in the source, so that it keeps its mark.

import { element } from "/dom.js";
import { lastUpTo } from "/marks.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const SPACE = /\s/;
const BARE = /https?:\/\/[^\s<>`"|\\*]+/y;
const ANGLED = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const BREAK = /<br ?\/?>/iy;
const TAGS = { "*": ["em", "strong"], _: ["em", "strong"], "~": ["", "del"] };
const MAX_DEPTH = 8; // of emphasis in emphasis
const MAX_TARGET = 2000; // characters of a link's address

// Lines [{text, at}] as one text that knows where in the source each character is.
export class Passage {
  constructor(lines, paint) {
    this.text = lines.map((line) => line.text).join("\n");
    this.lines = lines;
    this.starts = []; // of each line in text
    this.source = paint;
    let start = 0;
    for (const { text } of lines) {
      this.starts.push(start);
      start += text.length + 1; // with its newline
    }
  }

  // Nodes of text[from, to). Lines that follow each other in the source are painted in one go.
  paint(from, to) {
    const found = document.createDocumentFragment();
    let begin = null, end = null; // in the source, not painted yet
    for (let k = lastUpTo(this.starts, from); k < this.lines.length && this.starts[k] < to; k++) {
      const { text, at } = this.lines[k], shift = at - this.starts[k];
      const a = Math.max(from, this.starts[k]) + shift, b = Math.min(to + shift, at + text.length + 1);
      if (a !== end) {
        if (begin !== null) found.append(this.source(begin, end));
        begin = a;
      }
      end = b;
    }
    if (begin !== null) found.append(this.source(begin, end));
    return found;
  }
}

// The address of a link that may be followed; null for any other.
export function safeLink(address) {
  try {
    const url = new URL(address);
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null; // not an address, or one without a scheme
  }
}

// Nodes of passage.text[from, to).
export function inline(passage, from = 0, to = passage.text.length, hasLinks = true) {
  const items = scan(passage.text, from, to, hasLinks);
  pair(items.filter((item) => item.kind === "run"));
  return build(passage, items);
}

// ---- what there is: text, code, links, breaks, runs of delimiters

function scan(text, from, to, hasLinks) {
  const items = [], ticks = tickRuns(text, from, to);
  let brackets = []; // open: { at, n: items before it, plain }
  let plain = from; // where text begins that is not in an item yet
  const put = (upTo, next, item) => {
    if (plain < upTo) items.push({ kind: "text", a: plain, b: upTo });
    if (item) items.push(item);
    return (plain = next);
  };
  const match = (pattern, at) => {
    pattern.lastIndex = at;
    return pattern.exec(text);
  };
  for (let at = from; at < to; ) {
    const char = text[at];
    if (char === "\\" && at + 1 < to && ESCAPABLE.test(text[at + 1])) {
      put(at, at + 1);
      at += 2;
    } else if (char === "`") {
      const { n, end } = ticks.get(at);
      at = end === null ? at + n : put(at, end + n, codeSpan(text, at + n, end));
    } else if (char === "[" && hasLinks) {
      brackets.push({ at, n: items.length, plain });
      at += 1;
    } else if (char === "]" && brackets.length) {
      const open = brackets.pop(), target = text[at + 1] === "(" ? readTarget(text, at + 2, to) : null;
      const href = target && safeLink(target.address);
      if (!href) {
        at += 1;
        continue;
      }
      items.length = open.n;
      plain = open.plain;
      const isImage = open.at > plain && text[open.at - 1] === "!"; // no image is loaded: a link to it
      put(open.at - isImage, target.end, { kind: "link", a: open.at + 1, b: at, href, isImage });
      at = target.end;
      brackets = []; // no link inside a link
    } else if (char === "h" && hasLinks && !/\w/.test(text[at - 1] ?? "") && match(BARE, at)) {
      const end = bareEnd(text, at, Math.min(BARE.lastIndex, to)), href = safeLink(text.slice(at, end));
      at = href ? put(at, end, { kind: "link", a: at, b: end, href }) : end;
    } else if (char === "<" && hasLinks && match(ANGLED, at)) {
      const end = ANGLED.lastIndex, href = safeLink(text.slice(at + 1, end - 1));
      at = href ? put(at, end, { kind: "link", a: at + 1, b: end - 1, href }) : end;
    } else if (char === "<" && match(BREAK, at)) {
      at = put(at, BREAK.lastIndex, { kind: "break" });
    } else if (char in TAGS) {
      let end = at;
      while (end < to && text[end] === char) end += 1;
      const run = delimiters(text, at, end, from, to);
      at = run ? put(at, end, run) : end;
    } else {
      at += 1;
    }
  }
  put(to, to);
  return items;
}

// Runs of backticks by their place: how long each is, and where the next of the same length begins.
function tickRuns(text, from, to) {
  const found = new Map(), after = new Map(); // after: from length to the nearest run on the right
  for (let end = to; end > from; ) {
    if (text[end - 1] !== "`") {
      end -= 1;
      continue;
    }
    let at = end;
    while (at > from && text[at - 1] === "`") at -= 1;
    found.set(at, { n: end - at, end: after.get(end - at) ?? null });
    after.set(end - at, at);
    end = at;
  }
  return found;
}

function codeSpan(text, a, b) {
  const isPadded = b - a > 2 && text[a] === " " && text[b - 1] === " ";
  return { kind: "code", a: a + isPadded, b: b - isPadded };
}

// The address after `](` and where its `)` has been passed; null if this is no link.
function readTarget(text, at, to) {
  const limit = Math.min(to, at + MAX_TARGET);
  let depth = 0, end = at;
  for (; end < limit && !(text[end] === ")" && depth === 0); end++) {
    if (text[end] === "(") depth += 1;
    if (text[end] === ")") depth -= 1;
  }
  if (end >= limit) return null;
  const [address, ...title] = text.slice(at, end).trim().split(/\s+/);
  if (title.length && !/^["'(]/.test(title[0])) return null;
  return { address: address.replace(/^<|>$/g, ""), end: end + 1 };
}

// Without the punctuation that ends a sentence, or a parenthesis around it.
function bareEnd(text, at, end) {
  let surplus = 0; // of closing parentheses
  for (let k = at; k < end; k++) surplus += (text[k] === ")") - (text[k] === "(");
  for (; /[.,;:!?)'_~\]]/.test(text[end - 1]); end--) {
    if (text[end - 1] !== ")") continue;
    if (surplus <= 0) break;
    surplus -= 1;
  }
  return end;
}

function delimiters(text, at, end, from, to) {
  const n = end - at, char = text[at];
  if (n > 3 || (char === "~" && n !== 2)) return null;
  const before = at > from ? text[at - 1] : " ", after = end < to ? text[end] : " ";
  const left = !SPACE.test(after) && (!PUNCTUATION.test(after) || SPACE.test(before) || PUNCTUATION.test(before));
  const right = !SPACE.test(before) && (!PUNCTUATION.test(before) || SPACE.test(after) || PUNCTUATION.test(after));
  const isWord = char === "_"; // snake_case is no emphasis
  const opens = left && (!isWord || !right || PUNCTUATION.test(before));
  const closes = right && (!isWord || !left || PUNCTUATION.test(after));
  return { kind: "run", char, a: at, n, opens, closes, before: [], behind: [] };
}

// ---- which delimiters belong together

// `before`: tags that a run closes; `behind`: tags that it opens; n: delimiters that remain text.
function pair(runs) {
  const open = { "*": [], _: [], "~": [] }; // places of runs that may be closed
  runs.forEach((run, place) => {
    const mine = open[run.char];
    while (run.closes && run.n && mine.length) {
      const opener = runs[mine.at(-1)], n = Math.min(2, opener.n, run.n), tag = TAGS[run.char][n - 1];
      for (const others of Object.values(open)) while (others.at(-1) > mine.at(-1)) others.pop();
      opener.behind.unshift(tag);
      opener.n -= n;
      run.before.push(tag);
      run.n -= n;
      run.a += n;
      if (!opener.n) mine.pop();
    }
    if (run.opens && run.n) mine.push(place);
  });
}

function build(passage, items) {
  const root = document.createDocumentFragment(), path = [root];
  let a = 0, b = 0; // text that is not painted yet: neighbours are painted in one go
  const flush = () => {
    if (a < b) path.at(-1).append(passage.paint(a, b));
    a = b;
  };
  const put = (from, to) => {
    if (from !== b) flush();
    if (a === b) a = from;
    b = to;
  };
  for (const item of items) {
    if (item.kind === "text") {
      put(item.a, item.b);
    } else if (item.kind === "run") {
      if (item.before.length) flush();
      item.before.forEach(() => path.pop());
      if (item.n) put(item.a, item.a + item.n);
      if (item.behind.length) flush();
      for (const tag of item.behind) {
        path.push(path.length > MAX_DEPTH ? path.at(-1) : path.at(-1).appendChild(element(tag)));
      }
    } else {
      flush();
      path.at(-1).append(ATOMS[item.kind](passage, item));
    }
  }
  flush();
  return root;
}

const ATOMS = {
  break: () => element("br"),
  code: (passage, { a, b }) => {
    const made = element("code");
    made.append(passage.paint(a, b));
    return made;
  },
  link,
};

function link(passage, { a, b, href, isImage }) {
  const made = element("a", "", isImage ? "image: " : "");
  Object.assign(made, { href, title: href, target: "_blank", rel: "noopener noreferrer" });
  made.append(inline(passage, a, b, false));
  return made;
}
