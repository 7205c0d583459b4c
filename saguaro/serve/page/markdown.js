// Markdown while it is written: blocks that are complete stay as they are, only the last one is made again when text is added.
//
// A unit is a paragraph, a heading, a rule, a quote, one item of a list, one row of a table or one line of code. Where
// units share an element (items their list, rows their table, lines their code), `context` is that element.

import { element } from "/dom.js";
import { inline, Passage } from "/inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]{0,3})([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const DIVIDER = /^\|?[ \t]*:?-+:?(?:[ \t]*\|[ \t]*:?-+:?)*(?:[ \t]*\|)?$/; // of a line without spaces around it
const MAX_DEPTH = 8; // of lists and quotes in each other; deeper ones are text
const MAX_COLUMNS = 64;

export class Markdown {
  // paint(from, to): nodes of this part of the source.
  constructor(root, paint) {
    this.root = root;
    this.paint = paint;
    this.begin = 0; // of the first unit that is still open
    this.context = null; // before that unit
    this.open = []; // nodes of the open units
  }

  // The whole text so far; it may only have grown. The last line may be cut anywhere, and the line before it may become
  // the head of a table: a unit that ends there is open.
  update(text) {
    this.open.forEach((node) => node.remove());
    this.open = [];
    const lines = cut(text, this.begin);
    let { context } = this;
    for (let k = 0; k < lines.length; ) {
      const unit = next({ lines, k, context, parent: this.root, paint: this.paint, depth: 0 });
      ({ context } = unit);
      k = unit.end;
      if (k < lines.length - 2) {
        this.context = context;
        this.begin = lines[k].at;
      } else {
        this.open.push(...unit.nodes);
      }
    }
  }
}

function cut(text, at) {
  return text.slice(at).split("\n").map((line) => {
    const found = { text: line, at };
    at += line.length + 1;
    return found;
  });
}

// All units of some lines.
function fill(parent, lines, paint, depth) {
  let context = null;
  for (let k = 0; k < lines.length; ) {
    const unit = next({ lines, k, context, parent, paint, depth });
    ({ context } = unit);
    k = unit.end;
  }
}

// The unit at line k: { end: the line after it, nodes: what was appended, context: for the next unit }.
function next(here) {
  const { lines, k, context } = here, { text } = lines[k];
  if (context?.kind === "code") return codeLine(here);
  if (isBlank(lines[k])) return { end: k + 1, nodes: [], context: context?.kind === "list" ? context : null };
  if (context?.kind === "table" && text.includes("|")) return tableRow(here);
  if (FENCE.test(text)) return fence(here);
  if (HEADING.test(text)) return heading(here);
  if (RULE.test(text)) return add(here, k + 1, element("hr"));
  if (here.depth < MAX_DEPTH && QUOTE.test(text)) return quote(here);
  if (here.depth < MAX_DEPTH && ITEM.test(text)) return item(here);
  if (isTable(lines, k)) return table(here);
  return paragraph(here);
}

function add({ parent }, end, node, context = null) {
  parent.append(node);
  return { end, nodes: [node], context };
}

const isBlank = (line) => !line.text.trim();

function strip(line, n) {
  return { text: line.text.slice(n), at: line.at + n };
}

// Columns of white space before a line, and how many characters make up at most `most` of them.
function indentOf({ text }, most = Infinity) {
  let columns = 0, n = 0;
  while (columns < most && (text[n] === " " || text[n] === "\t")) {
    columns += text[n] === "\t" ? 4 : 1;
    n += 1;
  }
  return { columns, n };
}

// Whether a paragraph ends before line k.
function isInterrupted(lines, k) {
  const { text } = lines[k];
  const [, , marker, space] = ITEM.exec(text) ?? [];
  const isItem = marker && space && (/^[-*+]/.test(marker) || /^1[.)]/.test(marker));
  return [FENCE, HEADING, RULE, QUOTE].some((pattern) => pattern.test(text)) || isItem || isTable(lines, k);
}

function paragraph(here) {
  const { lines, k, paint } = here, made = element("p");
  let end = k + 1;
  while (end < lines.length && !isBlank(lines[end]) && !isInterrupted(lines, end)) end += 1;
  made.append(inline(new Passage(lines.slice(k, end).map((line) => strip(line, indentOf(line).n)), paint)));
  return add(here, end, made);
}

// Under the page's own h1 and h2.
function heading(here) {
  const { lines, k, paint } = here, [all, marks] = HEADING.exec(lines[k].text);
  const made = element(`h${Math.min(6, marks.length + 2)}`);
  const line = strip(lines[k], all.length);
  line.text = withoutClosing(line.text.trimEnd());
  made.append(inline(new Passage([line], paint)));
  return add(here, k + 1, made);
}

// `# Title ##` is `Title`.
function withoutClosing(text) {
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  return end === 0 || text[end - 1] === " " ? text.slice(0, end).trimEnd() : text;
}

function quote(here) {
  const { lines, k, paint, depth } = here, made = element("blockquote");
  let end = k, inside = [];
  for (; end < lines.length && !isBlank(lines[end]); end++) {
    const found = QUOTE.exec(lines[end].text);
    if (!found && isInterrupted(lines, end)) break;
    inside.push(strip(lines[end], found?.[0].length ?? 0));
  }
  fill(made, inside, paint, depth + 1);
  return add(here, end, made);
}

// ---- lists

function item(here) {
  const { lines, k, paint, depth } = here, [all, , marker, space] = ITEM.exec(lines[k].text);
  const width = all.length - (space.length > 4 ? space.length - 1 : 0);
  const inside = [strip(lines[k], width)], made = element("li");
  let end = k + 1;
  for (let at = end; at < lines.length; at++) {
    if (isBlank(lines[at])) {
      inside.push(strip(lines[at], lines[at].text.length));
      if (at + 1 === lines.length) end = at + 1; // it may go on
      continue;
    }
    const { columns, n } = indentOf(lines[at], width);
    const isLazy = !isBlank(lines[at - 1]) && !ITEM.test(lines[at].text) && !isInterrupted(lines, at);
    if (columns < Math.min(width, 2) && !isLazy) break;
    inside.push(strip(lines[at], n));
    end = at + 1;
  }
  fill(made, inside, paint, depth + 1);
  const list = listFor(here, marker);
  list.element.append(made);
  return { end, nodes: list.isNew ? [list.element] : [made], context: list.context };
}

// The list that goes on here, or a new one.
function listFor({ context, parent }, marker) {
  const type = marker.at(-1);
  if (context?.kind === "list" && context.type === type) return { element: context.element, context };
  const made = element(/\d/.test(marker) ? "ol" : "ul");
  if (made.tagName === "OL") made.start = parseInt(marker, 10);
  parent.append(made);
  return { element: made, context: { kind: "list", type, element: made }, isNew: true };
}

// ---- code

function fence(here) {
  const [, ticks, language] = FENCE.exec(here.lines[here.k].text);
  const box = element("div", "code"), bar = element("div", "bar"), copy = element("button", "copy", "Copy");
  const code = element("code"), pre = element("pre");
  copy.type = "button";
  bar.append(element("span", "language", language.trim().split(/\s/)[0].slice(0, 40) || "code"), copy);
  pre.append(code);
  box.append(bar, pre);
  return add(here, here.k + 1, box, { kind: "code", ticks, indent: indentOf(here.lines[here.k]).n, element: code });
}

function codeLine({ lines, k, context, paint }) {
  const { ticks, element: code } = context, { text } = lines[k], trimmed = text.trim();
  const isMarker = trimmed !== "" && [...trimmed].every((char) => char === ticks[0]);
  if (isMarker && trimmed.length >= ticks.length) return { end: k + 1, nodes: [], context: null };
  if (isMarker && k + 1 === lines.length) return { end: k + 1, nodes: [], context }; // perhaps the end, half written
  const { n } = indentOf(lines[k], context.indent);
  const hasNewline = k + 1 < lines.length;
  const made = element("span");
  made.append(paint(lines[k].at + n, lines[k].at + text.length + hasNewline));
  code.append(made);
  return { end: k + 1, nodes: [made], context };
}

// ---- tables

function isTable(lines, k) {
  const divider = lines[k + 1]?.text;
  if (!lines[k].text.includes("|") || !divider?.includes("-") || !DIVIDER.test(divider.trim())) return false;
  const n = cells(lines[k]).length;
  return n <= MAX_COLUMNS && n === cells(lines[k + 1]).length;
}

// The cells of a row, as lines without white space around them.
function cells(line) {
  const found = [], { text } = line;
  let begin = indentOf(line).n;
  if (text[begin] === "|") begin += 1;
  for (let at = begin; at <= text.length; at++) {
    if (text[at] === "\\") at += 1;
    else if (at === text.length || text[at] === "|") {
      const cell = text.slice(begin, at);
      if (at < text.length || cell.trim()) found.push({ text: cell.trim(), at: line.at + begin + indentOf({ text: cell }).n });
      begin = at + 1;
    }
  }
  return found;
}

function table(here) {
  const { lines, k } = here, box = element("div", "table"), made = element("table"), body = element("tbody");
  const sides = cells(lines[k + 1]).map(({ text }) => (text.endsWith(":") ? (text.startsWith(":") ? "center" : "end") : ""));
  const head = element("thead");
  head.append(row(lines[k], "th", sides, here.paint));
  made.append(head, body);
  box.append(made);
  return add(here, k + 2, box, { kind: "table", sides, element: body });
}

function tableRow({ lines, k, context, paint }) {
  const made = row(lines[k], "td", context.sides, paint);
  context.element.append(made);
  return { end: k + 1, nodes: [made], context };
}

function row(line, tag, sides, paint) {
  const made = element("tr"), found = cells(line);
  for (let at = 0; at < Math.max(found.length, sides.length); at++) {
    const cell = element(tag, sides[at] ?? "");
    if (found[at]) cell.append(inline(new Passage([found[at]], paint)));
    made.append(cell);
  }
  return made;
}
